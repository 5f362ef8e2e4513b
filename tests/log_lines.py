"""What services log, read back from JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class LogLine:
    """What a line says, and of which request; '-' of none."""

    request_id: str
    message: str


def log_lines(text: str) -> list[LogLine]:
    """The whole lines of `text`."""
    whole, _, _ = text.rpartition("\n")
    records = map(json.loads, whole.splitlines())
    return [LogLine(record["request_id"], record["message"]) for record in records]
