"""What the HTTP targets share: a session, events of a stream, and errors."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
import orjson
from trtmesh.chassis.errors import (
    InvalidRequest,
    NotFound,
    QueueFull,
    RateLimited,
    StreamIncomplete,
    TrtmeshError,
    Unauthenticated,
    Unavailable,
)
from trtmesh.tools.bench.targets.target import Connecting

MOST_EVENT_BYTES = 1 << 26
SHOWN = 500
"""Characters of an answer in an error."""

ERRORS: Mapping[int, type[TrtmeshError]] = {
    400: InvalidRequest,
    401: Unauthenticated,
    403: Unauthenticated,
    404: NotFound,
    422: InvalidRequest,
    429: RateLimited,
    503: QueueFull,
}


class HttpServer:
    """Posts JSON to a server; each request under way has a connection, which the next one takes over."""

    def __init__(self, connecting: Connecting, session: aiohttp.ClientSession) -> None:
        (self._address,) = connecting.url.addresses
        self._session = session
        self._server_name = connecting.tls.server_name or None if connecting.tls else None

    async def events(self, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """The data of each server-sent event, until the end of the answer. Raises TrtmeshError."""
        with self._explained():
            async with self._request("POST", path, data=body) as response:
                if response.content_type != "text/event-stream":
                    raise InvalidRequest(
                        f"the answer is {response.content_type}, not a stream: {await _shown(response)}"
                    )
                async for event in _events(response.content):
                    yield event

    async def get(self, path: str) -> Mapping[str, Any]:
        """The object at a path. Raises TrtmeshError."""
        with self._explained():
            async with self._request("GET", path) as response:
                return parsed(await response.content.read(MOST_EVENT_BYTES))

    @asynccontextmanager
    async def _request(self, method: str, path: str, **given: Any) -> AsyncIterator[Any]:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        async with self._session.request(
            method, path, headers=headers, server_hostname=self._server_name, **given
        ) as response:
            if response.status != 200:
                kind = ERRORS.get(response.status, TrtmeshError)
                raise kind(f"HTTP {response.status}: {await _shown(response)}")
            yield response

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except aiohttp.ClientConnectorError as error:
            raise Unavailable(f"{self._address}: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise StreamIncomplete(f"{type(error).__name__}: {error}") from error


@asynccontextmanager
async def http_server(connecting: Connecting) -> AsyncIterator[HttpServer]:
    scheme = "https" if connecting.tls else "http"
    tls = connecting.tls.context(("http/1.1",)) if connecting.tls else True
    key = connecting.api_key
    async with aiohttp.ClientSession(
        f"{scheme}://{connecting.url.addresses[0]}",
        connector=aiohttp.TCPConnector(limit=0, ssl=tls),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        headers=dict([key.metadata]) if key else None,
    ) as session:
        yield HttpServer(connecting, session)


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    rest = b""
    async for part in content.iter_any():
        *events, rest = (rest + part).replace(b"\r\n", b"\n").split(b"\n\n")
        if len(rest) > MOST_EVENT_BYTES:
            raise InvalidRequest(f"an event has more than {MOST_EVENT_BYTES} bytes")
        for event in events:
            if data := _data(event):
                yield data
    if data := _data(rest):
        yield data


def _data(event: bytes) -> bytes:
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


async def _shown(response: aiohttp.ClientResponse) -> str:
    return (await response.content.read(SHOWN)).decode(errors="replace").strip()


def parsed(event: bytes) -> Mapping[str, Any]:
    """The object of an event or of an answer. Raises InvalidRequest, or the error that it is."""
    try:
        found = orjson.loads(event)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the server sent no JSON: {event[:SHOWN]!r}") from error
    if not isinstance(found, dict):
        raise InvalidRequest(f"the server sent no object: {event[:SHOWN]!r}")
    if told := found.get("error"):
        raise TrtmeshError(str(told.get("message", told) if isinstance(told, dict) else told))
    return found
