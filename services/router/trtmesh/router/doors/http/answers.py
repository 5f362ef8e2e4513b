"""Answers as JSON, compressed if their client takes that."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from aiohttp import hdrs, web
from trtmesh.chassis.fair.messages import LARGE_BYTES

PIECE_ELEMENTS = 2**12
"""Elements of a list that are encoded at once, in 3 ms."""
LEAST_COMPRESSED_BYTES = 256
EVENT_STREAM = "text/event-stream; charset=utf-8"
COMPRESSIONS = {
    coding.value: coding for coding in (web.ContentCoding.gzip, web.ContentCoding.deflate)
}


def to_json(value: Any, cost: int = 0) -> bytes:
    """Returns compact JSON, with NaN and infinities as Triton writes them.

    The encoder holds the interpreter for a whole value. A value as long to encode as a large message to parse, of
    `cost` bytes, is encoded in pieces: other threads run in between.
    """
    if cost < LARGE_BYTES:
        return _compact(value).encode()
    return b"".join(piece.encode() for piece in _pieces(value))


def _pieces(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        opening = "{"
        for key, each in value.items():
            yield f"{opening}{_compact(key)}:"
            yield from _pieces(each)
            opening = ","
        yield "}" if value else "{}"
    elif isinstance(value, list) and any(isinstance(each, (dict, list)) for each in value[:1]):
        for place, each in enumerate(value):
            yield "," if place else "["
            yield from _pieces(each)
        yield "]"
    elif isinstance(value, list):
        for at in range(0, len(value), PIECE_ELEMENTS):
            yield ("," if at else "[") + _compact(value[at : at + PIECE_ELEMENTS])[1:-1]
        yield "]" if value else "[]"
    else:
        yield _compact(value)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def json_response(value: Any, status: int = HTTPStatus.OK) -> web.Response:
    return web.Response(body=to_json(value), status=status, content_type="application/json")


def compressed(request: web.Request, response: web.Response) -> web.Response:
    """Returns the response, compressed if the client accepts compression and the size falls enough."""
    coding = coding_of(request)
    if coding is not None and (response.content_length or 0) >= LEAST_COMPRESSED_BYTES:
        response.enable_compression(coding)
    return response


def coding_of(request: web.Request) -> web.ContentCoding | None:
    """The supported compression that the client prefers."""
    best, best_weight = None, 0.0
    for part in ",".join(request.headers.getall(hdrs.ACCEPT_ENCODING, ())).split(","):
        name, *parameters = (word.strip().lower() for word in part.split(";"))
        weights = [text.removeprefix("q=") for text in parameters if text.startswith("q=")]
        try:
            wanted = float(weights[0]) if weights else 1.0
        except ValueError:
            continue
        if wanted > best_weight and name in (*COMPRESSIONS, "identity"):
            best, best_weight = COMPRESSIONS.get(name), wanted
    return best
