"""The torch backend: an engine on a separate thread, fed by an inbox.

`submit` and `stop` put commands into the inbox and return; the thread takes them between two steps. Besides the inbox
only the engine's counters are shared: the thread writes and `stats` reads them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from trtmesh.chassis.errors import BackendFailed, ModelUnusable, TrtmeshError, WorkerLost
from trtmesh.chassis.progress import tell_progress
from trtmesh.engine.admission import admit, check_queue
from trtmesh.engine.backend import (
    AdapterLoad,
    BackendInfo,
    BackendStats,
    Deliver,
    Fail,
    HeldAdapter,
    StepOutput,
    Submission,
)
from trtmesh.engine.backends.torch.drafts.drafting import DraftCounts
from trtmesh.engine.backends.torch.guided.grammars import GuideCounts
from trtmesh.engine.backends.torch.model.weights import weight_files
from trtmesh.engine.backends.torch.sampling.token_rules import TokenRules
from trtmesh.engine.backends.torch.sequence import Sequence, is_shared, sequences_of
from trtmesh.engine.backends.torch.settings import TorchSettings
from trtmesh.engine.kv_memory import KvMemory
from trtmesh.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from trtmesh.engine.backends.torch.engine import Engine
    from trtmesh.engine.backends.torch.guided.grammars import Grammar
    from trtmesh.engine.backends.torch.loading import Loaded
    from trtmesh.engine.backends.torch.memory.adapters import LoadedAdapter, Slots
    from trtmesh.engine.backends.torch.model.prompt_tables import PromptTable
    from trtmesh.engine.backends.torch.parallel.ranks import Ranks
    from trtmesh.engine.backends.torch.sampling.continuation import GivenDrafts

log = logging.getLogger(__name__)

LOST_SECONDS = 5.0
"""Time for the engine's thread to end all sequences, unless the thread waits for an ended rank."""

NO_DRAFTS, NO_GUIDES = DraftCounts(), GuideCounts()

Command = Callable[["Engine"], object]
"""Runs on the engine's thread, between two steps."""


