"""Serves fetches: sends the parts of a lease as they become final, the commit mark, and the confirmation."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from trtmesh.chassis.errors import HandoffFailed, InvalidField, InvalidRequest, Mismatch
from trtmesh.chassis.rpc import ServedContext
from trtmesh.chassis.tasks import until_first_ends
from trtmesh.engine.handoff.checksums import checksum_of
from trtmesh.engine.handoff.handoffs import HandoffsByBlocks
from trtmesh.engine.handoff.lease import CommitMark, unknown
from trtmesh.engine.handoff.leases import LeaseTable
from trtmesh.engine.handoff.messages import head_of
from trtmesh.engine.handoff.own_kv import OwnKv
from trtmesh.engine.handoff.parts import Part, chunks_of, sizes_of
from trtmesh.engine.handoff.send_machine import (
    AnnouncePart,
    AnySenderAction,
    SenderAction,
    SendMark,
)
from trtmesh.engine.handoff.send_run import SentBlocks
from trtmesh.v1 import kv_transfer_pb2 as pb
from trtmesh.v1 import kv_transfer_pb2_grpc

OPEN_SECONDS = 10.0
"""Time for a receiver to send the first message."""

MAX_CHUNK_BYTES = 2**20
CHUNK_OVERHEAD_BYTES = 64

PartBytes = tuple[list[list[memoryview]], int]
"""The bytes of a part in pieces, by chunk, and their checksum."""


class FetchServer(kv_transfer_pb2_grpc.KvTransferServiceServicer):
    """Implements KvTransferService on a worker with KV pools."""

    def __init__(self, handoffs: Callable[[], HandoffsByBlocks]) -> None:
        """`handoffs` raises while the worker has none."""
        self._handoffs = handoffs

    # A coroutine, unlike the stub: a cancelled generator leaves cleanup to the garbage collector.
    async def Fetch(self, request_iterator: object, context: ServedContext) -> None:  # type: ignore[override]
        opening = await _opening(context)
        if opening is None:
            return
        handoffs = self._handoffs()
        sent = _lease_of(opening, handoffs.sent)
        fetch = ServedFetch(handoffs.own, sent, opening)
        sent.open_fetch(fetch)
        try:
            await until_first_ends(
                fetch.send(context), fetch.receive(context), fetch.until_aborted()
            )
        finally:
            sent.fetch_ended()


async def _opening(context: ServedContext) -> pb.OpenFetch | None:
    """Returns the first message, or None if the receiver has left."""
    try:
        async with asyncio.timeout(OPEN_SECONDS):
            request = await context.read()
    except TimeoutError:
        raise InvalidRequest(f"open did not come within {OPEN_SECONDS:g} s") from None
    if not isinstance(request, pb.FetchRequest):
        return None
    if request.WhichOneof("request") != "open":
        raise InvalidRequest("the first message of a fetch must be open")
    return request.open


def _lease_of(opening: pb.OpenFetch, table: LeaseTable[SentBlocks]) -> SentBlocks:
    lease_id = opening.blocks.lease_id
    sent = table.get(lease_id)
    if sent is None:
        raise unknown(lease_id, "open.blocks.lease_id")
    if opening.compatibility_hash != sent.hash:
        raise Mismatch("the KV is that of another model, tokenizer or adapter")
    return sent


class ServedFetch:
    """A receiver's fetch of a lease."""

    def __init__(self, own: OwnKv, sent: SentBlocks, opening: pb.OpenFetch) -> None:
        if opening.transport not in own.transports:
            known = ", ".join(map(pb.KvTransport.Name, own.transports))
            raise InvalidField.of("open.transport", opening.transport, f"one of {known}")
        if opening.blocks.first_kv_head or opening.blocks.kv_heads:
            raise InvalidField(
                "is set, but a fetch has all heads; leave it out", field="open.blocks.kv_heads"
            )
        self.transport = opening.transport
        self.sent_bytes = 0
        self._own, self._sent = own, sent
        self._streams_data = own.transports[opening.transport] is None
        asked = opening.blocks.block_positions
        self._positions = frozenset(asked) if asked else range(2**32)
        checksums = own.settings.checksums
        self._has_checksums = checksums == "all" or (checksums == "grpc" and self._streams_data)
        self._chunk_bytes = min(MAX_CHUNK_BYTES, own.max_message_bytes - CHUNK_OVERHEAD_BYTES)
        self._outgoing: deque[AnySenderAction] = deque()
        self._ahead: asyncio.Task[PartBytes] | None = None
        """The bytes of the first of `_outgoing`, read while the part before is being sent."""
        self._filled = asyncio.Event()
        self._aborted = asyncio.Event()

    def put(self, action: AnySenderAction) -> None:
        self._outgoing.append(action)
        self._filled.set()

    def abort(self) -> None:
        self._outgoing.clear()
        self._aborted.set()

    async def send(self, context: ServedContext) -> None:
        """Sends until the confirmation."""
        try:
            await self._send_all(context)
        finally:
            if self._ahead:
                self._ahead.cancel()

    async def receive(self, context: ServedContext) -> None:
        """Reads until the receiver ends the call. Raises InvalidRequest for any message but `received`."""
        while isinstance(request := await context.read(), pb.FetchRequest):
            if request.WhichOneof("request") != "received":
                raise InvalidRequest("after open, a fetch has no other message than received")
            self._sent.received()

    async def until_aborted(self) -> None:
        """Raises HandoffFailed when the lease has ended."""
        await self._aborted.wait()
        raise HandoffFailed(f"lease {self._sent.lease_id} has ended at the sender")

    async def _send_all(self, context: ServedContext) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._outgoing:
                match self._outgoing.popleft():
                    case SenderAction.SEND_CONFIRMED:
                        await context.write(pb.FetchResponse(confirmed=pb.FetchConfirmed()))
                        return
                    case SendMark(mark):
                        await context.write(pb.FetchResponse(commit=_mark_message(mark)))
                    case AnnouncePart(part):
                        await self._send_part(context, part)

    async def _send_part(self, context: ServedContext, number: int) -> None:
        part = self._sent.parts[number]
        reading, self._ahead = self._ahead or self._begin_reading(number), None
        chunks, checksum = await reading
        self.sent_bytes += sum(sizes_of(part, self._own.memory.shards, len(self._wanted(part))))
        message = pb.KvPart(
            part=number,
            first_block_position=part.first_block,
            blocks=part.blocks,
            first_layer=part.first_layer,
            layers=part.layers,
            checksum=checksum,
        )
        await context.write(pb.FetchResponse(part=message))
        chunks.reverse()
        while chunks:
            following = self._outgoing[0] if self._outgoing else None
            if self._ahead is None and isinstance(following, AnnouncePart):
                self._ahead = self._begin_reading(following.part)
            pieces = chunks.pop()
            await context.write_pieces(head_of(sum(map(len, pieces))), *pieces)

    def _wanted(self, part: Part) -> list[int]:
        """The blocks of a part to send, as numbers of the pool."""
        return list(part.wanted(self._sent.blocks, self._positions).values())

    def _begin_reading(self, number: int) -> asyncio.Task[PartBytes]:
        return asyncio.get_running_loop().create_task(self._read(self._sent.parts[number]))

    async def _read(self, part: Part) -> PartBytes:
        """Reads a part, if the receiver needs the bytes or the checksum."""
        chunks: list[list[memoryview]] = []
        checksum = 0

        def steps() -> Iterator[None]:
            nonlocal checksum
            own, take = self._own.memory, self._own.message_memory.take
            for pieces in chunks_of(own, part, self._wanted(part), self._chunk_bytes, take):
                if self._has_checksums:
                    checksum = checksum_of(pieces, checksum)
                if self._streams_data:
                    chunks.append(pieces)
                yield

        if self._streams_data or self._has_checksums:
            await self._own.copying(steps())
        return chunks, checksum


def _mark_message(mark: CommitMark) -> pb.KvCommitMark:
    return pb.KvCommitMark(
        parts=mark.parts,
        computed_tokens=mark.content.tokens,
        token_digest=mark.content.digest,
    )
