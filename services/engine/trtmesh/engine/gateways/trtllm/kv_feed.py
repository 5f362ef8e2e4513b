"""KV events for a gateway, numbered and framed by the contract.

A subscription starts with a snapshot, in chunks with consecutive numbers up to the present number; then every step with
events gives a batch. No history is kept: resuming at another number than the present is refused with OUT_OF_RANGE, and
a late subscriber ends with DATA_LOSS. In both cases a gateway starts anew.

Gateways index blocks by tokens alone, and take a chain with an unknown parent for a chain from the root. So blocks with
a salt, an adapter or a prompt table are left out: their chains start at unknown parents.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import count

from smg_grpc_proto.generated import common_pb2
from trtmesh.chassis.block_hashes import ROOT_HASH
from trtmesh.chassis.errors import TrtmeshError
from trtmesh.engine.service.streams import LoadedEngine, Stream
from trtmesh.engine.service.wire import kv_event_message
from trtmesh.v1 import engine_pb2 as epb

MOST_WAITING_BLOCKS = 65_536
MOST_WAITING_BATCHES = 8192
CHUNK_TOKENS = 65_536
"""Most tokens of a chunk of a snapshot: under clients' limit of 4 MiB a message."""
HEARTBEAT_SECONDS = 1.0
NUMBERS_A_SECOND = 1 << 24


class OutOfRange(Exception):
    """The subscriber resumes at another number than the present."""


class FellBehind(Exception):
    """More events wait than are kept."""


def first_number(started_at: float) -> int:
    """The number before a worker's first batch, from the start in seconds of the Unix clock: beyond all numbers of
    predecessors at the same address."""
    return int(started_at) * NUMBERS_A_SECOND


class KvSubscription(Stream):
    """The stream of a subscriber."""

    def __init__(self, engine: LoadedEngine, base: int, resumed: int) -> None:
        """`base` is the worker's first number, `resumed` the subscriber's last number, or 0. Raises OutOfRange."""
        kv = engine.streams.kv
        self._number = base + kv.records
        if resumed not in (0, self._number):
            raise OutOfRange
        self._engine = engine
        self._shown: set[int] = set()
        """Stored blocks, possibly known to the subscriber."""
        self._samples = count(1)
        self._load: common_pb2.EngineLoad | None = None
        self._told_load: tuple[object, ...] | None = None
        self._told_at = 0.0
        self._filled = asyncio.Event()
        self._batches: list[common_pb2.KvEventBatch] = []
        self._waiting_blocks = 0
        self._lost = False
        self._farewell: TrtmeshError | None = None
        snapshot = list(self._visible(map(kv_event_message, kv.snapshot())))
        if resumed == 0:
            self._batches += _snapshot(snapshot, self._number, engine.info.tokens_per_block)
        self._stream = engine.streams.add(self)

    def close(self) -> None:
        # A raised error refers to this.
        self._farewell = None
        self._engine.streams.remove(self._stream)

    async def next(self) -> list[common_pb2.KvEventBatch]:
        """The ready batches. Raises FellBehind, or the error at the end of the stream."""
        while True:
            if self._lost:
                raise FellBehind
            if self._batches:
                batches, self._batches = self._batches, []
                self._waiting_blocks = 0
                return batches
            if self._farewell:
                raise self._farewell
            if self._load:
                load, self._load = self._load, None
                load.load_only = True
                return [self._batch((), load)]
            self._filled.clear()
            await self._filled.wait()

    def take_load(self, load: epb.Load) -> None:
        record = self._record(load)
        told = _figures(record)
        now = time.monotonic()
        if told != self._told_load or now - self._told_at >= HEARTBEAT_SECONDS:
            self._load, self._told_load, self._told_at = record, told, now
            self._filled.set()

    def take_kv_events(self, epoch: int, first: int, events: list[epb.KvEvent]) -> None:
        if self._lost:
            return
        self._number += 1
        visible = list(self._visible(events))
        size = self._engine.info.tokens_per_block
        # A batch without visible events keeps the numbers without a gap.
        self._batches.append(self._batch([_event(each, size) for each in visible], None))
        self._waiting_blocks += sum(map(_blocks, visible))
        if self._waiting_blocks > MOST_WAITING_BLOCKS or len(self._batches) > MOST_WAITING_BATCHES:
            self._lost = True
            self._batches.clear()
            self._shown.clear()
        self._filled.set()

    def finish(self, farewell: TrtmeshError) -> None:
        self._farewell = farewell
        self._filled.set()

    def _visible(self, events: Iterable[epb.KvEvent]) -> Iterator[epb.KvEvent]:
        shown = self._shown
        for event in events:
            match event.WhichOneof("event"):
                case "stored":
                    if event.stored.parent_hash in shown or event.stored.parent_hash == ROOT_HASH:
                        shown.update(event.stored.block_hashes)
                        yield event
                case "removed":
                    gone = [block for block in event.removed.block_hashes if block in shown]
                    if gone:
                        shown.difference_update(gone)
                        yield epb.KvEvent(removed=epb.KvBlocksRemoved(block_hashes=gone))
                case _:
                    shown.clear()
                    yield event

    def _batch(
        self, events: Iterable[common_pb2.KvCacheEvent], load: common_pb2.EngineLoad | None
    ) -> common_pb2.KvEventBatch:
        return common_pb2.KvEventBatch(
            sequence_number=self._number, timestamp=time.time(), events=events, load=load
        )

    def _record(self, load: epb.Load) -> common_pb2.EngineLoad:
        used = load.used_blocks / load.total_blocks if load.total_blocks else 0.0
        return common_pb2.EngineLoad(
            running_requests=load.running_sequences,
            waiting_requests=load.waiting_sequences,
            token_usage=used,
            active_token_usage=used,
            max_running_requests=self._engine.info.max_batch_size,
            prefill_pending_tokens=load.pending_prompt_tokens,
            sample=next(self._samples),
        )


