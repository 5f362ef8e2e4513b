"""A receiver of OTLP, by gRPC and by HTTP: what a collector would be told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from aiohttp import web
from e2e.mesh import eventually
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

SERVER = Span.SPAN_KIND_SERVER
ERROR = 2
"""Code of a status."""


@dataclass
class Received:
    """The spans so far, in order of arrival."""

    spans: list[Span] = field(default_factory=list)
    services: dict[bytes, str] = field(default_factory=dict)
    """The service of each span, by the span's id."""
    resources: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Attributes of each service's process."""
    headers: list[dict[str, str]] = field(default_factory=list)
    raw: bytes = b""
    """Everything as it came."""

    def take(self, data: bytes, headers: dict[str, str]) -> None:
        self.raw += data
        self.headers.append(headers)
        for resource in otlp.ExportTraceServiceRequest.FromString(data).resource_spans:
            about = values_of(resource.resource)
            self.resources[about["service.name"]] = about
            for scope in resource.scope_spans:
                self.spans += scope.spans
                self.services |= {each.span_id: about["service.name"] for each in scope.spans}

    def of_trace(self, trace_id: str) -> Sequence[Span]:
        return [each for each in self.spans if each.trace_id.hex() == trace_id]

    def named(self, operation: str, trace_id: str = "") -> list[Span]:
        """The spans of an operation, the earliest first."""
        spans = self.of_trace(trace_id) if trace_id else self.spans
        found = [each for each in spans if each.name.split()[0] == operation]
        return sorted(found, key=lambda each: each.start_time_unix_nano)

    def service_of(self, span: Span) -> str:
        return self.services[span.span_id]

    async def until(self, condition: Callable[[], object]) -> None:
        """Waits for a condition; fails with what came."""

        async def holds() -> bool:
            return bool(condition())

        try:
            await eventually(holds, 60)
        except TimeoutError:
            raise AssertionError(f"only came: {[each.name for each in self.spans]}") from None


def values_of(described: Any) -> dict[str, Any]:
    """The attributes of a span, an event or a resource."""
    return {each.key: _value(each.value) for each in described.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


@dataclass
class Collector:
    """A running receiver."""

    received: Received
    variables: dict[str, str]
    """For the processes that export to it."""


@asynccontextmanager
async def by_grpc(received: Received, port: int = 0) -> AsyncIterator[Collector]:
    class Service(otlp_grpc.TraceServiceServicer):
        async def Export(self, request: Any, context: Any) -> Any:
            received.take(request.SerializeToString(), dict(context.invocation_metadata()))
            return otlp.ExportTraceServiceResponse()

    server = grpc.aio.server()
    otlp_grpc.add_TraceServiceServicer_to_server(Service(), server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield Collector(received, endpoint("grpc", bound))
    finally:
        await server.stop(0)


@asynccontextmanager
async def by_http(received: Received, port: int = 0) -> AsyncIterator[Collector]:
    async def export(request: web.Request) -> web.Response:
        received.take(await request.read(), dict(request.headers))
        return web.Response(body=otlp.ExportTraceServiceResponse().SerializeToString())

    async with serving_http(export, port) as bound:
        yield Collector(received, endpoint("http/protobuf", bound))


@asynccontextmanager
async def serving_http(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]], port: int = 0
) -> AsyncIterator[int]:
    """Serves the path of OTLP; returns the port."""
    app = web.Application()
    app.router.add_post("/v1/traces", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.0)
    await runner.setup()
    # As gRPC's server does: a test may hold the port.
    site = web.TCPSite(runner, "127.0.0.1", port, reuse_port=True)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def endpoint(protocol: str, port: int) -> dict[str, str]:
    """The variables for a receiver, which get each span at once."""
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_BSP_SCHEDULE_DELAY": "50",
    }


TRANSPORTS = {"grpc": by_grpc, "http": by_http}
