"""A receiver's lease at work: feeds the machine in receive_machine.py, and carries out the actions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
from trtmesh.engine.backend import Awaiting, Content, Reserved, SequenceEnd
from trtmesh.engine.handoff.block_plan import problem_between
from trtmesh.engine.handoff.descriptor import Incompatible, RemoteKv, parse
from trtmesh.engine.handoff.fetch import Fetch, ProtocolBroken
from trtmesh.engine.handoff.lease import CommitMark, Outcome, Problem, failure, unknown
from trtmesh.engine.handoff.leases import LeaseOwner, LeaseTable, Timer
from trtmesh.engine.handoff.messages import Chunk
from trtmesh.engine.handoff.metrics import word_of
from trtmesh.engine.handoff.own_kv import OwnKv
from trtmesh.engine.handoff.parts import Part, checksum_after, copies_of, span_of
from trtmesh.engine.handoff.receive_machine import (
    HELD,
    AnyReceiverAction,
    AnyReceiverEvent,
    Attach,
    Bind,
    Committed,
    PartReady,
    ReadEnded,
    ReadPart,
    ReceiverAction,
    ReceiverEvent,
    ReceiverLease,
    ReceiverPhase,
    ReportFailure,
    StopTarget,
    advance,
)
from trtmesh.engine.handoff.transports.streamed import Damaged, StreamedPart
from trtmesh.engine.handoff.transports.transport import (
    ReadFailed,
    ShardCopy,
    Source,
    TransportUnusable,
)
from trtmesh.v1 import generation_pb2
from trtmesh.v1 import kv_transfer_pb2 as pb

log = logging.getLogger(__name__)

MAX_BUFFERED_BYTES = 2**25
"""Most bytes of streamed parts before their copy, unless a single part has more."""

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class ReceivedBlocks:
    """A granted reservation, from the blocks to the sequence continuing there."""

    def __init__(
        self,
        own: OwnKv,
        table: LeaseTable[ReceivedBlocks],
        spawn: Spawn,
        news: Reserved,
        owner: LeaseOwner,
        seconds: float,
    ) -> None:
        """`spawn` starts tasks; a stopping worker awaits these."""
        self.lease_id = news.lease_id
        self.owner: LeaseOwner | None = owner
        self.blocks = news.blocks
        self._own, self._table, self._spawn = own, table, spawn
        self._lease = ReceiverLease()
        self._leader: int | None = None
        self._live: list[int] = []
        """Sequences of the item without an end."""
        self._problem: Problem | None = None
        self._detail = ""
        self._attaching: asyncio.Task[None] | None = None
        self._transfer: Transfer | None = None
        shards = own.memory.shards
        size = shards[0].tokens_per_block
        self._tokens = range(news.present_tokens // size * size, len(news.blocks) * size)
        self._timer = Timer(seconds, self._expire)
        table.grant(self)

    @property
    def outcome(self) -> Outcome | None:
        return self._lease.outcome

    @property
    def lacking_tokens(self) -> int:
        """Tokens still without KV, while the lease is held."""
        return len(self._tokens) if self.outcome is None else 0

    @property
    def _quarantined_blocks(self) -> int:
        return len(self.blocks) if self._lease.phase is ReceiverPhase.QUARANTINED else 0

    def renew(self, seconds: float) -> None:
        if self._lease.expires:
            self._timer.renew(seconds)

    def release(self) -> None:
        self._feed(ReceiverEvent.RELEASED)
        if self._lease.wanted is None:
            # Perhaps submitted, but the backend has not named the tokens yet.
            self._stop_sequences(None)

    def fail(self) -> None:
        """Ends the lease after a defect, and the sequences with an error."""
        self.release()
        self._problem = Problem.COMPUTE
        if self._lease.phase is not ReceiverPhase.QUARANTINED:
            # The defect may have ended the lease without this action.
            self._own.backend.drop(self.lease_id)

    def attach(self, descriptor: pb.HandoffDescriptor, own_hash: bytes) -> None:
        """Starts the fetch from a compatible sender."""
        if self._attaching or self._lease.phase is not ReceiverPhase.RESERVED:
            return
        try:
            remote = parse(descriptor, own_hash)
            own = self._own
            if problem_between(remote.shards, own.memory.shards):
                raise Incompatible("has another type, or lacks layers or heads")
            before_last = (len(remote.blocks) - 1) * remote.shards[0].tokens_per_block
            if before_last >= self._tokens.stop:
                raise Incompatible(f"has {len(remote.blocks)} blocks, more than were reserved here")
        except Incompatible as error:
            self._refuse(f"the KV of worker {descriptor.worker} {error}")
            return
        self._attaching = self._spawn(self._attach(remote))

    def check_free(self) -> None:
        """Raises HandoffFailed if the lease has ended, or has a sequence."""
        if self._leader is not None or self._lease.phase not in HELD:
            raise unknown(self.lease_id, "submit.receiver_lease_id")

    def submitted(self, keys: Sequence[int]) -> None:
        """The sequences wait for the KV."""
        self._leader = keys[0]
        self._live = list(keys)

    def awaiting(self, news: Awaiting) -> None:
        self._feed(Bind(news.content))

    def sequence_ended(self, end: SequenceEnd) -> None:
        """Completes the end of a sequence."""
        if end.reason == generation_pb2.FINISH_REASON_CANCELLED and self._problem:
            end.reason = generation_pb2.FINISH_REASON_ERROR
            end.error = failure(self._problem, self.lease_id, self._detail)
        self._live.remove(end.key)
        if end.key != self._leader:
            return
        if self._lease.phase is ReceiverPhase.CONSUMED:
            # The sequence may have ended before the adoption.
            self._own.backend.drop(self.lease_id)
        elif self._lease.phase in HELD:
            self.release()
            # The others have lost their leader, not their client.
            self._problem = Problem.COMPUTE

    async def _take(self, message: pb.FetchResponse | Chunk) -> None:
        """Takes a message of the sender. Waits while too many bytes do. Raises ProtocolBroken."""
        transfer = self._transfer
        assert transfer
        if isinstance(message, Chunk):
            transfer.chunk_arrived(message)
            return
        match message.WhichOneof("response"):
            case "part":
                await transfer.announced(message.part)
                self._feed(PartReady(message.part.part))
            case "chunk":
                transfer.chunk_arrived(Chunk(message.chunk.data))
            case "commit":
                mark = _mark_of(message.commit)
                if not transfer.covers(mark.content.tokens):
                    raise ProtocolBroken("it committed KV that it did not announce")
                self._feed(Committed(mark))
            case "confirmed":
                self._feed(ReceiverEvent.CONFIRMED)
            case _:
                raise ProtocolBroken("it sent an unknown message")

    def _lose_fetch(self, detail: str) -> None:
        self._detail = detail
        self._feed(ReceiverEvent.FETCH_LOST)

    def _refuse(self, detail: str) -> None:
        self._detail = detail
        self._feed(ReceiverEvent.REFUSED)

    def _expire(self) -> None:
        self._feed(ReceiverEvent.EXPIRED)

    async def _attach(self, remote: RemoteKv) -> None:
        try:
            kind, source = await self._open_source(remote)
        except Incompatible as error:
            self._refuse(f"worker {remote.worker} {error}")
            return
        except Exception as error:
            # Broad on purpose: the lease must not wait until the expiry.
            log.exception("unexpected error of a transport")
            self._refuse(f"{type(error).__name__}: {error}")
            return
        self._transfer = Transfer(self._own, remote, kind, source, self._tokens, self.blocks)
        self._feed(Attach(needs_confirmation=source is not None))
        if self._lease.phase is not ReceiverPhase.FETCHING:
            await self._transfer.close()

    async def _open_source(
        self, remote: RemoteKv
    ) -> tuple[pb.KvTransport.ValueType, Source | None]:
        """Opens the first transport of this worker among the sender's offers. Raises Incompatible."""
        offers = dict(remote.offers)
        for kind, transport in self._own.transports.items():
            if kind not in offers:
                continue
            source: Source | None = None
            try:
                if transport:
                    async with asyncio.timeout(self._own.limits.dial_seconds):
                        source = await transport.open(offers[kind])
            except (TransportUnusable, TimeoutError) as error:
                log.info(
                    "%s cannot reach worker %s: %s",
                    word_of(kind),
                    remote.worker,
                    str(error) or "late",
                )
                continue
            return kind, source
        raise Incompatible("offers no transport that this worker can use")

    def _feed(self, event: AnyReceiverEvent) -> None:
        before, quarantined = self._lease.outcome, self._quarantined_blocks
        self._lease, actions = advance(self._lease, event)
        self._table.quarantine(self._quarantined_blocks - quarantined)
        if before is None and self._lease.outcome:
            self._end(self._lease.outcome)
        for action in actions:
            self._carry_out(action)

    def _end(self, outcome: Outcome) -> None:
        self._timer.cancel()
        measured = self._transfer.measured if self._transfer else (None, 0, 0.0)
        self._table.end(outcome, *measured)

    def _carry_out(self, action: AnyReceiverAction) -> None:
        transfer = self._transfer
        match action:
            case ReceiverAction.OPEN_FETCH if transfer:
                transfer.fetch = Fetch(
                    self._own,
                    transfer.remote,
                    transfer.kind,
                    transfer.missing_positions,
                    self._take,
                    self._lose_fetch,
                )
                transfer.task = self._spawn(transfer.run())
            case ReadPart(part) if transfer:
                transfer.add_read(self._spawn(self._read(transfer, part)))
            case ReceiverAction.SEND_RECEIVED if transfer and transfer.fetch:
                transfer.fetch.send_received()
            case ReceiverAction.CLOSE_FETCH if transfer and transfer.fetch:
                transfer.fetch.close()
            case ReceiverAction.CONSUME:
                self._own.backend.adopt(self.lease_id)
                self._table.forget(self)
            case ReceiverAction.FREE_BLOCKS:
                self._own.backend.drop(self.lease_id)
                self._table.forget(self)
            case StopTarget(problem):
                self._stop_sequences(problem)
            case ReceiverAction.REFUSE_SEQUENCE:
                self._stop_sequences(self._problem)
            case ReportFailure(problem):
                self._report(problem)

    def _report(self, problem: Problem) -> None:
        if self._leader is not None:
            self._stop_sequences(problem)
        elif self.owner:
            self.owner.tell_failed(self.lease_id, failure(problem, self.lease_id, self._detail))

    def _stop_sequences(self, problem: Problem | None) -> None:
        self._problem = problem
        self._own.backend.stop(self._live, generation_pb2.FINISH_REASON_CANCELLED)

    async def _read(self, transfer: Transfer, part: int) -> None:
        problem: Problem | None = None
        try:
            await transfer.read(part)
        except Damaged:
            problem = Problem.CHECKSUM
        except ReadFailed as error:
            problem, self._detail = Problem.READ_FAILED, str(error)
        except Exception as error:
            # Broad on purpose: a read without an end would hold the blocks forever.
            log.exception("unexpected error in a read")
            problem, self._detail = Problem.READ_FAILED, f"{type(error).__name__}: {error}"
        self._feed(ReadEnded(part, problem))


