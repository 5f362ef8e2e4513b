"""The alerts as a table. Each names a state in which an operator has something to do."""

from __future__ import annotations

from dataclasses import dataclass

from panels import error_ratio, quantile

OBJECTIVE = 0.999
"""Share of items that must not fail because of the mesh."""

FORTNIGHT = 14 * 86400


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert."""

    name: str
    severity: str
    """`page`: somebody acts now. `ticket`: somebody acts in working hours."""
    lasts: str
    """How long the expression must hold before it fires."""
    expression: str
    summary: str
    runbook: str
    """A heading of docs/operating.md."""


def burn(times: float, long: str, short: str) -> str:
    """The error budget is spent so many times too fast: in a long window, and still in a short one."""
    bound = f"{times * (1 - OBJECTIVE):.4g}"
    return f"{error_ratio(long)} > {bound} and {error_ratio(short)} > {bound}"


def seen(matcher: str = "") -> str:
    """The processes of the last day. Scrape jobs may have any names, so that `up` alone does not tell the mesh's."""
    return f"last_over_time(trtmesh_build_info{f'{{{matcher}}}' if matcher else ''}[1d])"


MISSING, MIGRATIONS, LEASES = "Missing processes", "Failing migrations", "Leases that expire"
BURNING = "Burning error budget"

# fmt: off
ALERTS = (
    Alert("TrtmeshNoReadyWorker", "page", "1m", "trtmesh_router_ready_workers < 1",
          "Router {{ $labels.instance }} has no ready worker", "No ready worker"),
    Alert("TrtmeshServiceMissing", "page", "2m",
          "count by (job, service) (" + seen('service!="engine"') + ")"
          " unless count by (job, service) (trtmesh_build_info)"
          ' or on (service) absent(trtmesh_build_info{service="router"})',
          "No {{ $labels.service }} answers scrapes", MISSING),
    Alert("TrtmeshEnginesMissing", "ticket", "15m",
          "count by (job) (" + seen('service="engine"') + ")"
          ' unless count by (job) (trtmesh_build_info{service="engine"})',
          "No engine of job {{ $labels.job }} answers scrapes", MISSING),
    Alert("TrtmeshProcessSilent", "ticket", "5m", f"up == 0 and on (job, instance) {seen()}",
          "{{ $labels.instance }} of job {{ $labels.job }} answers no scrapes", MISSING),
    Alert("TrtmeshStreamsStall", "page", "5m",
          f"{quantile(0.99, 'trtmesh_router_stall_seconds', 'job', 'model', window='5m')} > 2",
          "One in a hundred streams of {{ $labels.model }} stalls for {{ $value | humanizeDuration }}",
          "Stalled streams"),
    Alert("TrtmeshQueueLong", "ticket", "5m",
          f"{quantile(0.9, 'trtmesh_router_queue_seconds', 'job', 'model', window='5m')} > 5",
          "One in ten items of {{ $labels.model }} waits {{ $value | humanizeDuration }} for a worker", "Long queues"),
    Alert("TrtmeshKvFull", "ticket", "5m", "trtmesh_engine_used_blocks / trtmesh_engine_total_blocks > 0.95",
          "{{ $value | humanizePercentage }} of the KV blocks of {{ $labels.instance }} are in use", "Full KV cache"),
    Alert("TrtmeshMigrationsFail", "page", "0m",
          'sum by (job, model) (increase(trtmesh_router_items_failed_total{reason="WORKER_LOST"}[5m])) > 0',
          "{{ $value | humanize }} items of {{ $labels.model }} ended with the loss of their worker", MIGRATIONS),
    Alert("TrtmeshHandoffsFail", "ticket", "5m",
          'sum by (job) (rate(trtmesh_router_handoffs_total{result="migrated"}[10m]))'
          " / sum by (job) (rate(trtmesh_router_handoffs_total[10m])) > 0.1",
          "{{ $value | humanizePercentage }} of handoffs fail: their prompts are computed again", MIGRATIONS),
    Alert("TrtmeshLeasesExpire", "ticket", "0m",
          'sum by (job, instance, side) (increase(trtmesh_engine_leases_total{event="expired"}[15m])) > 0',
          "Leases {{ $labels.side }} by {{ $labels.instance }} expired", LEASES),
    Alert("TrtmeshBlocksQuarantined", "ticket", "5m", "trtmesh_engine_quarantined_blocks > 0",
          "{{ $value }} KV blocks of {{ $labels.instance }} are in quarantine", LEASES),
    Alert("TrtmeshCertificateEnds", "ticket", "0m",
          f"trtmesh_certificate_expiry_timestamp_seconds - time() < {FORTNIGHT}",
          "{{ $labels.file }} of {{ $labels.instance }} ends in {{ $value | humanizeDuration }}",
          "Ending certificates"),
    Alert("TrtmeshVersionSkew", "ticket", "30m", "count(count by (version) (trtmesh_build_info)) > 1",
          "{{ $value }} versions have run beside each other for half an hour", "Version skew"),
    Alert("TrtmeshErrorsFast", "page", "2m", burn(14.4, "1h", "5m"),
          "{{ $value | humanizePercentage }} of items fail: the error budget of a month lasts two days", BURNING),
    Alert("TrtmeshErrorsSlow", "ticket", "15m", burn(6, "6h", "30m"),
          "{{ $value | humanizePercentage }} of items fail: the error budget of a month lasts five days", BURNING),
)
# fmt: on
