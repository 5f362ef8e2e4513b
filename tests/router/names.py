"""A scripted name service, in place of the system's for one event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

import pytest


class Names:
    """Scripted name service: `answers` by host, without an answer `failure`; hosts in `slow` wait for `answered`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, Sequence[str]] = {}
        self.failure = socket.EAI_NONAME
        self.slow: set[str] = set()
        self.answered = asyncio.Event()
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", self._resolve)

    async def answer(self) -> None:
        """Answers the waiting lookups, and returns when their callers have resumed."""
        self.answered.set()
        for _ in range(10):
            await asyncio.sleep(0)

    async def _resolve(self, host: str, port: int, **_: Any) -> list[Any]:
        if host in self.slow:
            await self.answered.wait()
        addresses = self.answers.get(host, ())
        if not addresses:
            raise socket.gaierror(self.failure, "no such name")
        return [
            (
                socket.AF_INET6 if ":" in address else socket.AF_INET,
                socket.SOCK_STREAM,
                6,
                "",
                (address, port),
            )
            for address in addresses
        ]
