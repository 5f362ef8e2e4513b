"""Bodies over HTTP: received within limits of size and time, and decompressed."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from time import perf_counter
from typing import Any, TypeAlias, TypeVar

from aiohttp import hdrs, web
from trtmesh.chassis.errors import Exhausted, InvalidRequest, UnsupportedCall
from trtmesh.chassis.fair.limits import Account, Budget
from trtmesh.chassis.fair.messages import MessageAdmission, ReceivedMessage
from trtmesh.chassis.http_server import HttpServer
from trtmesh.chassis.quoting import cut
from trtmesh.router.doors.http.json_bodies import parse_json

COMPRESSED = ("gzip", "deflate")
UNFINISHED = "of all requests that are received"
MOST_SETTINGS_BYTES = 2**16
"""Largest body of a request about the server's settings."""
COMPRESSED_PIECE, INFLATED_PIECE = 2**18, 2**20
"""Most bytes decompressed at once, and most bytes of the result."""
MAPPED_BYTES = 2**18
"""Least size of a body in a mapping of its own."""

Body: TypeAlias = "bytes | memoryview"
"""A body or a part of it: to copy the largest takes 50 ms."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What bodies may take."""

    most_bytes: int
    """Largest body, before and after decompression."""
    most_json_bytes: int
    """Largest JSON in a body."""
    receive_seconds: float


class Bodies:
    def __init__(self, limits: BodyLimits, server: HttpServer, admission: MessageAdmission) -> None:
        self.limits = limits
        self._server = server
        self._admission = admission

    @asynccontextmanager
    async def admitted(
        self, request: web.Request, read: Callable[[ReceivedMessage, Body], Awaitable[T]]
    ) -> AsyncIterator[T]:
        """The block of the request made by `read` from a body, which is freed before. Raises TrtmeshError or an
        HTTPException."""
        async with self.of(request, self.limits.most_bytes) as body:
            message = ReceivedMessage(self._admission, len(body))
            made = await read(message, body)
            del body
        with message.admitted():
            yield made

    async def written(self, cost: int, write: Callable[[], T]) -> T:
        """The result of `write`, which takes as long as to parse a message of `cost` bytes."""
        return await self._admission.thread.run(cost, write, begun=True)

    @asynccontextmanager
    async def of(self, request: web.Request, most_bytes: int) -> AsyncIterator[Body]:
        """A body, decompressed. Inside the block the body counts as unfinished, and is shed if the largest. Raises
        TrtmeshError or an HTTPException."""
        encoding = request.headers.get(hdrs.CONTENT_ENCODING, "").lower()
        if encoding not in (*COMPRESSED, "", "identity"):
            raise UnsupportedCall(
                f"Unsupported compression type '{cut(encoding)}'; send the body as gzip, as deflate or as it is"
            )
        # Small bodies mostly come with their heads, whose turn is theirs.
        is_whole = request.content.is_eof() and not encoding
        # More than all may hold would always have to give way.
        most_bytes, setting = min(
            (most_bytes, "max_message_bytes"), (self._server.budget.limit, UNFINISHED)
        )
        async with _account(self._server.budget) as account:
            body = await self._receive(request, most_bytes, setting, account)
            if encoding in COMPRESSED:
                body = await self._decompressed(body, most_bytes, setting, account)
            if not is_whole:
                await self._server.turn(request)
            yield body

    async def json_of(self, request: web.Request) -> dict[str, Any]:
        """A small body as a JSON object, {} for an empty one. Raises TrtmeshError or an HTTPException."""
        async with self.of(request, MOST_SETTINGS_BYTES) as body:
            return parse_json(body, MOST_SETTINGS_BYTES) if body else {}

    async def _receive(
        self, request: web.Request, most_bytes: int, setting: str, account: Account
    ) -> Body:
        if (request.content_length or 0) > most_bytes:
            raise _too_large(most_bytes, setting)
        seconds = self.limits.receive_seconds
        body = _Received(request.content_length or most_bytes, setting, account)
        try:
            async with asyncio.timeout(seconds):
                async for part in request.content.iter_any():
                    began = perf_counter()
                    body.add(part)
                    self._server.turns.charge(perf_counter() - began)
        except TimeoutError:
            raise web.HTTPRequestTimeout(
                text=f"the body of the request did not come within {seconds:g} s"
            ) from None
        return body.whole()

    async def _decompressed(
        self, body: Body, most_bytes: int, setting: str, account: Account
    ) -> Body:
        """Decompresses gzip or deflate, whichever the header says, in pieces that count before the next is made."""
        decompressor = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
        data = _Received(most_bytes, setting, account)
        at, piece = 0, b""
        rest: Body = b""
        while not decompressor.eof and (at < len(body) or rest or piece):
            if not rest:
                rest, at = body[at : at + COMPRESSED_PIECE], at + COMPRESSED_PIECE
            try:
                # zlib releases the GIL.
                piece = await asyncio.to_thread(decompressor.decompress, rest, INFLATED_PIECE)
            except zlib.error as error:
                raise InvalidRequest(
                    f"the body of the request is not a valid compressed stream: {error}"
                ) from error
            rest = decompressor.unconsumed_tail
            data.add(piece)
        if not decompressor.eof or decompressor.unused_data or at < len(body):
            raise InvalidRequest("the body of the request is not one whole compressed stream")
        return data.whole()


class _Received:
    """An arriving body. A large body lies in a separate mapping, with memory only for written pages, freed at once: a
    growing object would be moved again and again, and joined pieces would exist twice."""

    def __init__(self, most_bytes: int, setting: str, account: Account) -> None:
        self._most_bytes = most_bytes
        self._setting = setting
        self._account = account
        self._size = 0
        self._small = bytearray()
        self._mapping: memoryview | None = None

    def add(self, part: Body) -> None:
        """Raises HTTPRequestEntityTooLarge."""
        began, self._size = self._size, self._size + len(part)
        if self._size > self._most_bytes:
            raise _too_large(self._most_bytes, self._setting)
        self._account.add(len(part))
        if self._mapping is None and self._size < MAPPED_BYTES:
            self._small += part
            return
        if self._mapping is None:
            mapping = mmap(-1, self._most_bytes, flags=MAP_PRIVATE | MAP_ANONYMOUS)
            self._mapping = memoryview(mapping)
            self._mapping[:began] = self._small
            self._small.clear()
        self._mapping[began : self._size] = part

    def whole(self) -> Body:
        if self._mapping is None:
            return bytes(self._small)
        return self._mapping[: self._size].toreadonly()


@asynccontextmanager
async def _account(budget: Budget) -> AsyncIterator[Account]:
    """The account of a body. Raises Exhausted if the body must be shed."""

    def shed() -> None:
        account.close()
        ending.reschedule(asyncio.get_running_loop().time())

    try:
        async with asyncio.timeout(None) as ending:
            account = budget.account(shed)
            try:
                yield account
            finally:
                account.close()
    except TimeoutError:
        if not ending.expired():
            raise
        raise Exhausted(
            "unfinished requests hold too many bytes together, and this one most; try again later",
            retry_after_ms=1000,
        ) from None


def _too_large(most_bytes: int, setting: str) -> web.HTTPRequestEntityTooLarge:
    text = f"the body of the request has more than {most_bytes} bytes ({setting})"
    return web.HTTPRequestEntityTooLarge(most_bytes, text=text)
