"""A backend for an engine elsewhere, over the engine's own contract; nothing is computed here.

Every sequence is a call with an own id, so each can be stopped alone. Messages within a turn of the event loop make a
step. Blocks of a stopped sequence are free once the engine confirms the abort; the end waits for this for
`Patience.abort_seconds`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import grpc
from trtmesh.chassis.addresses import ForeignAddress
from trtmesh.chassis.errors import (
    BackendFailed,
    HandoffFailed,
    InvalidRequest,
    ModelUnusable,
    SettingsError,
    TrtmeshError,
    WorkerLost,
)
from trtmesh.chassis.json_text import load_json
from trtmesh.engine.admission import admit, check_queue
from trtmesh.engine.backend import (
    BackendInfo,
    BackendStats,
    Capabilities,
    Deliver,
    Fail,
    KvEvent,
    Submission,
)
from trtmesh.engine.backends.foreign.connection import Connection
from trtmesh.engine.backends.foreign.contract import Contract, EngineFacts, LoadRecord
from trtmesh.engine.backends.foreign.identity import Identity, identity_of, name_of
from trtmesh.engine.backends.foreign.kv_events import ForeignBlocks
from trtmesh.engine.backends.foreign.sequence import Figures, ForeignSequence
from trtmesh.engine.backends.foreign.settings import ForeignSettings
from trtmesh.engine.backends.foreign.sglang import SglangContract
from trtmesh.engine.backends.foreign.trtllm import TrtllmContract
from trtmesh.engine.backends.foreign.vllm import VllmContract
from trtmesh.engine.guides import check_new, plain
from trtmesh.engine.ledger import Ledger
from trtmesh.v1 import generation_pb2 as pb

log = logging.getLogger(__name__)

CONTRACTS: dict[str, type[VllmContract | SglangContract | TrtllmContract]] = {
    kind.engine: kind for kind in (VllmContract, SglangContract, TrtllmContract)
}

MISSED_ANSWERS = 3
"""Reads of the load without an answer, after which the engine counts as dead."""

MAX_BATCH_SIZE = 256
"""Sequences computed at once, where the engine does not tell."""

MAX_QUEUE_SIZE = 1024
"""Sequences of all routers together that may wait in the engine."""

MAX_SEQUENCES_PER_ITEM = 16
"""Most sequences of an item; each is a call."""

RETRY_SECONDS = 0.2
"""Pause between two attempts to reach an engine, and between two subscriptions to KV events."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Times for an engine to answer."""

    connect_seconds: float = 10.0
    """At the start; afterwards the process exits."""
    poll_seconds: float = 0.25
    """Interval between reads of the load, or of the health of an engine without load reports."""
    answer_seconds: float = 5.0
    """For such a read; after MISSED_ANSWERS reads without an answer the engine counts as dead."""
    abort_seconds: float = 1.0
    """To end a stopped sequence; afterwards the sequence ends without it."""
    state_seconds: float = 25.0
    """For a prefill engine to keep KV for another engine; vLLM's own limit is 30 s by default."""


class EngineLoad:
    """The newest record, and the steps that the records prove.

    A frozen engine goes on answering with the same figures. So a change of what it runs, or of the memory in use,
    counts as a step, beside each delivery of own tokens. Its queue, which grows before a frozen engine, does not count.
    """

    def __init__(self) -> None:
        self.record: LoadRecord | None = None
        self.steps = 0

    def take(self, record: LoadRecord) -> None:
        before, self.record = self.record, record
        if before is None or (record.running, record.used_share) != (
            before.running,
            before.used_share,
        ):
            self.steps += 1

    def counts(self, own: int) -> tuple[int, int]:
        """Running and waiting sequences, with `own` live ones of this process among them."""
        if self.record is None:
            return own, 0
        waiting = self.record.waiting
        return max(self.record.running, own - waiting), waiting


