"""The gRPC channel of a client, and the errors of calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Self

import grpc
from trtmesh.chassis.bearer import Bearer
from trtmesh.chassis.channels import open_channel
from trtmesh.chassis.connecting import check_address, connection_error, service_error
from trtmesh.chassis.error_wire import REASON_METADATA_KEY, from_status
from trtmesh.chassis.errors import TrtmeshError
from trtmesh.chassis.tls.client import ClientTls

CONNECT_SECONDS = 10.0
"""Longest wait for the HTTP/2 greeting of a sole peer, far away or busy."""

EXPLANATIONS: Mapping[grpc.StatusCode, Callable[[str, str], TrtmeshError | None]] = {
    grpc.StatusCode.UNAVAILABLE: connection_error,
    grpc.StatusCode.UNIMPLEMENTED: service_error,
}
"""By status: turns an address and the words of gRPC into an error, if the words are known."""


class ServerChannel:
    """A channel to a server, open inside `async with`, for a single event loop. Raises SettingsError unless the address
    is host:port."""

    def __init__(
        self,
        address: str,
        *,
        max_message_bytes: int = 64 * 2**20,
        connect_seconds: float = CONNECT_SECONDS,
        tls: ClientTls | None = None,
        secret: Bearer | None = None,
    ) -> None:
        check_address(address)
        self.address = address
        self.metadata = () if secret is None else (secret.metadata,)
        """Metadata of every call."""
        self._max_message_bytes = max_message_bytes
        self._connect_seconds = connect_seconds
        self._tls = tls
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        self._channel = open_channel(
            self.address, self._max_message_bytes, self._connect_seconds, self._tls
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        channel, self._channel = self.channel, None
        await channel.close()

    @property
    def channel(self) -> grpc.aio.Channel:
        if self._channel is None:
            name = type(self).__name__
            raise RuntimeError(f"the client is not open; use `async with {name}(...) as client:`")
        return self._channel


@contextmanager
def typed_errors(address: str = "") -> Iterator[None]:
    """Turns a failed call into the server's TrtmeshError, or into a TrtmeshError with the server's address."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        metadata = error.trailing_metadata()
        details = error.details() or error.code().name
        if REASON_METADATA_KEY not in metadata:
            # Not from a server of ours.
            explain = EXPLANATIONS.get(error.code())
            if explain and (explained := explain(address, details)):
                raise explained from error
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                # The client's own deadline: gRPC says "Stream removed (Deadline Exceeded)" or the like.
                details = "the call had no answer, or no end, within its timeout; allow more time"
        raise from_status(error.code(), details, metadata) from error
    except asyncio.CancelledError as error:
        # Closing the client cancels all calls, and grpc.aio raises CancelledError in tasks without a cancellation.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise TrtmeshError("the client was closed during the call") from error
