"""Opens the tracer of a process, by the standard OTEL_* variables; imports no SDK unless they name an endpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

if TYPE_CHECKING:
    from trtmesh.chassis.tracing.otlp import OtlpTracer

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def open_tracer(
    service: str, environ: Mapping[str, str], registry: CollectorRegistry
) -> OtlpTracer | None:
    """The tracer of a process; None without an endpoint.

    As OpenTelemetry asks of every implementation, what is wrong with its variables is logged and ends no service.
    """
    endpoint = next((name for name in ENDPOINTS if environ.get(name)), None)
    if endpoint is None or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    exporter = environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if exporter == "none":
        return None
    if exporter != "otlp":
        log.warning("no traces: OTEL_TRACES_EXPORTER is %s, but must be otlp or none", exporter)
        return None
    try:
        from trtmesh.chassis.tracing.otlp import OtlpTracer
    except ModuleNotFoundError as error:
        log.warning(
            "no traces: %s is set, which needs %s: pip install 'trtmesh[otel]'",
            endpoint,
            error.name,
        )
        return None
    try:
        tracer = OtlpTracer.open(service, environ)
    except Exception as error:  # noqa: BLE001 - whatever the SDK says of its variables
        log.warning("no traces: %s: %s", type(error).__name__, error)
        return None
    registry.register(tracer.counts)
    log.info("traces go to %s", environ[endpoint])
    return tracer
