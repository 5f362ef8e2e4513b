"""Contexts on the wire, sampling, and what becomes of spans that nobody takes."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry
from trtmesh.chassis.tracing.otlp import OtlpTracer
from trtmesh.chassis.tracing.spans import (
    MOST_EVENTS,
    Span,
    TraceContext,
    continued,
    end,
    new_span_id,
    new_trace_id,
    parent_in,
)
from trtmesh.chassis.tracing.tracer import open_tracer

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TEXTS = (
    f"00-{TRACE}-{SPAN}-01",
    f"00-{TRACE}-{SPAN}-00",
    f"00-{TRACE}-{SPAN}-03",
    f"00-{TRACE}-{SPAN}-02",
    f"cc-{TRACE}-{SPAN}-01",
    f"cc-{TRACE}-{SPAN}-01-what-comes-later",
    f"00-{TRACE}-{SPAN}-01-more",
    f"ff-{TRACE}-{SPAN}-01",
    f"00-{'0' * 32}-{SPAN}-01",
    f"00-{TRACE}-{'0' * 16}-01",
    f"00-{TRACE.upper()}-{SPAN}-01",
    f"00-{TRACE}-{SPAN}",
    f"00-{TRACE[1:]}-{SPAN}-01",
    f"00-{TRACE}-{SPAN}-1",
    "",
    "x" * 10_000,
)


@pytest.mark.parametrize("text", TEXTS)
def test_traceparent_is_read_as_the_sdk_does(text: str) -> None:
    carrier = {"traceparent": text}
    expected = get_current_span(TraceContextTextMapPropagator().extract(carrier)).get_span_context()
    found = TraceContext.parse(text)
    assert (found is not None) is expected.is_valid
    if found is not None:
        told = (expected.trace_id, expected.span_id, expected.trace_flags.sampled)
        assert (found.trace_id, found.span_id, found.sampled) == told


def test_traceparent_is_written_as_it_is_read() -> None:
    for sampled in (True, False):
        context = TraceContext(new_trace_id(), new_span_id(), sampled)
        assert TraceContext.parse(str(context)) == context


def test_parent_is_that_of_the_only_header() -> None:
    own, other = ("TraceParent", f" {TEXTS[0]} "), ("x-request-id", "r")
    assert parent_in([other, own]) == TraceContext.parse(TEXTS[0])
    assert parent_in([other]) is None
    assert parent_in([own, own]) is None
    assert parent_in([("traceparent", TEXTS[0].encode())]) is None


def test_span_of_another_service_goes_on_only_where_it_is_sampled() -> None:
    # An unsampled one would never leave the queue: the SDK passes it over.
    sampled, unsampled = TEXTS[:2]
    span = continued(sampled, "generate")
    assert span is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    for text in (unsampled, "", "x"):
        assert continued(text, "generate") is None


def test_events_of_a_span_are_bounded() -> None:
    span = a_span()
    for number in range(2 * MOST_EVENTS):
        span.happened("migrated", number, offset=number)
    assert len(span.events) == MOST_EVENTS
    assert span.events[3].attributes == {"trtmesh.offset": 3}


class Exporter(SpanExporter):
    """Keeps spans, fails, or does not answer before `answered`."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []
        self.asked, self.answered = threading.Event(), threading.Event()
        self.answered.set()
        self.fails = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        self.answered.wait()
        if self.fails:
            raise OSError("the collector is gone")
        self.spans += spans
        return SpanExportResult.SUCCESS


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exporter]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    exporter = Exporter()
    yield exporter
    exporter.answered.set()


def a_span() -> Span:
    return Span("operation model", TraceContext(new_trace_id(), new_span_id()), None)


def dropped(tracer: OtlpTracer, reason: str) -> float | None:
    registry = CollectorRegistry()
    registry.register(tracer.counts)
    return registry.get_sample_value("trtmesh_dropped_spans_total", {"reason": reason})


async def test_full_queue_drops_and_counts(exporter: Exporter) -> None:
    exporter.answered.clear()
    tracer = OtlpTracer("router", exporter, most_waiting=4)
    for _ in range(10):
        end(tracer, a_span())
    assert dropped(tracer, "queue") == 6
    exporter.answered.set()
    await tracer.close()
    assert len(exporter.spans) == tracer.counts.exported_spans == 4
    end(tracer, a_span())
    assert dropped(tracer, "queue") == 7


