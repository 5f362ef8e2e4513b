"""Log lines of services, parsed from JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class LogLine:
    """A message and its request id, '-' without a request."""

    request_id: str
    message: str


def log_lines(text: str) -> list[LogLine]:
    """Parses the complete lines of `text`."""
    whole, _, _ = text.rpartition("\n")
    records = map(json.loads, whole.splitlines())
    return [LogLine(record["request_id"], record["message"]) for record in records]
