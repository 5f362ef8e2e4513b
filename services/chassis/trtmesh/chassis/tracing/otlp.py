"""Exports spans by OTLP, with the sampler, the batches and the exporters of the OpenTelemetry SDK."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Self

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from trtmesh.chassis.tracing.counts import SpanCounts
from trtmesh.chassis.tracing.spans import Span, TraceContext, new_span_id, new_trace_id

CLOSE_SECONDS = 0.5
"""Longest time for the last spans: a collector may be dead."""

QUEUE_VARIABLE = "OTEL_BSP_MAX_QUEUE_SIZE"
QUEUED_SPANS = 2048
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

FLAGS = TraceFlags(TraceFlags.SAMPLED)


class OtlpTracer:
    """The tracer of a process. Spans wait for a thread of the SDK in a bounded queue."""

    def __init__(self, service: str, exporter: SpanExporter, most_waiting: int) -> None:
        """Raises ValueError for an unusable variable of the SDK."""
        self.counts = SpanCounts()
        self._most_waiting = most_waiting
        self._given = 0
        """Spans given to the SDK, counted by the event loop's thread."""
        self._exporter = _Counted(exporter, self)
        self.finished = 0
        """Of these, the exported and the failed ones, counted by the SDK's thread."""
        self._resource = _resource(service)
        # It knows the samplers of OTEL_TRACES_SAMPLER, and nothing else of it is used: its spans choose their ids
        # themselves, when they begin, whereas here they are made at their end.
        provider = TracerProvider(resource=self._resource, shutdown_on_exit=False)
        self._sampler = provider.sampler
        self._scope = InstrumentationScope("trtmesh", version("trtmesh"))
        self._batches = BatchSpanProcessor(self._exporter, max_queue_size=most_waiting)
        self._is_open = True

    @classmethod
    def open(cls, service: str, environ: Mapping[str, str]) -> Self:
        """Raises ValueError for an unusable variable, and errors of the SDK."""
        return cls(service, _exporter(environ), int(environ.get(QUEUE_VARIABLE) or QUEUED_SPANS))

    def begin(self, parent: TraceContext | None, name: str) -> TraceContext | None:
        # Not the current context: this process has none.
        context = Context()
        if parent is not None:
            context = set_span_in_context(NonRecordingSpan(_context(parent, remote=True)), context)
        trace_id = new_trace_id() if parent is None else parent.trace_id
        result = self._sampler.should_sample(context, trace_id, name, SpanKind.SERVER)
        return TraceContext(trace_id, new_span_id()) if result.decision.is_sampled() else None

    def ended(self, span: Span) -> None:
        # The SDK would drop without a count, so its queue never gets full.
        if not self._is_open or self._given - self.finished >= self._most_waiting:
            self.counts.dropped_spans["queue"] += 1
            return
        self._given += 1
        self._batches.on_end(self._readable(span))

    def _readable(self, span: Span) -> ReadableSpan:
        return ReadableSpan(
            span.name,
            _context(span.context),
            parent=None if span.parent is None else _context(span.parent, remote=span.serves),
            resource=self._resource,
            attributes=span.attributes,
            events=[Event(each.name, each.attributes, each.time_ns) for each in span.events],
            links=[Link(_context(each)) for each in span.links],
            kind=SpanKind.SERVER if span.serves else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=span.begin_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )

    async def close(self) -> None:
        """Exports what waits, for a short time at most."""
        self._is_open = False
        loop, over = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._batches.shutdown()
            with suppress(RuntimeError):
                # The loop may be closed by then.
                loop.call_soon_threadsafe(over.set)

        # Not of the loop's executor, which a process waits for at its end.
        threading.Thread(target=shut_down, name="last-spans", daemon=True).start()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await over.wait()


class _Counted(SpanExporter):
    """Counts what becomes of the spans of an exporter."""

    def __init__(self, exporter: SpanExporter, tracer: OtlpTracer) -> None:
        self._exporter, self._tracer = exporter, tracer

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is SpanExportResult.SUCCESS:
                self._tracer.counts.exported_spans += len(spans)
            else:
                self._tracer.counts.dropped_spans["export"] += len(spans)
            self._tracer.finished += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def _resource(service: str) -> Resource:
    """The process. What the variables say goes before, unlike in `Resource.create` alone."""
    own = {
        "service.name": f"trtmesh-{service}",
        "service.version": version("trtmesh"),
        "service.instance.id": f"{socket.gethostname()}-{os.getpid()}",
    }
    named = OTELResourceDetector().detect().attributes
    return Resource.create({name: value for name, value in own.items() if name not in named})


def _context(context: TraceContext, *, remote: bool = False) -> SpanContext:
    flags = FLAGS if context.sampled else TraceFlags()
    return SpanContext(context.trace_id, context.span_id, is_remote=remote, trace_flags=flags)


def _exporter(environ: Mapping[str, str]) -> SpanExporter:
    """The exporter of the standard variables. Raises ValueError for an unknown protocol."""
    protocol = next((environ[name] for name in PROTOCOLS if environ.get(name)), "grpc")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
            OTLPSpanExporter as HttpSpanExporter,
        )

        return HttpSpanExporter()
    raise ValueError(f"the protocol of OTLP is {protocol}, but must be grpc or http/protobuf")
