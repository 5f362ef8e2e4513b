"""Bodies over HTTP: received within limits of size and time, decompressed, parsed as JSON; messages as JSON."""

from __future__ import annotations

import asyncio
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from aiohttp import hdrs, web
from google.protobuf.descriptor import FieldDescriptor
from trtmesh.chassis.errors import InvalidRequest, UnsupportedCall

COMPRESSED = ("gzip", "deflate")
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""An escape that is part of a surrogate pair, or of none."""


async def read_body(request: web.Request, receive_seconds: float) -> bytes:
    """The body, decompressed. `client_max_size` limits it before and after. Raises TrtmeshError or an HTTPException."""
    encoding = request.headers.get(hdrs.CONTENT_ENCODING, "").lower()
    if encoding not in (*COMPRESSED, "", "identity"):
        raise UnsupportedCall(
            f"Unsupported compression type '{encoding}'; send the body as gzip, as deflate or as it is"
        )
    body = await _receive(request, receive_seconds)
    if encoding in COMPRESSED:
        # zlib releases the GIL.
        return await asyncio.to_thread(_decompress, body, request.client_max_size)
    return body


async def _receive(request: web.Request, receive_seconds: float) -> bytes:
    try:
        async with asyncio.timeout(receive_seconds):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(
            text=f"the body of the request did not come within {receive_seconds:g} s (http.receive_seconds)"
        ) from None
    except web.HTTPRequestEntityTooLarge:
        raise _too_large(request.client_max_size) from None


def _decompress(body: bytes, most_bytes: int) -> bytes:
    """Decompresses gzip or deflate, whichever the header says, up to one byte over the limit."""
    decompressor = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
    try:
        data = decompressor.decompress(body, most_bytes + 1)
    except zlib.error as error:
        raise InvalidRequest(
            f"the body of the request is not a valid compressed stream: {error}"
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


def _said_twice(key: str) -> str:
    return f"failed to parse the request JSON buffer: key '{key}' already exists in its object"


def parse_json(body: bytes, said_twice: Callable[[str], str] = _said_twice) -> dict[str, Any]:
    """A JSON object; `said_twice` makes the sentence about a repeated key. Raises InvalidRequest."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) < len(pairs):
            seen = Counter(key for key, _ in pairs)
            raise InvalidRequest(said_twice(max(seen, key=seen.__getitem__)))
        return members

    try:
        parsed = json.loads(body, object_pairs_hook=unique)
        if SURROGATE.search(body):
            # Python's parser accepts half of a pair, which no encoder takes.
            json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"failed to parse the request JSON buffer: {error}") from error
    if not isinstance(parsed, dict):
        raise InvalidRequest("failed to parse the request JSON buffer: it is not a JSON object")
    return parsed


def to_json(value: Any) -> bytes:
    """Compact JSON, with NaN and infinities as Triton writes them."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def json_response(value: Any, status: int = HTTPStatus.OK) -> web.Response:
    return web.Response(body=to_json(value), status=status, content_type="application/json")


def as_json(message: Any) -> dict[str, Any]:
    """A KServe message as Triton writes it: fields at their default included, and 64-bit numbers as numbers, which
    protobuf's own JSON writes as texts."""
    return {
        field.name: _field(message, field)
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _field(message: Any, field: FieldDescriptor) -> Any:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        of_values = field.message_type.fields_by_name["value"]
        return {str(key): _one(value[key], of_values) for key in value}
    if field.is_repeated:
        return [_one(element, field) for element in value]
    return _one(value, field)


def _one(value: Any, field: FieldDescriptor) -> Any:
    if field.message_type is not None:
        return as_json(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return value
