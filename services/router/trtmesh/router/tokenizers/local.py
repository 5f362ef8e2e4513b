"""A tokenizer in the router's own process: the handlers of its service, called without a connection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from trtmesh.chassis.grpc.client import Connection
from trtmesh.chassis.grpc.server import GrpcServer
from trtmesh.chassis.in_memory import InMemoryConnection
from trtmesh.chassis.service import Service
from trtmesh.router.tokenizers.tokenizer import Tokenizer

LOCAL = "local"
"""The entry of `router.tokenizers` that means this process, and the address of its tokenizer."""


class LocalTokenizer(Tokenizer):
    """A tokenizer whose commands and events are handed over within the process.

    It may fail as a process of its own may: its streams end by errors, and a text that it breaks on ends an item. It
    cannot be lost alone, or be slow alone.
    """

    def __init__(self, service: Service, **link: Any) -> None:
        super().__init__(LOCAL, **link)
        self._service = service
        self._server = GrpcServer(link["max_message_bytes"])
        service.register(self._server)

    async def start(self) -> None:
        """Loads the vocabulary. Raises StartupError."""
        await self._service.start()

    async def stop(self) -> None:
        """Ends its streams, and its threads after their batches."""
        await self._service.stop()

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        yield InMemoryConnection(self._server)
