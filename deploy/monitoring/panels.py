"""The dashboards as a table: rows of panels, each with its unit and its queries by legend.

A metric stands for its series of the chosen jobs and models: `build.py` adds those matchers. `$i` is the interval of a
rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trtmesh.chassis.errors import ERROR_TABLE, RateLimited

SECONDS, SHARE, PER_SECOND, NUMBER, BYTES = "s", "percentunit", "cps", "short", "bytes"
BYTES_PER_SECOND, TOKENS_PER_SECOND, TIMES = "Bps", "suffix: tokens/s", "suffix: x"

FAULTS = "|".join(row.reason for row in ERROR_TABLE if row.is_ours and row.error is not RateLimited)
"""Reasons of errors that count against the mesh."""

OF_MODEL = "gen_ai_request_model"
"""The label of OpenTelemetry's histograms."""

BURN_WINDOWS = ("5m", "1h", "6h")
BURNT = "At 1 the budget of the objective lasts exactly as long as its period; alerts fire at 14.4 and 6."


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph."""

    title: str
    unit: str
    queries: Mapping[str, str]
    """Expressions of PromQL by legend."""
    note: str = ""
    bound: float | None = None
    """A red line."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A variable with fixed values, the first by default."""

    name: str
    title: str
    values: Sequence[str]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard; `name` is that of the file and the end of the uid."""

    name: str
    title: str
    rows: Mapping[str, Sequence[Panel]]
    choices: Sequence[Choice] = ()


def legend(*labels: str) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in labels)


def rates(metric: str, *by: str) -> Mapping[str, str]:
    """Events a second by labels."""
    return {legend(*by): f"sum by ({', '.join(by)}) (rate({metric}[$i]))"}


def quantile(share: float, histogram: str, *by: str, window: str = "$i") -> str:
    labels = ", ".join(("le", *by))
    return f"histogram_quantile({share}, sum by ({labels}) (rate({histogram}_bucket[{window}])))"


def quantiles(histogram: str, *by: str) -> Mapping[str, str]:
    """The median and the slowest hundredth by labels."""
    return {
        f"p{share:.0%} {legend(*by)}".replace("%", "").strip(): quantile(share, histogram, *by)
        for share in (0.5, 0.99)
    }


def each(metric: str) -> Mapping[str, str]:
    return {"{{instance}}": metric}


def ratio(part: str, whole: str, by: str) -> Mapping[str, str]:
    """The quotient of two rates by a label."""
    return {legend(by): f"sum by ({by}) (rate({part}[$i])) / sum by ({by}) (rate({whole}[$i]))"}


def late(histogram: str, bound: str, window: str) -> str:
    """The share of observations above a bound of the histogram's buckets."""
    within = f'sum by ({OF_MODEL}) (rate({histogram}_bucket{{le="{bound}"}}[{window}]))'
    return f"1 - {within} / sum by ({OF_MODEL}) (rate({histogram}_count[{window}]))"


def latency(name: str, histogram: str, bound: str) -> Sequence[Panel]:
    """The graphs of an objective: how many stay below `bound`, and how fast the budget for the others is spent."""
    burnt = {
        f"{window} {legend(OF_MODEL)}": f"({late(histogram, bound, window)}) / (1 - $objective)"
        for window in BURN_WINDOWS
    }
    return (
        Panel(name, SECONDS, quantiles(histogram, OF_MODEL)),
        Panel(
            "Within the target", SHARE, {legend(OF_MODEL): f"1 - ({late(histogram, bound, '$i')})"}
        ),
        Panel("Budget burnt", TIMES, burnt, BURNT, bound=1),
    )


def error_ratio(window: str) -> str:
    """The share of items and requests that fail for another reason than their caller's."""
    # Without `or` there is no sum where one of them has no series.
    bad = " + ".join(
        f'(sum(rate(trtmesh_router_{metric}_total{{reason=~"{FAULTS}"}}[{window}])) or vector(0))'
        for metric in ("items_failed", "requests_refused")
    )
    good = f"(sum(rate(trtmesh_router_items_finished_total[{window}])) or vector(0))"
    return f"({bad}) / ({good} + {bad})"