def _figures(record: common_pb2.EngineLoad) -> tuple[object, ...]:
    """The part of a record worth sending before the next heartbeat."""
    return (
        record.running_requests,
        record.waiting_requests,
        round(record.token_usage, 2),
        record.prefill_pending_tokens,
    )


def _blocks(event: epb.KvEvent) -> int:
    return len(event.stored.block_hashes) + len(event.removed.block_hashes)


def _snapshot(
    events: Sequence[epb.KvEvent], number: int, tokens_per_block: int
) -> list[common_pb2.KvEventBatch]:
    """Chunks for rebuilding the contents. The first clears the subscriber's."""
    parts: list[list[common_pb2.KvCacheEvent]] = [
        [common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())]
    ]
    room, blocks = CHUNK_TOKENS, 0
    for event in (piece for each in events for piece in _pieces(each, tokens_per_block)):
        if room < len(event.stored.token_ids):
            parts.append([])
            room = CHUNK_TOKENS
        room -= len(event.stored.token_ids)
        blocks += len(event.stored.block_hashes)
        parts[-1].append(_event(event, tokens_per_block))
    first = number - len(parts) + 1
    return [
        common_pb2.KvEventBatch(
            sequence_number=first + index,
            timestamp=time.time(),
            events=part,
            snapshot=common_pb2.KvSnapshotChunk(index=index, count=len(parts), blocks=blocks),
        )
        for index, part in enumerate(parts)
    ]


def _pieces(event: epb.KvEvent, tokens_per_block: int) -> Iterator[epb.KvEvent]:
    """A chain of stored blocks in runs, each of a chunk at most."""
    stored = event.stored
    most = max(1, CHUNK_TOKENS // max(1, tokens_per_block))
    parent = stored.parent_hash
    for start in range(0, len(stored.block_hashes), most):
        hashes = stored.block_hashes[start : start + most]
        tokens = stored.token_ids[start * tokens_per_block : (start + most) * tokens_per_block]
        piece = epb.KvBlocksStored(parent_hash=parent, block_hashes=hashes, token_ids=tokens)
        yield epb.KvEvent(stored=piece)
        parent = hashes[-1]


def _event(event: epb.KvEvent, tokens_per_block: int) -> common_pb2.KvCacheEvent:
    match event.WhichOneof("event"):
        case "stored":
            return common_pb2.KvCacheEvent(stored=_stored(event.stored, tokens_per_block))
        case "removed":
            removed = common_pb2.KvBlocksRemoved(
                block_hashes=map(_signed, event.removed.block_hashes)
            )
            return common_pb2.KvCacheEvent(removed=removed)
        case _:
            return common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())


def _stored(stored: epb.KvBlocksStored, size: int) -> common_pb2.KvBlocksStored:
    blocks = (
        common_pb2.KvBlock(
            block_hash=_signed(block),
            token_ids=stored.token_ids[place * size : (place + 1) * size],
            block_size=size,
        )
        for place, block in enumerate(stored.block_hashes)
    )
    parent = None if stored.parent_hash == ROOT_HASH else _signed(stored.parent_hash)
    return common_pb2.KvBlocksStored(blocks=blocks, parent_block_hash=parent)


def _signed(block: int) -> int:
    """The same 64 bits as a signed number."""
    return block - (1 << 64) if block >= 1 << 63 else block
