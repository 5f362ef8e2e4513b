"""What any HTTP client does: JSON in, JSON or server-sent events out."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from io import BytesIO
from types import TracebackType
from typing import Any, Self

import aiohttp

PATIENCE = aiohttp.ClientTimeout(total=240)


@dataclass(frozen=True)
class Reply:
    """A response that was read to its end."""

    status: int
    headers: Any
    body: bytes

    @property
    def content_type(self) -> str:
        return str(self.headers.get("Content-Type"))

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The server-sent events, each of which must be `data: <JSON>` and an empty line."""
        *events, rest = self.body.decode().split("\n\n")
        assert not rest
        assert all(event.startswith("data: ") for event in events)
        return [json.loads(event.removeprefix("data: ")) for event in events]


class PlainHttp:
    """Talks to one address."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._base = f"http://{address}"

    async def __aenter__(self) -> Self:
        self.session = aiohttp.ClientSession(
            timeout=PATIENCE, headers={"Accept-Encoding": "identity"}
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.session.close()

    async def is_ready(self) -> bool:
        return (await self.get("/v2/health/ready")).status == 200

    async def call(self, method: str, path: str, body: Any = None, **more: Any) -> Reply:
        """One request: `body` is sent as JSON unless it is bytes, a large one as a file."""
        what = {"data": body} if isinstance(body, (bytes, BytesIO)) else {"json": body}
        if body is None:
            what = {}
        async with self.session.request(method, self._base + path, **what, **more) as response:
            return Reply(response.status, response.headers, await response.read())

    async def get(self, path: str) -> Reply:
        return await self.call("GET", path)

    async def post(self, path: str, body: Any, **more: Any) -> Reply:
        return await self.call("POST", path, body, **more)

    async def events(self, path: str, body: Any) -> AsyncGenerator[Any]:
        """Server-sent events as they come; leaving disconnects."""
        async with self.session.post(self._base + path, json=body) as response:
            async for line in response.content:
                if line.strip():
                    yield json.loads(line.decode().removeprefix("data: "))
