"""Logs on standard error: a line per record, text or JSON, with the request id."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from textwrap import indent
from typing import Literal

from trtmesh.chassis.quoting import cut, cut_inside, escaped

MAX_MESSAGE_CHARACTERS = 4096
"""Longest message of a line."""
MAX_TRACEBACK_CHARACTERS = 16_384
"""Longest traceback."""

_request_id: ContextVar[str] = ContextVar("request_id", default="-")

NO_CALLER = "-"
_caller: ContextVar[str] = ContextVar("caller", default=NO_CALLER)


class Bound:
    """Adds a value to the records of a block. A class, because a generator would cost every call more."""

    __slots__ = ("_token", "_value", "_variable")

    def __init__(self, variable: ContextVar[str], value: str) -> None:
        self._variable, self._value = variable, value

    def __enter__(self) -> None:
        self._token = self._variable.set(self._value)

    def __exit__(self, *_: object) -> None:
        self._variable.reset(self._token)


def request_id_bound(request_id: str) -> Bound:
    """Adds `request_id` to every record of the block, in this task and the tasks started there."""
    return Bound(_request_id, request_id or "-")


def rebind_request_id(request_id: str) -> None:
    """Replaces the request id of the innermost `request_id_bound` of this task, unless `request_id` is ''."""
    if request_id:
        _request_id.set(request_id)


def caller_bound(name: str) -> Bound:
    """Adds the caller's name to every record of the block, as `request_id_bound` does."""
    return Bound(_caller, name)


def rebind_caller(name: str) -> None:
    """Adds the caller's name to the further records of this task, or of the innermost `caller_bound`."""
    _caller.set(name)


class _AddRequest(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id, record.caller = cut(_request_id.get()), cut(_caller.get())
        return True


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


class _ServiceFormatter(logging.Formatter):
    """Text of peers reaches messages, request ids and tracebacks."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self.service = service

    def message_of(self, record: logging.LogRecord) -> str:
        return cut_inside(record.getMessage(), MAX_MESSAGE_CHARACTERS)

    def traceback_of(self, record: logging.LogRecord) -> str:
        assert record.exc_info
        return cut_inside(self.formatException(record.exc_info), MAX_TRACEBACK_CHARACTERS)


class TextFormatter(_ServiceFormatter):
    """`time level service request_id logger: message`; a known caller stands before the id, `alice/request_id`."""

    def format(self, record: logging.LogRecord) -> str:
        caller, request = getattr(record, "caller", NO_CALLER), getattr(record, "request_id", "-")
        whose = request if caller == NO_CALLER else f"{caller}/{request}"
        line = escaped(
            f"{_time(record)} {record.levelname.lower()} {self.service}"
            f" {whose} {record.name}: {self.message_of(record)}"
        )
        if not record.exc_info:
            return line
        traceback = "\n".join(map(escaped, self.traceback_of(record).split("\n")))
        return f"{line}\n{indent(traceback, '  ', lambda _: True)}"


class JsonFormatter(_ServiceFormatter):
    """A JSON object per line, with the same parts, in ASCII, so escaped by JSON alone."""

    def format(self, record: logging.LogRecord) -> str:
        parts = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "service": self.service,
            "caller": getattr(record, "caller", NO_CALLER),
            "request_id": getattr(record, "request_id", "-"),
            "logger": record.name,
            "message": self.message_of(record),
        }
        if record.exc_info:
            parts["exception"] = self.traceback_of(record)
        return json.dumps(parts)


class Occasionally:
    """Logs at most a line of a kind in a period, with the number of lines left out before."""

    def __init__(
        self,
        log: logging.Logger,
        seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._seconds = seconds
        self._clock = clock
        self._next: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def __call__(self, kind: str, level: int, message: str, *parts: object) -> None:
        """`kind` comes from few words of the code, never from a peer."""
        if not self._log.isEnabledFor(level):
            return
        now = self._clock()
        if now < self._next.get(kind, now):
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return
        self._next[kind] = now + self._seconds
        if left_out := self._left_out.pop(kind, 0):
            message, parts = f"{message} (%d like it were left out)", (*parts, left_out)
        self._log.log(level, message, *parts)


def set_up_logs(service: str, level: str, form: Literal["text", "json"]) -> None:
    """Sends all records of the process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter(service) if form == "text" else JsonFormatter(service))
    handler.addFilter(_AddRequest())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