# fmt: off
FLEET = Dashboard("fleet", "Fleet", {
    "Members": (
        Panel("Ready peers of routers", NUMBER, {
            "workers of {{instance}}": "trtmesh_router_ready_workers",
            "tokenizers of {{instance}}": "trtmesh_router_ready_tokenizers"}),
        Panel("Processes by version", NUMBER,
              {"{{service}} {{version}}": "count by (service, version) (trtmesh_build_info)"},
              "Two versions of a service are an update under way, or one that stopped halfway."),
        Panel("Peers that routers avoid or do not find", NUMBER, {
            "open breakers of {{instance}}": "trtmesh_router_open_breakers",
            "lookup problems of {{instance}}": "trtmesh_router_lookup_problems"})),
    "Traffic": (
        Panel("Requests", PER_SECOND, rates("trtmesh_router_requests_total", "outcome")),
        Panel("Refused requests", PER_SECOND, rates("trtmesh_router_requests_refused_total", "reason")),
        Panel("Tokens", TOKENS_PER_SECOND, {
            "prompts": "sum(rate(trtmesh_router_tokens_in_total[$i]))",
            "generated": "sum(rate(trtmesh_router_tokens_out_total[$i]))"}),
        Panel("Items placed on each worker", PER_SECOND, rates("trtmesh_router_items_placed_total", "worker")),
        Panel("Utilisation of engines", SHARE, each("rate(trtmesh_engine_busy_seconds_total[$i])")),
        Panel("Steps of engines", PER_SECOND, each("rate(trtmesh_engine_steps_total[$i])"))),
    "Tokenizers": (
        Panel("Wait for a thread", SECONDS, quantiles("trtmesh_tokenizer_encode_queue_seconds", "lane")),
        Panel("Encodes per batch", NUMBER, ratio(
            "trtmesh_tokenizer_encode_batch_size_sum", "trtmesh_tokenizer_encode_batch_size_count", "lane")),
        Panel("Tokens", TOKENS_PER_SECOND, {
            "encoded": "sum(rate(trtmesh_tokenizer_encoded_tokens_total[$i]))",
            "decoded": "sum(rate(trtmesh_tokenizer_decoded_tokens_total[$i]))"}),
        Panel("Texts queued in routers", NUMBER, each("trtmesh_router_queued_encodes")),
        Panel("Sequences being decoded", NUMBER, each("trtmesh_tokenizer_open_decode_states")),
        Panel("Failures", PER_SECOND, rates("trtmesh_tokenizer_failures_total", "reason"))),
    "Processes": (
        Panel("Lag of event loops, p99", SECONDS, {
            "{{job}} {{instance}}": quantile(0.99, "trtmesh_loop_lag_seconds", "job", "instance")},
            "In a router every stream waits so long."),
        Panel("CPU", "suffix: cores", {"{{job}} {{instance}}": "rate(process_cpu_seconds_total[$i])"},
              "A router has one event loop: near one core it is full."),
        Panel("Memory", BYTES, {"{{job}} {{instance}}": "process_resident_memory_bytes"}),
        Panel("Time of a placement", SECONDS, quantiles("trtmesh_router_placement_seconds")),
        Panel("Tasks", NUMBER, {"{{job}} {{instance}}": "trtmesh_tasks"},
              "More and more of them without more load are a leak."),
        Panel("Time left to certificates", SECONDS, {
            "{{instance}} {{file}}": "trtmesh_certificate_expiry_timestamp_seconds - time()"})),
})

SLO = Dashboard("slo", "Objectives", {
    "Time to first token": latency("Time to first token", "gen_ai_server_time_to_first_token_seconds", "$ttft"),
    "Time per output token": latency(
        "Time per output token", "gen_ai_server_time_per_output_token_seconds", "$tpot"),
    "Errors": (
        Panel("Failed items", PER_SECOND, rates("trtmesh_router_items_failed_total", "reason")),
        Panel("Errors of the mesh", SHARE, {"errors": error_ratio("$i")}, "Without errors that are the callers' own."),
        Panel("Budget burnt", TIMES,
              {window: f"({error_ratio(window)}) / (1 - $objective)" for window in BURN_WINDOWS}, BURNT, bound=1)),
    "Queues": (
        Panel("From arrival to dispatch", SECONDS, quantiles("trtmesh_router_queue_seconds", "model")),
        Panel("In the queues of engines", SECONDS, quantiles("trtmesh_engine_queue_seconds")),
        Panel("Items queued in routers", NUMBER, each("trtmesh_router_queued_items"))),
}, (
    # Bounds of buckets.
    Choice("ttft", "Time to first token, s", ("1.0", "0.1", "0.25", "0.5", "2.5", "5.0", "10.0")),
    Choice("tpot", "Time per output token, s", ("0.05", "0.01", "0.025", "0.075", "0.1", "0.2")),
    Choice("objective", "Objective", ("0.99", "0.9", "0.95", "0.999")),
))

