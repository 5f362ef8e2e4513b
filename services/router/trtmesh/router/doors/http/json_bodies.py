"""JSON in the bodies of requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trtmesh.chassis.errors import InvalidRequest
from trtmesh.router.doors.http.json_parser import parse

JSON_COST = 16
"""Bytes of a protobuf message that take as long as a byte of JSON."""


def _said_twice(key: str) -> str:
    return f"failed to parse the request JSON buffer: key '{key}' already exists in its object"


def parse_json(
    body: bytes | memoryview, most_bytes: int, said_twice: Callable[[str], str] = _said_twice
) -> dict[str, Any]:
    """A JSON object; `said_twice` makes the sentence about a repeated key. Raises InvalidRequest."""
    if len(body) > most_bytes:
        raise InvalidRequest(
            f"the request JSON has {len(body)} bytes but must have at most {most_bytes} (http.max_json_bytes); send"
            " large tensors as binary data"
        )
    parsed = parse(body, said_twice)
    if not isinstance(parsed, dict):
        raise InvalidRequest("failed to parse the request JSON buffer: it is not a JSON object")
    return parsed
