"""Logs on standard error: a line per record, text or JSON, with the request id."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from textwrap import indent
from typing import Literal

_request_id: ContextVar[str] = ContextVar("request_id", default="-")


@contextmanager
def request_id_bound(request_id: str) -> Iterator[None]:
    """Adds `request_id` to every record of the block, in this task and the tasks it starts."""
    token = _request_id.set(request_id or "-")
    try:
        yield
    finally:
        _request_id.reset(token)


def rebind_request_id(request_id: str) -> None:
    """Replaces the request id of the innermost `request_id_bound` of this task, unless `request_id` is ''."""
    if request_id:
        _request_id.set(request_id)


class _AddRequestId(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = _request_id.get()
        return True


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


class _ServiceFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self.service = service


class TextFormatter(_ServiceFormatter):
    """`time level service request_id logger: message`."""

    def format(self, record: logging.LogRecord) -> str:
        line = (
            f"{_time(record)} {record.levelname.lower()} {self.service}"
            f" {getattr(record, 'request_id', '-')} {record.name}: {record.getMessage()}"
        )
        # Text from a client must not forge a line.
        line = line.replace("\n", "\\n").replace("\r", "\\r")
        if not record.exc_info:
            return line
        return f"{line}\n{indent(self.formatException(record.exc_info), '  ', lambda _: True)}"


class JsonFormatter(_ServiceFormatter):
    """One JSON object per line, with the same parts."""

    def format(self, record: logging.LogRecord) -> str:
        parts = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "service": self.service,
            "request_id": getattr(record, "request_id", "-"),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            parts["exception"] = self.formatException(record.exc_info)
        return json.dumps(parts, ensure_ascii=False)


def set_up_logs(service: str, level: str, form: Literal["text", "json"]) -> None:
    """Sends all records of the process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter(service) if form == "text" else JsonFormatter(service))
    handler.addFilter(_AddRequestId())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
