"""A receiver's fetch: asks a sender for the KV of a lease, and hands arriving messages on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import grpc
from trtmesh.chassis.errors import TrtmeshError
from trtmesh.chassis.grpc.client import ClientCall, Method, connected
from trtmesh.chassis.grpc.client.call import CallEnded
from trtmesh.chassis.tasks import until_first_ends
from trtmesh.engine.handoff import messages
from trtmesh.engine.handoff.descriptor import RemoteKv
from trtmesh.engine.handoff.messages import Chunk
from trtmesh.engine.handoff.own_kv import OwnKv
from trtmesh.v1 import kv_transfer_pb2 as pb

log = logging.getLogger(__name__)

FETCH: Method[pb.FetchRequest, pb.FetchResponse | Chunk] = Method(
    "/trtmesh.v1.KvTransferService/Fetch", pb.FetchRequest.SerializeToString, messages.parse
)

FetchCall = ClientCall[pb.FetchRequest, pb.FetchResponse | Chunk]

MAX_MESSAGE_BYTES = 2**21

_RECEIVED = pb.FetchRequest(received=pb.PartsReceived())

FAREWELL_SECONDS = 10.0
"""Time for the sender to end the call after `received`."""


class ProtocolBroken(Exception):
    """The sender broke the protocol."""


class Fetch:
    """A fetch from `run` to `close`; later messages are ignored."""

    def __init__(
        self,
        own: OwnKv,
        remote: RemoteKv,
        transport: pb.KvTransport.ValueType,
        positions: Sequence[int],
        take: Callable[[pb.FetchResponse | Chunk], Awaitable[None]],
        lost: Callable[[str], None],
    ) -> None:
        """`take` may wait, and so hold up the sender; raises ProtocolBroken. `lost` takes the cause of an end before
        `close`."""
        self._own, self._remote, self._take, self._lost = own, remote, take, lost
        self._opening = pb.OpenFetch(
            blocks=pb.WantedBlocks(lease_id=remote.lease_id, block_positions=positions),
            compatibility_hash=remote.hash,
            transport=transport,
        )
        self._has_received = asyncio.Event()
        self._has_told = False
        self._closed = asyncio.Event()

    def send_received(self) -> None:
        """Reports the end of all reads to the sender."""
        self._has_received.set()

    def close(self) -> None:
        self._closed.set()

    async def run(self) -> None:
        """Fetches until `close`; reports any other end."""
        detail = "it ended the fetch"
        try:
            await self._fetch()
        except grpc.aio.AioRpcError as error:
            detail = error.details() or error.code().name
        except (TrtmeshError, ProtocolBroken) as error:
            detail = str(error)
        except Exception as error:
            # Broad on purpose: the lease must not wait until the expiry.
            log.exception("unexpected error in a fetch")
            detail = f"{type(error).__name__}: {error}"
        if not self._closed.is_set():
            self._lost(f"worker {self._remote.worker}: {detail}")

    async def _fetch(self) -> None:
        async with connected(
            self._remote.address,
            MAX_MESSAGE_BYTES,
            self._own.limits.dial_seconds,
            self._own.tls_of_peers(),
            self._own.message_memory.take,
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
            await self._take(response)

    async def _tell_received(self, call: FetchCall) -> None:
        await self._has_received.wait()
        self._has_told = True
        await call.write(_RECEIVED)
        await self._closed.wait()

    async def _part_well(self, call: FetchCall) -> None:
        """Confirms complete arrival: the sender frees the blocks."""
        with suppress(TimeoutError, grpc.aio.AioRpcError, CallEnded):
            async with asyncio.timeout(FAREWELL_SECONDS):
                if not self._has_told:
                    await call.write(_RECEIVED)
                call.half_close()
                while await call.read() is not None:
                    pass