STREAMS = Dashboard("streams", "Streams", {
    "Streams": (
        Panel("Sequences in engines", NUMBER, {
            "running": "sum(trtmesh_engine_running_sequences)",
            "waiting": "sum(trtmesh_engine_waiting_sequences)",
            "paused for memory": "sum(trtmesh_engine_paused_sequences)"}),
        Panel("Items in routers", NUMBER, {
            "live": "sum(trtmesh_router_live_items)",
            "queued": "sum(trtmesh_router_queued_items)"}),
        Panel("Items that end", PER_SECOND, rates("trtmesh_router_items_finished_total", "reason"))),
    "Stalls": (
        Panel("Sequences without a token for a second", NUMBER, each("trtmesh_router_stalled_sequences")),
        Panel("Longest stall of a sequence", SECONDS, quantiles("trtmesh_router_stall_seconds", "model"), bound=2),
        Panel("Time between tokens", SECONDS, {
            **quantiles("trtmesh_router_inter_token_seconds", "model"),
            "p99 in engines": quantile(0.99, "trtmesh_engine_inter_token_seconds")})),
    "Moves and failures": (
        Panel("Sequences moved to another worker", PER_SECOND, rates("trtmesh_router_moved_sequences_total", "cause")),
        Panel("Failed items", PER_SECOND, rates("trtmesh_router_items_failed_total", "reason")),
        Panel("Broken contracts", PER_SECOND, rates("trtmesh_router_contract_breaches_total", "peer"))),
    "Slow clients": (
        Panel("Requests paused for their clients", NUMBER, each("trtmesh_router_paused_requests")),
        Panel("Actions against slow clients", PER_SECOND, rates("trtmesh_router_slow_clients_total", "action")),
        Panel("Requests resumed from another router", PER_SECOND,
              each("rate(trtmesh_router_resumed_requests_total[$i])"))),
})

KV = Dashboard("kv", "KV, adapters, handoffs", {
    "KV cache": (
        Panel("Blocks in use", SHARE, each("trtmesh_engine_used_blocks / trtmesh_engine_total_blocks"), bound=0.95),
        Panel("Prompt tokens reused", SHARE, {
            # Prompts count when they come, and what was reused when their sequences end.
            "{{instance}}": "clamp_max(rate(trtmesh_engine_cached_prompt_tokens_total[$i])"
            " / rate(trtmesh_engine_prompt_tokens_total[$i]), 1)"}),
        Panel("Preemptions", PER_SECOND, each("rate(trtmesh_engine_preemptions_total[$i])"),
              "Sequences paused since no block was left.")),
    "Adapters": (
        Panel("Items", PER_SECOND, rates("trtmesh_router_adapter_items_total", "adapter")),
        Panel("Items whose worker had their adapter", SHARE, {
            # Rates of new series are extrapolated, each by itself.
            by: f"clamp_max({share}, 1)" for by, share in ratio(
                "trtmesh_router_adapter_hits_total", "trtmesh_router_adapter_items_total", "adapter").items()}),
        Panel("Time of a delivery", SECONDS, quantiles("trtmesh_router_adapter_delivery_seconds")),
        Panel("Deliveries", PER_SECOND, rates("trtmesh_router_adapter_deliveries_total", "outcome")),
        Panel("Loads and evictions", PER_SECOND, {
            "loads on {{instance}}": "rate(trtmesh_engine_adapter_loads_total[$i])",
            "evictions on {{instance}}": "rate(trtmesh_engine_adapter_evictions_total[$i])"}),
        Panel("Free slots", NUMBER, each("trtmesh_engine_free_adapter_slots"))),
    "Handoffs": (
        Panel("Handoffs", PER_SECOND, rates("trtmesh_router_handoffs_total", "cause", "result")),
        Panel("From the end on the sender to the next token", SECONDS, quantiles("trtmesh_router_handoff_seconds")),
        Panel("KV transferred", BYTES_PER_SECOND, rates("trtmesh_engine_handoff_bytes_total", "side", "transport"))),
    "Leases: granted = consumed + released + expired + held": (
        Panel("Leases", PER_SECOND, rates("trtmesh_engine_leases_total", "side", "event")),
        Panel("Held leases and quarantined blocks", NUMBER, {
            "leases, {{side}}": "sum by (side) (trtmesh_engine_held_leases)",
            "blocks in quarantine": "sum(trtmesh_engine_quarantined_blocks)"}),
        Panel("Leases unaccounted for", NUMBER, {
            "{{instance}} {{side}}": 'sum by (instance, side) (trtmesh_engine_leases_total{event="granted"})'
            ' - sum by (instance, side) (trtmesh_engine_leases_total{event!="granted"})'
            " - sum by (instance, side) (trtmesh_engine_held_leases)"},
            "0, or a defect.", bound=0.5)),
})
# fmt: on

DASHBOARDS = (FLEET, SLO, STREAMS, KV)