async def test_failed_export_is_counted_and_frees_the_queue(exporter: Exporter) -> None:
    exporter.fails = True
    tracer = OtlpTracer("router", exporter, most_waiting=4)
    for _ in range(4):
        end(tracer, a_span())
    await tracer.close()
    assert dropped(tracer, "export") == 4
    assert dropped(tracer, "queue") is None
    assert tracer.finished == 4


async def test_close_does_not_wait_for_a_collector_that_never_answers(exporter: Exporter) -> None:
    exporter.answered.clear()
    tracer = OtlpTracer("router", exporter, most_waiting=4)
    end(tracer, a_span())
    exporter.asked.wait()
    await tracer.close()
    assert not exporter.answered.is_set()
    assert exporter.spans == []


async def test_span_has_its_kind_parent_links_and_status(exporter: Exporter) -> None:
    tracer = OtlpTracer("router", exporter, most_waiting=4)
    parent, link = (TraceContext(new_trace_id(), new_span_id()) for _ in range(2))
    span = Span("chat model", parent.child(), parent, serves=True, begin_ns=20, links=[link])
    end(tracer, span, "QUEUE_FULL", at_ns=10)
    end(tracer, span.child("leg model"))
    await tracer.close()
    served, below = exporter.spans
    assert (served.kind.name, below.kind.name) == ("SERVER", "INTERNAL")
    assert served.parent is not None
    assert served.parent.span_id == parent.span_id
    assert [each.context.span_id for each in served.links] == [link.span_id]
    assert (served.status.status_code.name, served.status.description) == ("ERROR", "QUEUE_FULL")
    assert below.status.status_code.name == "UNSET"
    # No span ends before it begins.
    assert (served.start_time, served.end_time) == (20, 20)


SAMPLERS: Mapping[str, tuple[Mapping[str, str], range]] = {
    "by default": ({}, range(10_000, 10_001)),
    "1 %": (
        {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"},
        # Mean 100; ten times the deviation is 100.
        range(1, 200),
    ),
    "0 %": (
        {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"},
        range(1),
    ),
    "off": ({"OTEL_TRACES_SAMPLER": "parentbased_always_off"}, range(1)),
}


@pytest.mark.parametrize("name", SAMPLERS)
async def test_door_samples_by_the_ratio_and_as_the_parent_says(
    name: str, exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables, expected = SAMPLERS[name]
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    tracer = OtlpTracer("router", exporter, most_waiting=4)
    assert sum(tracer.begin(None, "native") is not None for _ in range(10_000)) in expected
    parent = TraceContext(new_trace_id(), new_span_id())
    found = tracer.begin(parent, "native")
    assert found is not None
    assert found.trace_id == parent.trace_id
    assert found.span_id != parent.span_id
    unsampled = TraceContext(new_trace_id(), new_span_id(), sampled=False)
    assert tracer.begin(unsampled, "native") is None
    await tracer.close()


def test_without_an_endpoint_nothing_is_imported() -> None:
    program = (
        "import sys; from prometheus_client import CollectorRegistry;"
        " from trtmesh.chassis.tracing.tracer import open_tracer;"
        " import trtmesh.router.router, trtmesh.engine.service.engine_service;"
        " found = [open_tracer('router', given, CollectorRegistry()) for given in"
        " ({}, {'OTEL_EXPORTER_OTLP_ENDPOINT': ''}, {'OTEL_TRACES_EXPORTER': 'otlp'})];"
        " print(found, [m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[None, None, None] []"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER is zipkin"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "must be grpc or http/protobuf"),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "many"}, "many"),
    ],
)
def test_wrong_variables_are_logged_and_end_nothing(
    given: Mapping[str, str], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", **given}
    with caplog.at_level(logging.WARNING):
        assert open_tracer("router", environ, CollectorRegistry()) is None
    assert words in caplog.text


@pytest.mark.parametrize("given", [{"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_SDK_DISABLED": "True"}])
def test_traces_are_turned_off_without_a_word(
    given: Mapping[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", **given}
    with caplog.at_level(logging.WARNING):
        assert open_tracer("router", environ, CollectorRegistry()) is None
    assert caplog.text == ""


def test_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "trtmesh.chassis.tracing.otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry.context", None)
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    with caplog.at_level(logging.WARNING):
        assert open_tracer("router", environ, CollectorRegistry()) is None
    assert "pip install 'trtmesh[otel]'" in caplog.text
