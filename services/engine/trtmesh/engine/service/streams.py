"""Splits the backend's steps among the routers' streams, and has what all streams of a worker share."""

from __future__ import annotations

import asyncio
import logging
import resource
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trtmesh.chassis.errors import BackendFailed, TrtmeshError
from trtmesh.chassis.panics import is_failure
from trtmesh.chassis.tracing.spans import Tracer
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.backend import (
    Backend,
    BackendInfo,
    BackendStats,
    BlocksRemoved,
    BlocksStored,
    HandoffNews,
    HeldAdapter,
    HoldsAdapters,
    KvEvent,
    SequenceEnd,
    StepOutput,
)
from trtmesh.engine.handoff.handoffs import HandoffsByBlocks, HandoffsByState
from trtmesh.engine.ledger import KvEventLog
from trtmesh.engine.service.adapter_delivery import DeliveryMemory
from trtmesh.engine.service.event_outbox import StepPart
from trtmesh.engine.service.metrics import EngineMetrics
from trtmesh.engine.service.wire import kv_event_message, load_message
from trtmesh.engine.settings import EngineSettings
from trtmesh.v1 import engine_pb2 as epb

log = logging.getLogger(__name__)

STATM = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True)
class _Block:
    parent: int
    token_ids: Sequence[int]
    adapter: Adapter | None


class KvMirror:
    """Numbers and applies KV events; holds at most one entry per block of the pool."""

    def __init__(self) -> None:
        self.epoch = secrets.randbits(63) | 1
        self.next_sequence = 0
        self.records = 0
        """Calls of `record`."""
        self._blocks: dict[int, _Block] = {}

    def record(self, events: Sequence[KvEvent]) -> int:
        """Applies events; returns the sequence number of the first."""
        first = self.next_sequence
        self.next_sequence += len(events)
        self.records += 1
        for event in events:
            if isinstance(event, BlocksStored):
                self._store(event)
            elif isinstance(event, BlocksRemoved):
                for block in event.block_hashes:
                    self._blocks.pop(block, None)
            else:
                self._blocks.clear()
        return first

    def snapshot(self) -> list[KvEvent]:
        """Events for rebuilding the present contents, parents before children."""
        log = KvEventLog()
        told: set[int] = set()
        for block in self._blocks:
            for link in self._untold_chain(block, told):
                entry = self._blocks[link]
                log.stored(entry.parent, link, entry.token_ids, entry.adapter)
        return log.take()

    def _store(self, event: BlocksStored) -> None:
        size = len(event.token_ids) // max(1, len(event.block_hashes))
        parent = event.parent_hash
        for number, block in enumerate(event.block_hashes):
            tokens = event.token_ids[number * size : (number + 1) * size]
            self._blocks[block] = _Block(parent, tokens, event.adapter)
            parent = block

    def _untold_chain(self, block: int, told: set[int]) -> list[int]:
        """Stored ancestors of `block` and `block` itself, oldest first, without `told` blocks; adds them to `told`."""
        links = []
        while block in self._blocks and block not in told:
            told.add(block)
            links.append(block)
            block = self._blocks[block].parent
        return links[::-1]


HANDLE_BITS = 32
HANDLE_MASK = (1 << HANDLE_BITS) - 1
OPTIONAL_DATA = ("details", "prompts", "starts")
"""Lists of StepOutput and of StepPart with the sequence in the entries' `key`."""


class Stream:
    """A router's stream, or a call of TrtllmService, which drops what it has no place for."""

    @property
    def unacknowledged_steps(self) -> int:
        """Steps sent and not acknowledged."""
        return 0

    @property
    def busy(self) -> bool:
        """Whether there are live sequences or waiting output, for which a drain waits."""
        return False

    def take_step(self, part: StepPart) -> None:
        """Takes the tokens of a step."""

    def take_end(self, handle: int, end: SequenceEnd) -> None:
        """Takes the end of a sequence, after the tokens."""

    def take_load(self, load: epb.Load) -> None:
        """Takes the load."""

    def take_adapters(self, held: Sequence[HeldAdapter]) -> None:
        """Takes changed states of adapters."""

    def take_kv_events(self, epoch: int, first: int, events: list[epb.KvEvent]) -> None:
        """Takes changes of the KV cache."""

    def fail(self, error: TrtmeshError) -> None:
        """Ends every sequence with `error`, in place of the broken backend."""
        self.finish(error)

    def finish(self, farewell: TrtmeshError) -> None:
        """Sends the waiting events, then ends the stream with `farewell`."""


