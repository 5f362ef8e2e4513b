"""Bodies of HTTP requests: received within limits of size and time, decompressed, read as JSON."""

from __future__ import annotations

import asyncio
import json
import zlib
from http import HTTPStatus
from typing import Any

from aiohttp import hdrs, web
from trtmesh.chassis.errors import InvalidRequest, UnsupportedCall

COMPRESSED = ("gzip", "deflate")


async def read_body(request: web.Request, receive_seconds: float) -> bytes:
    """The body, decompressed, at most as large as the application says both before and behind that. Raises TrtmeshError
    or an HTTPException."""
    encoding = request.headers.get(hdrs.CONTENT_ENCODING, "").lower()
    if encoding not in (*COMPRESSED, "", "identity"):
        raise UnsupportedCall(
            f"Unsupported compression type '{encoding}'; send the body as gzip, as deflate or as it is"
        )
    body = await _receive(request, receive_seconds)
    if encoding in COMPRESSED:
        # zlib lets other threads run meanwhile.
        return await asyncio.to_thread(_decompress, body, request.client_max_size)
    return body


async def _receive(request: web.Request, receive_seconds: float) -> bytes:
    try:
        async with asyncio.timeout(receive_seconds):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(
            text=f"the body of the request did not come within {receive_seconds:g} s (http_receive_seconds)"
        ) from None
    except web.HTTPRequestEntityTooLarge:
        raise _too_large(request.client_max_size) from None


def _decompress(body: bytes, most_bytes: int) -> bytes:
    """A body of gzip or deflate, which say themselves which they are. No more than one byte too many is ever made."""
    decompressor = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
    try:
        data = decompressor.decompress(body, most_bytes + 1)
    except zlib.error as error:
        raise InvalidRequest(
            f"the body of the request is not compressed as it says: {error}"
        ) from error
    if len(data) > most_bytes:
        raise _too_large(most_bytes)
    if not decompressor.eof or decompressor.unused_data:
        raise InvalidRequest("the body of the request is not one whole compressed stream")
    return data


def _too_large(most_bytes: int) -> web.HTTPRequestEntityTooLarge:
    text = f"the body of the request has more than {most_bytes} bytes (max_message_bytes)"
    return web.HTTPRequestEntityTooLarge(most_bytes, text=text)


async def read_json(request: web.Request, receive_seconds: float) -> dict[str, Any]:
    """The body as a JSON object; an empty body is an empty object. Raises TrtmeshError or an HTTPException."""
    body = await read_body(request, receive_seconds)
    return parse_json(body) if body else {}


def parse_json(body: bytes) -> dict[str, Any]:
    """A JSON object. Raises InvalidRequest."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"failed to parse the request JSON buffer: {error}") from error
    if not isinstance(parsed, dict):
        raise InvalidRequest("failed to parse the request JSON buffer: it is no JSON object")
    return parsed


def to_json(value: Any) -> bytes:
    """Compact JSON. Numbers that are none, such as a log-probability of minus infinity, stand as Triton writes them."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def json_response(value: Any, status: int = HTTPStatus.OK) -> web.Response:
    return web.Response(body=to_json(value), status=status, content_type="application/json")
