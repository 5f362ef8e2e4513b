"""A receiver's fetch: asks a sender for the KV of a lease, and hands on what arrives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import grpc
from trtmesh.chassis.errors import TrtmeshError
from trtmesh.chassis.grpc.client import ClientCall, Method, connected
from trtmesh.chassis.grpc.client.call import CallEnded
from trtmesh.chassis.tasks import until_first_ends
from trtmesh.chassis.tls.client import PeerTls
from trtmesh.engine.handoff import chunks
from trtmesh.engine.handoff.chunks import Chunk
from trtmesh.engine.handoff.descriptor import RemoteKv
from trtmesh.engine.handoff.lease import CommitMark
from trtmesh.engine.handoff.message_memory import MessageMemory
from trtmesh.engine.kv_memory import Content
from trtmesh.v1 import kv_transfer_pb2 as pb

log = logging.getLogger(__name__)

FETCH: Method[pb.FetchRequest, pb.FetchResponse | Chunk] = Method(
    "/trtmesh.v1.KvTransferService/Fetch", pb.FetchRequest.SerializeToString, chunks.parse
)

FetchCall = ClientCall[pb.FetchRequest, pb.FetchResponse | Chunk]

MAX_MESSAGE_BYTES = 2**21

_RECEIVED = pb.FetchRequest(received=pb.PartsReceived())

FAREWELL_SECONDS = 10.0
"""Time for the sender to end the call after `received`."""


class FetchEvents(Protocol):
    """The lease that a fetch feeds."""

    async def part_announced(self, part: pb.KvPart) -> None:
        """Takes a part. May wait, which holds up the sender."""

    def chunk_arrived(self, data: Chunk) -> None:
        """Takes the next bytes of the last part. Raises ProtocolBroken."""

    def committed(self, mark: CommitMark) -> None:
        """Takes the commit mark."""

    def confirmed(self) -> None:
        """Takes the confirmation."""

    def fetch_lost(self, detail: str) -> None:
        """The fetch ended before it was closed."""


class ProtocolBroken(Exception):
    """The sender broke the protocol."""


class Fetch:
    """A fetch from `run` to `close`; afterwards nothing that arrives is processed."""

    def __init__(
        self,
        remote: RemoteKv,
        transport: pb.KvTransport.ValueType,
        transport_state: bytes,
        positions: Sequence[int],
        events: FetchEvents,
        dial_seconds: float,
        tls: PeerTls | None,
        memory: MessageMemory,
    ) -> None:
        """`memory` is for the chunks."""
        self._remote, self._events, self._dial_seconds = remote, events, dial_seconds
        self._tls = tls
        self._memory = memory
        self._opening = pb.OpenFetch(
            blocks=pb.WantedBlocks(lease_id=remote.lease_id, block_positions=positions),
            compatibility_hash=remote.hash,
            transport=transport,
            transport_state=transport_state,
        )
        self._has_received = asyncio.Event()
        self._has_told = False
        self._closed = asyncio.Event()

    def send_received(self) -> None:
        """Tells the sender that all reads have ended."""
        self._has_received.set()

    def close(self) -> None:
        self._closed.set()

    async def run(self) -> None:
        """Fetches until `close`; reports any other end as `fetch_lost`."""
        detail = "it ended the fetch"
        try:
            await self._fetch()
        except grpc.aio.AioRpcError as error:
            detail = error.details() or error.code().name
        except (TrtmeshError, ProtocolBroken) as error:
            detail = str(error)
        except Exception as error:
            # Broad on purpose: the lease must not wait for its expiry.
            log.exception("unexpected error in a fetch")
            detail = f"{type(error).__name__}: {error}"
        if not self._closed.is_set():
            self._events.fetch_lost(f"worker {self._remote.worker}: {detail}")

    async def _fetch(self) -> None:
        async with connected(
            self._remote.address,
            MAX_MESSAGE_BYTES,
            self._dial_seconds,
            self._tls,
            self._memory.take,
        ) as connection:
            if self._closed.is_set():
                return
            call = connection.open(FETCH)
            try:
                await call.write(pb.FetchRequest(open=self._opening))
                await until_first_ends(
                    self._receive(call), self._tell_received(call), self._closed.wait()
                )
                if self._closed.is_set() and self._has_received.is_set():
                    await self._part_well(call)
            finally:
                call.cancel()

    async def _receive(self, call: FetchCall) -> None:
        while not self._closed.is_set() and (response := await call.read()) is not None:
            if isinstance(response, Chunk):
                self._events.chunk_arrived(response)
                continue
            match response.WhichOneof("response"):
                case "part":
                    await self._events.part_announced(response.part)
                case "chunk":
                    self._events.chunk_arrived(Chunk(response.chunk.data))
                case "commit":
                    self._events.committed(_mark_of(response.commit))
                case "confirmed":
                    self._events.confirmed()
                case _:
                    raise ProtocolBroken("it sent an unknown message")

    async def _tell_received(self, call: FetchCall) -> None:
        await self._has_received.wait()
        self._has_told = True
        await call.write(_RECEIVED)
        await self._closed.wait()

    async def _part_well(self, call: FetchCall) -> None:
        """Lets the sender know that everything arrived: it frees the blocks."""
        with suppress(TimeoutError, grpc.aio.AioRpcError, CallEnded):
            async with asyncio.timeout(FAREWELL_SECONDS):
                if not self._has_told:
                    await call.write(_RECEIVED)
                call.half_close()
                while await call.read() is not None:
                    pass


def _mark_of(message: pb.KvCommitMark) -> CommitMark:
    return CommitMark(message.parts, Content(message.computed_tokens, message.token_digest))
