"""A backend without a model: parameters set time, capacity, prefix reuse and faults; a hash makes the tokens.

Steps run on the event loop's timers with absolute deadlines, so their rate does not drift, although a step may be a
millisecond early or late. A thread would be more punctual but costs a handover per step. With a step time of 0 every
turn of the loop is a step, and the loop still polls its sockets in between.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence as SequenceOf
from functools import partial
from hashlib import blake2b

from trtmesh.chassis import adapter_content
from trtmesh.chassis.errors import BackendFailed, HandoffFailed
from trtmesh.engine.admission import admit, check_queue
from trtmesh.engine.backend import (
    AdapterLoad,
    BackendInfo,
    BackendStats,
    Capabilities,
    Content,
    Deliver,
    Fail,
    HeldAdapter,
    StateKind,
    Submission,
)
from trtmesh.engine.backends.simulated.adapters import SimulatedAdapters
from trtmesh.engine.backends.simulated.engine import SimulatedEngine, new_scheduler
from trtmesh.engine.backends.simulated.handoffs import WrittenHandoffs
from trtmesh.engine.backends.simulated.kv_content import LAYERS, KvContent
from trtmesh.engine.backends.simulated.sequence import sequences_of
from trtmesh.engine.backends.simulated.settings import SimulatedSettings
from trtmesh.engine.backends.simulated.side_channel import SideChannel
from trtmesh.engine.backends.simulated.states import KeptStates, RemoteState
from trtmesh.engine.backends.simulated.tokens import TokenSource
from trtmesh.engine.kv_memory import KvMemory
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1.generation_fields import supported_by

log = logging.getLogger(__name__)

ADAPTER_FIELDS = frozenset({"lora.id", "lora.name", "lora.version"})
"""Fields with an effect where there are slots for adapters."""

SUPPORTED_FIELDS = supported_by("simulated") - ADAPTER_FIELDS
"""Fields with an effect on tokens, their number, their order or the report."""

CRASH_EXIT_STATUS = 70


class SimulatedBackend:
    """Implements Backend. Everything happens on the event loop's thread."""

    def __init__(self, settings: SimulatedSettings) -> None:
        self._settings = settings
        self._info = _info(settings)
        cache, ids = settings.kv_cache, settings.vocabulary
        self._content = KvContent(cache)
        self._adapters = SimulatedAdapters(settings.adapters)
        scheduler = new_scheduler(
            self._adapters,
            total_blocks=cache.total_blocks,
            tokens_per_block=cache.tokens_per_block,
            prefill_tokens_per_step=settings.timing.prefill_tokens_per_step,
            max_batch_size=settings.limits.max_batch_size,
            adapter_slots=settings.adapters.slots,
        )
        self._adapters.slots = scheduler.adapters
        self._states: KeptStates | None = None
        if settings.handoff.by == "state":
            self._states = KeptStates(scheduler, self._content, settings.handoff.kept_seconds)
        handoffs = self._states or WrittenHandoffs(scheduler, self._content)
        source = TokenSource(ids.first_token_id, ids.last_token_id, ids.end_id, ids.end_probability)
        self._engine = SimulatedEngine(scheduler, self._adapters, handoffs, source)
        self._items = 0
        self._step_ends_at = 0.0
        self._timer: asyncio.Handle | None = None
        self._flush: asyncio.Handle | None = None
        self._frozen = False
        self._side_channel = SideChannel(self._give_away)

    async def start(self, deliver: Deliver, fail: Fail) -> BackendInfo:
        self._deliver, self._fail = deliver, fail
        self._loop = asyncio.get_running_loop()
        await asyncio.sleep(self._settings.timing.load_ms / 1000)
        if self._states:
            self._states.port = await self._side_channel.start()
        return self._info

    def submit(self, item: Submission) -> None:
        engine = self._engine
        rule = admit(item, self._info)
        state = RemoteState.read(item.handoff_state) if item.handoff_state else None
        running = len(engine.scheduler.running)
        check_queue(item, self._info, engine.present_sequences, running)
        lora = item.config.lora
        adapter = self._adapters.store.hold(lora, len(item.keys)) if lora else None
        self._items += 1
        sequences = sequences_of(item, rule, adapter)
        for sequence in sequences:
            sequence.fails = self._items == self._settings.faults.fail_item
        engine.add(sequences)
        if state and sequences[0].lives:
            seconds = self._settings.handoff.transfer_ms / 1000
            pulled = partial(self._pulled, item.keys[0], state)
            self._side_channel.fetch(state, seconds, pulled)
        self._go_on()

    def stop(self, keys: SequenceOf[int], reason: int) -> None:
        if self._frozen:
            return
        self._engine.stop(list(keys), reason)
        self._go_on()

    def stats(self) -> BackendStats:
        engine, scheduler = self._engine, self._engine.scheduler
        store, slots = self._adapters.store, scheduler.adapters
        return BackendStats(
            step_count=engine.step_count,
            running_sequences=len(scheduler.running),
            waiting_sequences=engine.waiting_sequences,
            pending_prompt_tokens=scheduler.pending_prompt_tokens,
            total_blocks=scheduler.pool.total_blocks,
            used_blocks=scheduler.pool.used_blocks,
            free_blocks=scheduler.pool.free_blocks,
            lacks_blocks=scheduler.lacks_blocks,
            computed_prompt_tokens=scheduler.computed_prompt_tokens,
            reused_prompt_tokens=scheduler.reused_prompt_tokens,
            generated_tokens=engine.generated_tokens,
            adapter_slots=slots.slots,
            free_adapter_slots=slots.free,
            evictable_adapter_slots=slots.evictable,
            adapter_host_bytes=store.limits.host_bytes if slots.slots else 0,
            used_adapter_host_bytes=store.used_bytes,
            adapter_loads=store.loads,
            adapter_evictions=store.evictions,
            adapter_hits=slots.hits,
            adapter_load_seconds=self._adapters.load_seconds,
        )

    def adapters(self) -> SequenceOf[HeldAdapter]:
        return self._adapters.store.states

    def load_adapter(self, load: AdapterLoad) -> None:
        self._adapters.load(load, self._go_on)

    def unload_adapter(self, number: int, version: str, *, unpin: bool) -> None:
        self._adapters.unload(number, version, unpin=unpin)
        self._go_on()

    def kv_memory(self) -> KvMemory | None:
        return None if self._states else self._content.memory

    def reserve(self, lease_id: str, tokens: int, block_hashes: SequenceOf[int]) -> None:
        self._engine.reserve(lease_id, tokens, block_hashes)
        self._go_on()

    def hand_over(self, key: int, lease_id: str) -> None:
        if self._frozen:
            return
        self._engine.hand_over(key, lease_id)
        self._go_on()

    def adopt(self, lease_id: str) -> None:
        self._engine.adopt(lease_id)
        self._go_on()

    def drop(self, lease_id: str) -> None:
        self._engine.drop(lease_id)
        self._go_on()

    def _give_away(self, lease_id: str) -> bool:
        """Another process pulls KV."""
        if self._frozen or not self._states:
            return False
        is_kept = self._states.pull(lease_id)
        self._go_on()
        return is_kept

    def _pulled(self, key: int, state: RemoteState, error: HandoffFailed | None) -> None:
        """The library has the KV of a sequence, or cannot have it."""
        if not self._frozen:
            self._engine.pulled(key, error or Content(state.tokens, state.digest))
            self._go_on()

    async def close(self) -> None:
        await self._side_channel.close()
        if self._states:
            self._states.close()
        for handle in (self._timer, self._flush):
            if handle:
                handle.cancel()
        self._adapters.close()
        self._engine.stop_all(pb.FINISH_REASON_CANCELLED)
        self._deliver_leftover()

    def _go_on(self) -> None:
        """Starts stepping if there is work; delivers ends between steps in the next turn."""
        if self._frozen:
            return
        self._engine.changed = True
        if self._flush is None:
            self._flush = self._loop.call_soon(self._flush_leftover)
        if self._timer is None and self._engine.has_work:
            # In the next turn, so that items of one message start together.
            self._step_ends_at = time.monotonic()
            self._timer = self._loop.call_soon(self._begin_step)

    def _flush_leftover(self) -> None:
        self._flush = None
        self._deliver_leftover()

    def _deliver_leftover(self) -> None:
        output = self._engine.leftover()
        if output:
            self._deliver(output)

    def _begin_step(self) -> None:
        timing, faults, engine = self._settings.timing, self._settings.faults, self._engine
        prompt_tokens = engine.begin()
        seconds = (timing.step_ms + timing.step_ms_per_sequence * len(engine.batch)) / 1000
        if timing.prefill_tokens_per_second:
            seconds += prompt_tokens / timing.prefill_tokens_per_second
        if faults.slow_after_steps and engine.step_count >= faults.slow_after_steps:
            seconds *= faults.slow_factor
        now = time.monotonic()
        # Delays beyond a step are lost, not made up in a burst.
        self._step_ends_at = max(self._step_ends_at, now - seconds) + seconds
        delay = self._step_ends_at - now
        if delay < 0.0005:
            self._timer = self._loop.call_soon(self._finish_step)
        elif engine.computes_sent_kv:
            self._timer = self._loop.call_later(delay / LAYERS, self._finish_layer)
        else:
            self._timer = self._loop.call_later(delay, self._finish_step)

    def _finish_layer(self) -> None:
        """Announces the KV of a layer while the others are computed."""
        left = self._engine.finish_layer()
        self._deliver_leftover()
        delay = max(0.0, self._step_ends_at - time.monotonic()) / left
        then = self._finish_layer if left > 1 else self._finish_step
        self._timer = self._loop.call_later(delay, then)

    def _finish_step(self) -> None:
        self._timer = None
        self._deliver(self._engine.finish())
        if self._strike():
            return
        if self._engine.has_work:
            self._begin_step()

    def _strike(self) -> bool:
        """Executes the fault of this step, if any; returns whether stepping is over."""
        faults, step = self._settings.faults, self._engine.step_count
        if step == faults.crash_after_steps:
            log.critical("dying because simulated.faults.crash_after_steps says so")
            os._exit(CRASH_EXIT_STATUS)
        if step == faults.freeze_after_steps:
            log.error("freezing because simulated.faults.freeze_after_steps says so")
            self._frozen = True
        if step == faults.break_after_steps:
            self._frozen = True
            self._fail(
                BackendFailed(
                    "the backend broke because simulated.faults.break_after_steps says so"
                )
            )
        return self._frozen


