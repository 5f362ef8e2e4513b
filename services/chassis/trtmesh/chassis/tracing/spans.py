"""Spans as plain records, and their context on the wire (W3C Trace Context)."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import getrandbits
from typing import Protocol, Self, TypeAlias

TRACEPARENT = "traceparent"
"""Key of gRPC metadata, and name of the HTTP header."""

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
SAMPLED = 1
MOST_EVENTS = 128
"""Most events of a span, as in the SDK; an item may move again and again."""

Value: TypeAlias = str | int | float | bool | Sequence[str]


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The identity of a span."""

    trace_id: int
    span_id: int
    sampled: bool = True

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Reads a `traceparent`. None for an invalid one, which W3C tells a service to ignore."""
        found = _FORM.fullmatch(text)
        if found is None:
            return None
        version, trace_id, span_id, flags, rest = found.groups()
        if version == "ff" or (version == "00" and rest):
            return None
        trace, span = int(trace_id, 16), int(span_id, 16)
        return cls(trace, span, bool(int(flags, 16) & SAMPLED)) if trace and span else None

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.sampled:02x}"

    def child(self) -> TraceContext:
        """A new span of the same trace."""
        return TraceContext(self.trace_id, new_span_id(), self.sampled)


def new_trace_id() -> int:
    # Samplers look at the lower bits, so they must be random.
    return getrandbits(128) or 1


def new_span_id() -> int:
    return getrandbits(64) or 1


def parent_in(headers: Iterable[tuple[str, str | bytes]]) -> TraceContext | None:
    """The caller's span in the headers or the metadata of a call. None without, or with several: which one is meant is
    not known."""
    found = [value for key, value in headers if key.lower() == TRACEPARENT]
    if len(found) != 1 or isinstance(found[0], bytes):
        return None
    return TraceContext.parse(found[0].strip())


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """What happened within a span."""

    name: str
    time_ns: int
    attributes: dict[str, Value]


@dataclass(slots=True)
class Span:
    """A span, complete once it has its `end_ns`. Times are nanoseconds of Unix time."""

    name: str
    context: TraceContext
    parent: TraceContext | None
    serves: bool = False
    """Whether it is the span of a client's call: SERVER, all others are INTERNAL."""
    begin_ns: int = field(default_factory=time.time_ns)
    end_ns: int = 0
    attributes: dict[str, Value] = field(default_factory=dict)
    events: list[SpanEvent] = field(default_factory=list)
    links: list[TraceContext] = field(default_factory=list)
    error: str = ""
    """Reason word of a failure; '' for none."""

    def child(self, name: str) -> Span:
        """A span below this one that begins now."""
        return Span(name, self.context.child(), self.context)

    def happened(self, name: str, time_ns: int, **attributes: Value) -> None:
        """Adds an event. `attributes` are named below `trtmesh.`."""
        if len(self.events) < MOST_EVENTS:
            named = {f"trtmesh.{key}": value for key, value in attributes.items()}
            self.events.append(SpanEvent(name, time_ns, named))


class Tracer(Protocol):
    """Decides which calls are traced, and exports spans. No method waits."""

    def begin(self, parent: TraceContext | None, name: str) -> TraceContext | None:
        """The context of a new span below the caller's, if any; None if it is not sampled."""

    def ended(self, span: Span) -> None:
        """Takes a complete span, or drops and counts it."""


def end(tracer: Tracer, span: Span, error: str = "", at_ns: int = 0) -> None:
    """Completes a span, now or at a time, and gives it away."""
    span.end_ns = max(at_ns or time.time_ns(), span.begin_ns)
    if error:
        span.error = span.attributes["error.type"] = error
    tracer.ended(span)


def continued(traceparent: str, name: str) -> Span | None:
    """A span below the one of another service; None without a valid context, or if it was not sampled."""
    parent = TraceContext.parse(traceparent)
    if parent is None or not parent.sampled:
        return None
    return Span(name, parent.child(), parent)