class Streams:
    """Splits steps by stream.

    The key of a sequence is the stream's number followed by the 32 bits of the handle, so splitting needs no table.
    Numbers of streams are never reused. A stream stays registered until the last sequence has ended, even after the end
    of the RPC.
    """

    def __init__(self, metrics: EngineMetrics) -> None:
        self.kv = KvMirror()
        self.step_count = 0
        self.take_handoff: Callable[[HandoffNews], None] | None = None
        """Takes news of leases, after the tokens of the step and before the ends."""
        self._metrics = metrics
        self._streams: dict[int, Stream] = {}
        self._numbers = 0
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._delivered: deque[StepOutput] = deque()
        self._split_is_due = False
        self._quiet = asyncio.Event()

    def __iter__(self) -> Iterator[Stream]:
        return iter(list(self._streams.values()))

    def add(self, stream: Stream) -> int:
        """Returns the stream's number."""
        self._numbers += 1
        self._streams[self._numbers] = stream
        return self._numbers

    def remove(self, number: int) -> None:
        """Removes a stream without live sequences."""
        self._streams.pop(number, None)
        self.calmed()

    def calmed(self) -> None:
        """Called by a stream on becoming idle."""
        self._quiet.set()

    async def quiet(self) -> None:
        """Waits until no stream is busy."""
        while any(stream.busy for stream in self._streams.values()):
            self._quiet.clear()
            await self._quiet.wait()

    def deliver(self, output: StepOutput) -> None:
        """Takes a step from the backend, on any thread; the lists must not change afterwards.

        Steps delivered before the loop's next turn are split together.
        """
        self._delivered.append(output)
        # Set after the append and cleared before the queue is emptied, so no step is missed.
        if not self._split_is_due:
            self._split_is_due = True
            if threading.get_ident() == self._loop_thread:
                self._loop.call_soon(self._split_delivered)
            else:
                self._loop.call_soon_threadsafe(self._split_delivered)

    def tell_load(self, load: epb.Load) -> None:
        """Sends the load to every router."""
        for stream in self:
            stream.take_load(load)

    def _split_delivered(self) -> None:
        self._split_is_due = False
        while self._delivered:
            output = self._delivered.popleft()
            try:
                self._split(output)
            except Exception as error:  # noqa: BLE001
                # Broad on purpose: a sequence without an end would live, and keep the lease, for ever.
                for stream in self:
                    self._fail(stream, error)
            for news in output.handoffs:
                assert self.take_handoff
                self.take_handoff(news)
            for end in output.ends:
                self._tell_end(end)

    def _split(self, output: StepOutput) -> None:
        """Splits everything of a step but news of leases and ends."""
        self.step_count = max(self.step_count, output.step_count)
        self._metrics.stepped(output, time.monotonic())
        if output.kv_events:
            self._tell_kv_events(output)
        if output.adapters:
            for stream in self:
                self._tell(stream, partial(stream.take_adapters, output.adapters))
        if output.keys or output.details or output.prompts:
            self._split_tokens(output)

    def _tell(self, stream: Stream, take: Callable[[], None]) -> None:
        """Has a stream take a part of a step. A defect ends this stream only: the others still get the step."""
        try:
            take()
        except BaseException as error:
            if not is_failure(error):
                raise
            self._fail(stream, error)

    def _fail(self, stream: Stream, error: BaseException) -> None:
        log.error("unexpected error of a stream", exc_info=error)
        stream.finish(BackendFailed(f"{type(error).__name__}: {error}"))

    def _split_tokens(self, output: StepOutput) -> None:
        if len(self._streams) == 1:
            part = StepPart(
                output.step_count,
                [key & HANDLE_MASK for key in output.keys],
                output.token_offsets,
                output.token_counts,
                output.token_ids,
            )
            parts = dict.fromkeys(self._streams, part)
        else:
            parts = _by_stream(output)
        for kind in OPTIONAL_DATA:
            for each in getattr(output, kind):
                part = parts.setdefault(each.key >> HANDLE_BITS, StepPart(output.step_count))
                each.key &= HANDLE_MASK
                getattr(part, kind).append(each)
        for number, part in parts.items():
            if stream := self._streams.get(number):
                self._tell(stream, partial(stream.take_step, part))

    def _tell_end(self, end: SequenceEnd) -> None:
        stream = self._streams.get(end.key >> HANDLE_BITS)
        if stream is None:
            log.error("the backend ended a sequence that is not live, key %d", end.key)
            return
        self._tell(stream, partial(stream.take_end, end.key & HANDLE_MASK, end))

    def _tell_kv_events(self, output: StepOutput) -> None:
        first = self.kv.record(output.kv_events)
        messages = [kv_event_message(event) for event in output.kv_events]
        for stream in self:
            self._tell(stream, partial(stream.take_kv_events, self.kv.epoch, first, messages))