def _info(settings: SimulatedSettings) -> BackendInfo:
    ids, limits, cache = settings.vocabulary, settings.limits, settings.kv_cache
    adapters = settings.adapters
    content = repr((ids.first_token_id, ids.last_token_id, ids.end_id))
    content += repr((ids.end_probability, ids.size))
    return BackendInfo(
        backend="simulated",
        model="simulated",
        computation={},
        model_fingerprint="simulated-" + blake2b(content.encode(), digest_size=8).hexdigest(),
        tokenizer_fingerprint=ids.tokenizer_fingerprint,
        vocabulary_size=ids.size,
        max_sequence_tokens=limits.max_sequence_tokens,
        max_batch_size=limits.max_batch_size,
        max_sequences_per_item=limits.max_sequences_per_item,
        max_queue_size=limits.max_queue_size,
        tokens_per_block=cache.tokens_per_block,
        total_blocks=cache.total_blocks,
        supported_fields=SUPPORTED_FIELDS | (ADAPTER_FIELDS if adapters.slots else frozenset()),
        capabilities=Capabilities(
            deterministic=True,
            resumes_exactly=True,
            stops_single_sequences=True,
            roles=(epb.WORKER_ROLE_MIXED, epb.WORKER_ROLE_PREFILL, epb.WORKER_ROLE_DECODE),
            max_adapters=adapters.slots,
        ),
        max_adapter_bytes=adapter_content.MAX_ADAPTER_BYTES if adapters.slots else 0,
        end_ids=(ids.end_id,),
        state_kind=(
            StateKind("simulated", settings.handoff.compatibility)
            if settings.handoff.by == "state"
            else None
        ),
        data_type=pb.DATA_TYPE_FP32,
    )
