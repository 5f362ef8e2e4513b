"""A connection of some gRPC library, as the cases see it. Runs in the library's own environment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Options:
    """How to connect."""

    address: str
    ca: str = ""
    """File of the authority; '' for plain text."""
    keepalive_seconds: float = 0.0
    """Interval of PINGs, also without calls; 0 for the library's own."""
    gzip: bool = False
    """Whether requests are compressed."""

    @property
    def host_and_port(self) -> tuple[str, int]:
        host, _, port = self.address.rpartition(":")
        return host, int(port)

    @property
    def authorities(self) -> bytes:
        return Path(self.ca).read_bytes()


MAX_MESSAGE_BYTES = 64 * 2**20


class Refused(Exception):
    """A call ended with a status other than OK."""

    def __init__(self, code: str, details: str) -> None:
        super().__init__(f"{code}: {details}")
        self.code = code


class Answer(Protocol):
    """A message class."""

    @classmethod
    def FromString(cls, data: bytes) -> Any: ...


class Stream(ABC):
    """A call with a stream of answers."""

    @abstractmethod
    async def send(self, request: Any) -> None:
        """Sends another request."""

    @abstractmethod
    async def end(self) -> None:
        """Sends no more."""

    @abstractmethod
    def answers(self) -> AsyncGenerator[Any, None]:
        """The answers that follow, to the end. Raises Refused."""

    @abstractmethod
    async def cancel(self) -> None:
        """Cancels the call."""


class Connection(Protocol):
    """A connection to a router."""

    async def unary(self, path: str, request: Any, answer: type[Answer]) -> Any:
        """The answer to a request. Raises Refused."""

    def stream(
        self, path: str, request: Any, answer: type[Answer], seconds: float | None = None
    ) -> AbstractAsyncContextManager[Stream]:
        """A call with a single request, and `seconds` for all of it."""

    def duplex(self, path: str, answer: type[Answer]) -> AbstractAsyncContextManager[Stream]:
        """A call with streams in both directions."""