def _by_stream(output: StepOutput) -> dict[int, StepPart]:
    parts: dict[int, StepPart] = {}
    token_ids = output.token_ids
    start = 0
    for key, offset, count in zip(
        output.keys, output.token_offsets, output.token_counts, strict=True
    ):
        number = key >> HANDLE_BITS
        part = parts.get(number)
        if part is None:
            part = parts[number] = StepPart(output.step_count)
        part.handles.append(key & HANDLE_MASK)
        part.token_offsets.append(offset)
        part.token_counts.append(count)
        if count == 1:
            part.token_ids.append(token_ids[start])
        else:
            part.token_ids += token_ids[start : start + count]
        start += count
    return parts


@dataclass
class LoadedEngine:
    """A worker with a loaded model."""

    name: str
    settings: EngineSettings
    backend: Backend
    info: BackendInfo
    description: epb.GetEngineResponse
    streams: Streams
    metrics: EngineMetrics
    delivery_memory: DeliveryMemory
    adapters: HoldsAdapters | None
    """The backend, where it holds adapters."""
    handoffs: HandoffsByBlocks | HandoffsByState | None
    """None for a backend without handoffs."""
    role: epb.WorkerRole.ValueType
    """Present role."""
    tracer: Tracer | None = None
    drain_ends_at: float | None = None
    """Monotonic time for cutting the streams of a stopping worker; None before."""
    drained: bool = False
    """Whether an admin drains the worker."""

    @property
    def held_adapters(self) -> Sequence[HeldAdapter]:
        """The adapters in memory, and those of the backend's own directory that cannot be loaded."""
        return self.adapters.adapters() if self.adapters else ()

    @property
    def states(self) -> HandoffsByState | None:
        """The handoffs of a backend with a KV transport of the library's own."""
        return self.handoffs if isinstance(self.handoffs, HandoffsByState) else None

    @property
    def draining(self) -> bool:
        """Whether new items are refused."""
        return self.drained or self.drain_ends_at is not None

    def drain(self, seconds: float) -> None:
        """Refuses new items and cuts the streams after `seconds`."""
        self.drain_ends_at = time.monotonic() + seconds

    def load(self, stats: BackendStats | None = None) -> epb.Load:
        """The load as reported to routers, of `stats` if the backend's present ones are known."""
        load = load_message(stats or self.backend.stats(), draining=self.draining)
        load.busy_seconds = self.metrics.busy_seconds(time.monotonic())
        load.host_memory_bytes = _resident_bytes()
        load.role = self.role
        if self.handoffs:
            load.sent_handoffs.CopyFrom(self.handoffs.sent.counts())
            load.received_handoffs.CopyFrom(self.handoffs.received.counts())
            load.quarantined_blocks = self.handoffs.received.quarantined_blocks
            load.receiving_tokens = sum(
                lease.lacking_tokens for lease in self.handoffs.received.all()
            )
        if self.drain_ends_at is not None:
            load.drain_ms = max(0, int((self.drain_ends_at - time.monotonic()) * 1000))
        return load


def _resident_bytes() -> int:
    """Resident memory of this process; 0 where the system has no Linux procfs."""
    try:
        _, resident, *_ = STATM.read_bytes().split()
    except OSError:
        return 0
    return int(resident) * resource.getpagesize()
