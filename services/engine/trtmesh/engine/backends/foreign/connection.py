"""The connection to a foreign engine, and the meaning of the statuses with which its calls end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc
from trtmesh.chassis.addresses import ForeignAddress
from trtmesh.chassis.channels import open_channel
from trtmesh.chassis.errors import (
    BackendFailed,
    InvalidRequest,
    QueueFull,
    TrtmeshError,
    UnsupportedCall,
    WorkerLost,
)

S = grpc.StatusCode

GONE = frozenset({S.UNAVAILABLE, S.CANCELLED, S.DEADLINE_EXCEEDED})
"""Statuses of a lost engine: another worker may continue."""


class Connection:
    """One channel to an engine. Unary calls have a deadline; streams end with their reader."""

    def __init__(
        self, address: ForeignAddress, max_message_bytes: int, answer_seconds: float
    ) -> None:
        self.address = address
        self.channel = open_channel(str(address.address), max_message_bytes)
        self._answer_seconds = answer_seconds

    async def ask(self, method: Callable[..., Any], request: object) -> Any:
        """One answer. Raises AioRpcError."""
        return await method(request, timeout=self._answer_seconds)

    async def stream(
        self, method: Callable[..., Any], request: object
    ) -> AsyncGenerator[Any, None]:
        """The messages of a server stream, cancelled on closing."""
        call = method(request)
        try:
            async for message in call:
                yield message
        finally:
            call.cancel()

    def error_of(self, error: grpc.aio.AioRpcError) -> TrtmeshError:
        """The error of an item whose call ended with a status."""
        code, text = error.code(), error.details() or ""
        who = f"{self.address} answered {code.name}"
        told = f"{who}: {text}" if text else who
        if code in (S.INVALID_ARGUMENT, S.OUT_OF_RANGE, S.NOT_FOUND, S.FAILED_PRECONDITION):
            return InvalidRequest(told)
        if code is S.RESOURCE_EXHAUSTED:
            return QueueFull(f"{told}; try again later or elsewhere")
        if code is S.UNIMPLEMENTED:
            return UnsupportedCall(told)
        if code in GONE:
            return WorkerLost(told)
        return BackendFailed(told)

    async def close(self) -> None:
        """Ends every call."""
        await self.channel.close()