class ForeignBackend:
    """Implements Backend. Everything happens on the event loop's thread."""

    def __init__(
        self, settings: ForeignSettings, max_message_bytes: int, patience: Patience = Patience()
    ) -> None:
        address = _parsed(settings.address)
        self._settings = settings
        self._patience = patience
        self._connection = Connection(address, max_message_bytes, patience.answer_seconds)
        self._contract: Contract = CONTRACTS[address.engine](self._connection)
        self._ledger = Ledger[ForeignSequence]()
        self._calls: dict[int, asyncio.Task[None]] = {}
        """The reader of each live sequence, by key."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._keepers: list[asyncio.Task[None]] = []
        self._flush: asyncio.Handle | None = None
        self._load = EngineLoad()
        self._figures = Figures()
        self._steps = 0
        self._info: BackendInfo
        self._deliver: Deliver
        self._fail: Fail

    async def start(self, deliver: Deliver, fail: Fail) -> BackendInfo:
        self._deliver, self._fail = deliver, fail
        facts = await self._reach()
        self._info = self._info_of(facts, await self._identity_of(facts))
        log.info(
            "%s serves %s: %s, %d tokens a sequence, %d sequences at once",
            *(self._connection.address, facts.model, facts.data_type or "an unknown type"),
            *(self._info.max_sequence_tokens, self._info.max_batch_size),
        )
        self._keepers.append(asyncio.create_task(self._watch_load()))
        if self._info.tokens_per_block:
            self._keepers.append(asyncio.create_task(self._follow_kv_events()))
        for keeper in self._keepers:
            keeper.add_done_callback(self._on_keeper_done)
        return self._info

    def submit(self, item: Submission) -> None:
        # An engine that does not tell its end ids has the tokenizer's among them.
        rule = admit(item if self._info.end_ids else replace(item, end_ids=()), self._info)
        self._check(item)
        present = len(self._ledger.live)
        check_queue(item, self._info, present, min(present, self._info.max_batch_size))
        for index, key in enumerate(item.keys):
            call_id = f"{item.request_id or 'item'}-{item.batch_index}-{secrets.token_hex(8)}"
            sequence = ForeignSequence(
                item, index, rule, call_id, self._figures, self._patience.state_seconds
            )
            self._ledger.add(key, sequence)
            if sequence.over:
                self._end(sequence)
            else:
                self._calls[key] = asyncio.create_task(self._generate(sequence))

    def stop(self, keys: Sequence[int], reason: int) -> None:
        for key in keys:
            sequence = self._ledger.live.get(key)
            if sequence is None:
                continue
            if not sequence.over:
                sequence.stopped(reason)
            # Also for an end that the engine has yet to confirm: it may never do so.
            self._abort_soon(sequence)

    def stats(self) -> BackendStats:
        info, record, figures = self._info, self._load.record, self._figures
        running, waiting = self._load.counts(len(self._ledger.live))
        used = round(record.used_share * info.total_blocks) if record else 0
        return BackendStats(
            step_count=self._steps + self._load.steps,
            running_sequences=running,
            waiting_sequences=waiting,
            pending_prompt_tokens=max(
                figures.pending_prompt_tokens, record.waiting_prompt_tokens if record else 0
            ),
            total_blocks=info.total_blocks,
            used_blocks=used,
            free_blocks=info.total_blocks - used,
            computed_prompt_tokens=figures.computed_prompt_tokens,
            reused_prompt_tokens=figures.reused_prompt_tokens,
            generated_tokens=figures.generated_tokens,
        )

    def drop(self, lease_id: str) -> None:
        """No contract frees handed-over KV: the engine does so after the fetch, or by the engine's own limit."""

    async def close(self) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        # Every call then has an abort, which ends it after `abort_seconds` at the latest.
        self.stop([*self._ledger.live], pb.FINISH_REASON_CANCELLED)
        ending = *self._keepers, *self._calls.values(), *self._tasks
        await asyncio.gather(*ending, return_exceptions=True)
        if self._flush is not None:
            self._flush.cancel()
            self._deliver_step()
        await self._connection.close()

    async def _reach(self) -> EngineFacts:
        """Waits for the engine to describe itself. Raises ModelUnusable."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._patience.connect_seconds
        while True:
            try:
                facts = await self._contract.describe()
                illness = await self._contract.illness()
            except grpc.aio.AioRpcError as error:
                illness = f"{error.code().name}: {error.details()}"
            if not illness:
                return facts
            if loop.time() >= ends_at:
                raise ModelUnusable(f"cannot use {self._connection.address}: {illness}")
            await asyncio.sleep(RETRY_SECONDS)

    async def _identity_of(self, facts: EngineFacts) -> Identity:
        try:
            return await identity_of(self._contract, facts, self._settings.model_dirs)
        except grpc.aio.AioRpcError as error:
            raise ModelUnusable(
                f"cannot read the tokenizer of {self._connection.address}: {error.details()}"
            ) from error

    def _info_of(self, facts: EngineFacts, identity: Identity) -> BackendInfo:
        if not (facts.vocabulary_size and facts.max_sequence_tokens):
            raise ModelUnusable(
                f"{self._connection.address} tells neither the size of its vocabulary nor the longest sequence, against"
                " which every id and prompt is checked"
            )
        size = facts.tokens_per_block
        return BackendInfo(
            backend=self._contract.engine,
            model=name_of(facts),
            model_fingerprint=identity.model,
            tokenizer_fingerprint=identity.tokenizer,
            vocabulary_size=facts.vocabulary_size,
            max_sequence_tokens=facts.max_sequence_tokens,
            max_batch_size=facts.max_batch_size or MAX_BATCH_SIZE,
            max_sequences_per_item=MAX_SEQUENCES_PER_ITEM,
            max_queue_size=MAX_QUEUE_SIZE,
            tokens_per_block=size,
            total_blocks=facts.cache_tokens // size if size else 0,
            supported_fields=self._contract.supported_fields,
            capabilities=Capabilities(
                deterministic=False, resumes_exactly=False, stops_single_sequences=True
            ),
            started_role=facts.role,
            state_kind=facts.state_kind,
            end_ids=facts.end_ids,
            data_type=pb.DATA_TYPE_FP32,
        )

    def _check(self, item: Submission) -> None:
        self._contract.check(item)
        if item.handoff_state:
            _check_state(item.handoff_state)
        if item.config.guided_decoding is not None:
            plain(item.config.guided_decoding)
            check_new(item.config.guided_decoding, item.emitted_tokens)

    async def _generate(self, sequence: ForeignSequence) -> None:
        """Reads a sequence's call to any end."""
        error: TrtmeshError | None = None
        try:
            await self._read(sequence)
        except grpc.aio.AioRpcError as status:
            error = await self._error_of(status)
            if sequence.awaits_state and isinstance(error, BackendFailed | InvalidRequest):
                error = HandoffFailed(error.message)
        except asyncio.CancelledError:
            error = WorkerLost("the engine did not end the sequence in time")
        except TrtmeshError as known:
            error = known
            self._abort_soon(sequence)
        except Exception as defect:
            log.exception("unexpected error of a call")
            error = BackendFailed(f"{type(defect).__name__}: {defect}")
            self._abort_soon(sequence)
        finally:
            del self._calls[sequence.key]
            self._end(sequence, error)

    async def _read(self, sequence: ForeignSequence) -> None:
        """Reads to the engine's last message, since only then the blocks are free."""
        async with aclosing(
            self._contract.generate(sequence.ask(self._contract.asks_transfer))
        ) as call:
            async for news in call:
                if not sequence.over:
                    sequence.take(news, self._ledger.output)
                    self._go_on()
                if news.reason:
                    return
                if sequence.needs_abort:
                    self._abort_soon(sequence)
        if not sequence.over:
            raise BackendFailed("the engine ended a call without the end of its sequence")

    def _abort_soon(self, sequence: ForeignSequence) -> None:
        if not sequence.aborted:
            sequence.aborted = True
            self._start_task(self._abort(sequence))

    async def _abort(self, sequence: ForeignSequence) -> None:
        """Has the engine end a sequence; after `abort_seconds`, cancelling the call ends the sequence, too."""
        call = self._calls.get(sequence.key)
        try:
            async with asyncio.timeout(self._patience.abort_seconds):
                await self._contract.abort(sequence.call_id)
                if call is not None:
                    await asyncio.wait((call,))
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            log.warning("%s did not abort a sequence: %r", self._connection.address, error)
        finally:
            if call is not None:
                call.cancel()

    async def _error_of(self, status: grpc.aio.AioRpcError) -> TrtmeshError:
        """The error of an item. A failure inside a dead engine is no fault of the item: another worker continues it."""
        error = self._connection.error_of(status)
        if not isinstance(error, BackendFailed):
            return error
        try:
            illness = await self._contract.illness()
        except grpc.aio.AioRpcError as unreachable:
            illness = unreachable.details() or unreachable.code().name
        return WorkerLost(f"{error.problem} ({illness})") if illness else error

    def _end(self, sequence: ForeignSequence, error: TrtmeshError | None = None) -> None:
        self._ledger.end(sequence.end(error))
        self._go_on()

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _go_on(self) -> None:
        """Delivers in the next turn, so that calls read together make a single step."""
        if self._flush is None:
            self._flush = asyncio.get_running_loop().call_soon(self._deliver_step)

    def _deliver_step(self) -> None:
        self._flush = None
        self._steps += bool(self._ledger.output.keys)
        self._deliver(self._ledger.take(self._steps + self._load.steps))

    async def _watch_load(self) -> None:
        """Reads the load until the engine is dead. Raises BackendFailed then."""
        missed = 0
        while True:
            try:
                record = await self._contract.load()
                illness = await self._contract.illness()
            except grpc.aio.AioRpcError as error:
                missed += 1
                if missed == MISSED_ANSWERS:
                    raise BackendFailed(
                        f"{self._connection.address} is lost: {error.code().name}: {error.details()}"
                    ) from error
            else:
                missed = 0
                if record is not None:
                    self._load.take(record)
                if illness:
                    raise BackendFailed(f"{self._connection.address} is unwell: {illness}")
            await asyncio.sleep(self._patience.poll_seconds)

    async def _follow_kv_events(self) -> None:
        """Relays KV events. After a gap everything is forgotten, because no contract tells the present content."""
        names = ForeignBlocks(self._info.tokens_per_block)
        while True:
            try:
                async with aclosing(self._contract.kv_events()) as batches:
                    async for batch in batches:
                        self._tell_kv_events(names.translate(batch))
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    log.info("%s reports no KV events", self._connection.address)
                    return
                log.warning("KV events ended: %s: %s", error.code().name, error.details())
            self._tell_kv_events(names.clear())
            await asyncio.sleep(RETRY_SECONDS)

    def _tell_kv_events(self, events: Sequence[KvEvent]) -> None:
        if events:
            self._ledger.output.kv_events += events
            self._go_on()

    def _on_keeper_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)


def _check_state(state: bytes) -> None:
    """Raises HandoffFailed unless a state is a JSON object, as made by this backend."""
    try:
        content = load_json(state.decode())
    except ValueError as error:
        raise HandoffFailed(f"the state is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise HandoffFailed("the state is not a JSON object")


def _parsed(address: str) -> ForeignAddress:
    try:
        return ForeignAddress.parse(address)
    except ValueError as error:
        raise SettingsError(f"is wrong: {error}", setting="engine.foreign.address") from error