class TorchBackend:
    """Implements Backend for a model of transformers."""

    def __init__(self, model_dir: Path, settings: TorchSettings) -> None:
        """`model_dir` holds config.json and safetensors files."""
        self._model_dir = model_dir
        self._settings = settings
        self._wake = threading.Condition()
        # Guarded by `_wake`.
        self._inbox: list[Command] = []
        self._incoming_sequences = 0
        self._incoming_tokens = 0
        self._closing = False
        self._broken = False
        self._reported = False
        self._loss: Exception | None = None
        self._lanes = count(-1, -1)
        self._thread: threading.Thread | None = None

    async def start(self, deliver: Deliver, fail: Fail) -> BackendInfo:
        self._deliver, self._fail = deliver, fail
        loaded: Future[Loaded] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(loaded,), name="torch-engine", daemon=True
        )
        self._thread.start()
        self._loaded = await asyncio.wrap_future(loaded)
        return self._loaded.info

    def submit(self, item: Submission) -> None:
        info, scheduler = self._loaded.info, self._loaded.engine.scheduler
        rule = admit(item, info)
        token_rules = TokenRules(
            item.config, normalize_log_probs=self._settings.normalize_log_probs
        )
        if item.config.prompt_tuning:
            self._loaded.tables.embedding.check(item.config.prompt_tuning, rule.prompt_tokens)
        if item.config.draft:
            self._loaded.draft_logits.check(item.config.draft, item.config.beam_search)
        with self._wake:
            if self._broken:
                raise WorkerLost("the engine has failed and takes no more items")
            # A single number: a sequence starting between two looks would count twice.
            present = scheduler.present_sequences + self._incoming_sequences
            check_queue(item, info, present, len(scheduler.running))
            sequences = sequences_of(item, self._keys_of(item), rule, token_rules)
            if item.config.lora:
                adapter = self._loaded.adapters.hold(item.config.lora, len(sequences))
                for sequence in sequences:
                    sequence.give_adapter(adapter)
            self._prepare(item, sequences)
            self._incoming_sequences += len(sequences)
            self._incoming_tokens += _pending_tokens(sequences)
            self._send(partial(self._add, keys=item.keys, sequences=sequences))

    def _prepare(self, item: Submission, sequences: list[Sequence]) -> None:
        """Begins to make the parts of the item that take long. The sequences must enter the inbox before `_wake` is
        released. Raises QueueFull or InvalidField."""

        def done(part: PromptTable | Grammar | GivenDrafts | TrtmeshError) -> None:
            self._send(lambda engine: engine.prepared(sequences, part))

        config, holders, leases = item.config, len(sequences), []
        tuning, guided, draft = config.prompt_tuning, config.guided_decoding, config.draft
        try:
            if tuning:
                leases.append(self._loaded.tables.read(item.request_id, tuning, holders, done))
            if draft and draft.logits:
                leases.append(self._loaded.draft_logits.read(item.request_id, draft, holders, done))
            if guided:
                grammars = self._loaded.grammars
                assert grammars
                leases.append(grammars.compile(item.request_id, guided, holders, done))
        except TrtmeshError:
            for sequence in sequences:
                sequence.let_go()
            for lease in leases:
                # Of the sequences, which do not have it yet.
                for _ in sequences:
                    lease.give_back()
            raise
        for sequence in sequences:
            for lease in leases:
                sequence.await_part(lease)

    def _keys_of(self, item: Submission) -> SequenceOf[int]:
        """Keys of the sequences to compute: the item's sequences, the lanes of a beam search, or a prompt alone."""
        if item.sender_lease_id and is_shared(item):
            return item.keys[:1]
        width = item.config.beam_search.beam_width
        if width == 1:
            return item.keys
        # Below zero: the service knows no such sequences.
        return [item.keys[0], *(next(self._lanes) for _ in range(width - 1))]

    def stop(self, keys: SequenceOf[int], reason: int) -> None:
        stopped = tuple(keys)
        self._send(lambda engine: engine.stop(stopped, reason))

    def _send(self, command: Command) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def stats(self) -> BackendStats:
        engine = self._loaded.engine
        scheduler, adapters = engine.scheduler, self._loaded.adapters
        used = scheduler.pool.used_blocks
        drafts = engine.drafting.counts if engine.drafting else NO_DRAFTS
        guides = self._loaded.grammars.counts if self._loaded.grammars else NO_GUIDES
        return BackendStats(
            step_count=engine.step_count,
            captured_steps=engine.captured_steps,
            running_sequences=len(scheduler.running),
            waiting_sequences=scheduler.waiting_sequences + self._incoming_sequences,
            pending_prompt_tokens=scheduler.pending_prompt_tokens + self._incoming_tokens,
            total_blocks=scheduler.pool.total_blocks,
            used_blocks=used,
            free_blocks=scheduler.pool.total_blocks - used,
            lacks_blocks=scheduler.lacks_blocks,
            computed_prompt_tokens=scheduler.computed_prompt_tokens,
            reused_prompt_tokens=scheduler.reused_prompt_tokens,
            generated_tokens=engine.generated_tokens,
            paused_sequences=scheduler.paused_sequences,
            preemptions=scheduler.preemptions,
            new_blocks=scheduler.new_blocks,
            reused_blocks=scheduler.reused_blocks,
            host_blocks=scheduler.pool.host_blocks,
            used_host_blocks=scheduler.pool.used_host_blocks,
            device_memory_bytes=self._loaded.device.allocated_bytes(),
            pinned_memory_bytes=self._loaded.cache.pinned_bytes,
            adapter_slots=scheduler.adapters.slots,
            free_adapter_slots=scheduler.adapters.free,
            evictable_adapter_slots=scheduler.adapters.evictable,
            adapter_host_bytes=adapters.store.limits.host_bytes,
            used_adapter_host_bytes=adapters.store.used_bytes,
            adapter_loads=adapters.store.loads,
            adapter_evictions=adapters.store.evictions,
            adapter_hits=scheduler.adapters.hits,
            adapter_load_seconds=adapters.load_seconds,
            drafts=drafts.drafts,
            draft_tokens=drafts.draft_tokens,
            accepted_draft_tokens=drafts.accepted_tokens,
            accepted_by_position=tuple(drafts.accepted_by_position),
            draft_failures=drafts.failures,
            guide_compile_seconds=guides.compile_seconds,
            guide_mask_seconds=guides.mask_seconds,
            guides_compiled=guides.compiled,
            guides_kept=guides.kept,
            late_masks=guides.late_masks,
            guide_refusals={
                "not_compiled": guides.not_compiled,
                "not_followed": guides.not_followed,
                "queue_full": guides.queue_full,
            },
        )

    def adapters(self) -> SequenceOf[HeldAdapter]:
        return self._loaded.adapters.states

    def load_adapter(self, load: AdapterLoad) -> None:
        self._loaded.adapters.load(load)

    def unload_adapter(self, number: int, version: str, *, unpin: bool) -> None:
        self._loaded.adapters.unload(number, version, unpin=unpin)

    def kv_memory(self) -> KvMemory | None:
        return self._loaded.kv_memory

    def reserve(self, lease_id: str, tokens: int, block_hashes: SequenceOf[int]) -> None:
        hashes = tuple(block_hashes)
        self._send(lambda engine: engine.reserve(lease_id, tokens, hashes))

    def hand_over(self, key: int, lease_id: str) -> None:
        self._send(lambda engine: engine.hand_over(key, lease_id))

    def adopt(self, lease_id: str) -> None:
        self._send(lambda engine: engine.adopt(lease_id))

    def drop(self, lease_id: str) -> None:
        self._send(lambda engine: engine.drop(lease_id))

    async def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            # A thread waiting on a GPU for a lost rank may never end.
            await asyncio.to_thread(self._thread.join, LOST_SECONDS if self._loss else None)
        # Frees weights and cache; a failed start left none.
        loaded: Loaded | None = self.__dict__.pop("_loaded", None)
        if loaded is not None:
            await asyncio.to_thread(loaded.engine.close)
            await asyncio.to_thread(loaded.tables.close)
            await asyncio.to_thread(loaded.draft_logits.close)
            if loaded.grammars:
                await asyncio.to_thread(loaded.grammars.close)
            await asyncio.to_thread(loaded.adapters.close)

    def _run(self, loaded: Future[Loaded]) -> None:
        """The thread: loads, then steps until closed."""
        # From now on a cancelled start cannot cancel the future, so setting a result never fails.
        loaded.set_running_or_notify_cancel()
        try:
            # Before the import of torch, which takes seconds.
            files = weight_files(self._model_dir)
            adapters = _prefetched(self._settings.adapters.prefetch_directory)
            tell_progress("imports PyTorch")
            from trtmesh.engine.backends.torch.loading import load_engine

            result = load_engine(self._model_dir, files, self._settings)
            result.adapters.connect(self)
            result.adapters.prefetch(adapters)
        except BaseException as error:  # noqa: BLE001 - raised where the start is awaited
            loaded.set_exception(error)
            return
        engine, ranks = result.engine, result.ranks
        engine.deliver = self._deliver
        loaded.set_result(result)
        del result
        if ranks:
            ranks.watch(self._lose)
        try:
            self._serve(engine, ranks)
        except BaseException as error:
            log.exception("the engine failed")
            # A panic of a library in Rust is no Exception.
            known = error if isinstance(error, Exception) else BackendFailed(repr(error))
            self._break(engine, known)
        finally:
            if ranks:
                ranks.close()

    def run(self, act: Callable[[Slots], object]) -> None:
        self._send(lambda engine: act(engine.scheduler.adapters))

    def lost(self, adapter: LoadedAdapter, error: TrtmeshError) -> None:
        self._send(lambda engine: engine.lost_adapter(adapter, error))

    def _serve(self, engine: Engine, ranks: Ranks | None) -> None:
        while True:
            commands, closing = self._take_commands(idle=not engine.scheduler.has_work)
            for command in commands:
                command(engine)
            if self._loss:
                raise self._loss
            if closing:
                engine.stop_all(pb.FINISH_REASON_CANCELLED)
            self._deliver_if_any(engine.leftover())
            if closing:
                return
            step = engine.launch() if engine.scheduler.has_work else None
            while step:
                # Commands find no step in flight.
                following = None if self._has_commands else engine.launch_next(step)
                output = engine.collect(step)
                if ranks and ranks.loss:
                    # Nothing read since can be trusted.
                    raise ranks.loss
                self._deliver(output)
                step = following

    @property
    def _has_commands(self) -> bool:
        """Without the lock: a command coming at this moment waits for a step more."""
        return bool(self._inbox) or self._closing or self._loss is not None

    def _take_commands(self, *, idle: bool) -> tuple[list[Command], bool]:
        """The commands since the last call, and whether to close; waits while idle."""
        with self._wake:
            while idle and not (self._inbox or self._closing or self._loss):
                self._wake.wait()
            commands, self._inbox = self._inbox, []
            return commands, self._closing

    def _add(self, engine: Engine, keys: tuple[int, ...], sequences: list[Sequence]) -> None:
        tokens = _pending_tokens(sequences)
        # Atomic: `submit` counts the sequences exactly once.
        with self._wake:
            engine.add(keys, sequences)
            self._incoming_sequences -= len(sequences)
            self._incoming_tokens -= tokens

    def _break(self, engine: Engine, error: Exception) -> None:
        """Ends every sequence with an error, then tells the service."""
        with self._wake:
            self._broken = True
        commands, _ = self._take_commands(idle=False)
        try:
            for command in commands:
                command(engine)
            # Not their fault: another worker can continue them.
            engine.fail_all(WorkerLost(f"the engine failed: {error}"))
            self._deliver_if_any(engine.leftover())
        except Exception:
            log.exception("the sequences of a failed engine could not all be ended")
        self._report(error)

    def _lose(self, error: Exception) -> None:
        """A rank has ended. Called on another thread than the engine's. The engine's may wait for the rank, on a GPU
        for good."""
        with self._wake:
            self._broken, self._loss = True, error
            self._wake.notify()
        assert self._thread
        self._thread.join(LOST_SECONDS)
        if self._thread.is_alive():
            self._report(error)

    def _report(self, error: Exception) -> None:
        """Reports the failure of the engine to the service, once."""
        with self._wake:
            is_first, self._reported = not self._reported, True
        if is_first:
            self._fail(error)

    def _deliver_if_any(self, output: StepOutput | None) -> None:
        if output:
            self._deliver(output)


def _pending_tokens(sequences: list[Sequence]) -> int:
    return sum(sequence.pending_prompt_tokens for sequence in sequences)


def _prefetched(directory: Path | None) -> list[Path]:
    """The directories of the adapters to load before the first item. Raises ModelUnusable."""
    if directory is None:
        return []
    try:
        return sorted(each for each in directory.iterdir() if each.is_dir())
    except OSError as error:
        raise ModelUnusable(
            f"adapters.prefetch_directory is {directory}, which cannot be read: {error.strerror}"
        ) from error