class ReceivedState:
    """A sequence continuing from a state, until the first token."""

    lacking_tokens = 0

    def __init__(self, table: LeaseTable[ReceivedState], lease_id: str, owner: LeaseOwner) -> None:
        self.lease_id = lease_id
        self.owner: LeaseOwner | None = owner
        self.outcome: Outcome | None = None
        self._table = table
        table.grant(self)

    def renew(self, seconds: float) -> None:
        """Changes nothing: the lease ends with the wait of the sequence."""

    def continued(self) -> None:
        """The sequence has the first new token."""
        self._end(Outcome.CONSUMED)

    def sequence_ended(self, _end: SequenceEnd) -> None:
        """The sequence is over; without a token, the state was not used."""
        self._end(Outcome.RELEASED)

    def _end(self, outcome: Outcome) -> None:
        if self.outcome is not None:
            return
        self.outcome = outcome
        self._table.end(outcome, pb.KV_TRANSPORT_BACKEND)
        self._table.forget(self)


class Transfer:
    """The reads of a lease from a sender."""

    def __init__(
        self,
        own: OwnKv,
        remote: RemoteKv,
        kind: pb.KvTransport.ValueType,
        source: Source | None,
        tokens: range,
        blocks: Sequence[int],
    ) -> None:
        """`source` is None where the data comes in the messages of the fetch; `tokens` have no KV yet in the receiver's
        `blocks`."""
        self.remote, self.kind, self.source = remote, kind, source
        self.fetch: Fetch | None = None
        self.task: asyncio.Task[None] | None = None
        self._reads: set[asyncio.Task[None]] = set()
        self._own, self._tokens, self._blocks = own, tokens, blocks
        self._size = remote.shards[0].tokens_per_block
        self._layers = len({layer for shard in remote.shards for layer in shard.layers})
        self._positions = range(tokens.start // self._size, len(remote.blocks))
        self._covered = np.zeros((len(remote.blocks), self._layers), dtype=np.bool_)
        """Announced layers of each block."""
        self._parts: list[tuple[Part, StreamedPart | None, int]] = []
        """Parts with checksums, and with data if streamed."""
        self._bytes = self._buffered_bytes = 0
        self._began = self._ended = 0.0

    @property
    def missing_positions(self) -> Sequence[int]:
        """The blocks to ask for. An empty list would ask for all, so the last stands for none."""
        last = len(self.remote.blocks) - 1
        return self._positions or (last,)

    @property
    def measured(self) -> tuple[pb.KvTransport.ValueType, int, float]:
        """Transport, bytes, and seconds from the first part to the end of the last read."""
        return self.kind, self._bytes, max(0.0, self._ended - self._began)

    async def run(self) -> None:
        """Fetches, then ends the reads."""
        assert self.fetch
        try:
            await self.fetch.run()
        finally:
            # The fetch refers to the lease, and the lease to this.
            self.fetch = None
            await self.close()

    async def close(self) -> None:
        for _, streamed, _ in self._parts:
            if streamed:
                streamed.abandon()
        if self.source:
            await self.source.close()

    async def announced(self, message: pb.KvPart) -> None:
        """Notes the next part. Waits while too many bytes do."""
        if message.part != len(self._parts):
            # The lease tells a repeated part from a gap.
            return
        part = self._checked(message)
        streamed = None
        if self.source is None:
            if self._streaming and self._streaming.missing_bytes:
                raise ProtocolBroken("it announced a part before the end of the last one")
            rows = len(part.wanted(self.remote.blocks, self.missing_positions))
            spans = [span_of(shard, part.layer_range) for shard in self.remote.shards]
            await self._wait_for_room(rows * sum(last - first for first, last in spans))
            streamed = StreamedPart(
                self._own.memory, self._own.copying, spans, rows, message.checksum
            )
            self._buffered_bytes += streamed.size
        self._began = self._began or time.monotonic()
        self._parts.append((part, streamed, message.checksum))

    def chunk_arrived(self, data: Chunk) -> None:
        if self._streaming is None or len(data) > self._streaming.missing_bytes:
            raise ProtocolBroken("it sent more bytes than a part has")
        self._streaming.feed(data)

    def covers(self, tokens: int) -> bool:
        """Whether all layers of the missing blocks were announced, up to `tokens`."""
        last = min(-(-tokens // self._size), len(self._covered))
        first = self._positions.start
        blocks = np.asarray(self.remote.blocks[first:last])
        return tokens <= self._tokens.stop and bool(self._covered[first:last][blocks != 0].all())

    def add_read(self, read: asyncio.Task[None]) -> None:
        self._reads.add(read)
        read.add_done_callback(self._reads.discard)

    async def read(self, number: int) -> None:
        """Reads a part into the receiver's blocks. Raises ReadFailed."""
        part, streamed, checksum = self._parts[number]
        wanted = part.wanted(self.remote.blocks, self.missing_positions)
        if streamed:
            wanted = {at: row for row, at in enumerate(wanted)}
        shards = self._own.memory.shards
        copies = copies_of(part, self.remote.shards, shards, self._tokens, wanted, self._blocks)
        if streamed:
            try:
                await streamed.read(copies)
            finally:
                self._buffered_bytes -= streamed.size
                self._parts[number] = part, None, 0
        elif self.source and copies:
            await self.source.read(copies)
            if checksum:
                await asyncio.get_running_loop().run_in_executor(
                    self._own.threads, self._check, part, checksum, list(wanted.values()), copies
                )
        self._bytes += sum(each.size for each in copies)
        self._ended = time.monotonic()

    def _check(
        self, part: Part, checksum: int, blocks: Sequence[int], copies: Sequence[ShardCopy]
    ) -> None:
        """Compares a read part with the sender's checksum, in a thread. Raises Damaged."""
        found = checksum_after(self._own.memory, part, self.remote.shards, blocks, copies)
        if found not in (None, checksum):
            raise Damaged(f"the checksum of a part is {found:08x}, not {checksum:08x}")

    @property
    def _streaming(self) -> StreamedPart | None:
        return self._parts[-1][1] if self._parts else None

    def _checked(self, message: pb.KvPart) -> Part:
        part = Part(
            message.first_block_position, message.blocks, message.first_layer, message.layers
        )
        last = part.first_block + part.blocks
        if last > len(self._covered) or part.first_layer + part.layers > self._layers:
            raise ProtocolBroken("it announced blocks or layers that its descriptor lacks")
        layers = part.layer_range
        covered = self._covered[part.first_block : last, layers.start : layers.stop]
        if covered.any():
            # More bytes than the part's blocks can hold would wait here.
            raise ProtocolBroken("it announced layers of a block twice")
        covered[:] = True
        return part

    async def _wait_for_room(self, size: int) -> None:
        """Waits until `size` more bytes fit into the buffers."""
        while self._reads and self._buffered_bytes + size > MAX_BUFFERED_BYTES:
            await asyncio.wait(self._reads, return_when=asyncio.FIRST_COMPLETED)


def _mark_of(message: pb.KvCommitMark) -> CommitMark:
    return CommitMark(message.parts, Content(message.computed_tokens, message.token_digest))
