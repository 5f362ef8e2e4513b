"""The router's metrics: plain numbers, and the table by which a scrape reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from trtmesh.chassis.metrics import COUNTER, HISTOGRAM, TOKEN_BUCKETS, Histogram, Row, families
from trtmesh.v1 import generation_pb2 as pb

PREFIX = "trtmesh_router_"

PLACEMENT_BUCKETS = tuple(step / 1e5 for step in (*range(1, 11), 15, 20, 30, 50, 100, 1000))
"""Bucket bounds in seconds."""

MOST_REFUSED = 1000
"""Most label sets of refusals; further callers are counted together."""

MOST_ADAPTERS = 64
"""Most names of adapters; further names are counted together."""

MOST_PARAMETERS = 64
"""Most names of unknown parameters; further names are counted together."""

MOST_MODELS = 64
"""Most names of models; further names are counted together."""


class ModelMetrics:
    """What is counted of the requests of one model."""

    def __init__(self) -> None:
        self.time_to_first_token = Histogram()
        self.inter_token = Histogram()
        self.queue = Histogram()
        self.prompt_tokens = Histogram(TOKEN_BUCKETS)
        self.generated_tokens = Histogram(TOKEN_BUCKETS)
        self.tokens_in = 0
        self.tokens_out = 0
        self.requests: Counter[str] = Counter()
        self.finished: Counter[int] = Counter()
        self.failed: Counter[str] = Counter()

    @property
    def finished_words(self) -> Counter[str]:
        """Finished items by the word of their reason."""
        words: Counter[str] = Counter()
        for reason, count in self.finished.copy().items():
            words[_reason_word(reason)] += count
        return words


class RouterMetrics(Collector):
    """The metrics of a router process; the router adds the `gauges` of its rooms."""

    def __init__(self) -> None:
        self.placement = Histogram(PLACEMENT_BUCKETS)
        self.delivery = Histogram()
        self.handoff = Histogram()
        self.handoffs: Counter[tuple[str, str]] = Counter()
        self.handoff_tokens = 0
        self.deliveries: Counter[str] = Counter()
        self.delivered_bytes = 0
        self.adapter_items: Counter[str] = Counter()
        self.adapter_hits: Counter[str] = Counter()
        self.merged_tokens = 0
        self.client_messages = 0
        self.slow_clients: Counter[str] = Counter()
        self.refused: Counter[tuple[str, str]] = Counter()
        self.unknown_parameters: Counter[str] = Counter()
        self.http_requests: Counter[tuple[str, str]] = Counter()
        self.placed: Counter[tuple[str, str]] = Counter()
        self.models: dict[str, ModelMetrics] = {}
        self.moved_decodes = 0
        self.breaches: Counter[str] = Counter()
        self.unanswered: Counter[str] = Counter()
        self.resumed = 0
        self.bls_draft_failures = 0
        self.moved: Counter[str] = Counter()
        self.canary_items: Counter[str] = Counter()
        self.canary_alerts: Counter[str] = Counter()
        self.hedges: Counter[tuple[str, str]] = Counter()
        self.hedges_refused: Counter[str] = Counter()
        self.hedge_wasted_tokens = self.hedge_copied_tokens = self.hedge_differences = 0
        self.hedge_saved_seconds = 0.0
        self.gauges: Sequence[Row[RouterMetrics]] = ()

    def of(self, model: str) -> ModelMetrics:
        """What is counted of a model; '' stands for requests whose model is not served."""
        known = self.models.get(model)
        if known is None:
            name = model if len(self.models) < MOST_MODELS else "others"
            known = self.models.setdefault(name, ModelMetrics())
        return known

    def note_placement(
        self, policy: str, worker: str, workers: Callable[[], Iterable[str]]
    ) -> None:
        """Counts a placement on one of the `workers` of the fleet; those that left are dropped."""
        if (policy, worker) not in self.placed:
            names = {worker, *workers()}
            for key in [key for key in self.placed if key[1] not in names]:
                del self.placed[key]
        self.placed[policy, worker] += 1

    def note_refusal(self, reason: str, caller: str) -> None:
        """Counts a refusal of a caller, by name."""
        if (reason, caller) not in self.refused and len(self.refused) >= MOST_REFUSED:
            caller = "others"
        self.refused[reason, caller] += 1

    def note_unknown_parameter(self, name: str) -> None:
        """Counts a request parameter without effect."""
        counted = self.unknown_parameters
        known = name in counted or len(counted) < MOST_PARAMETERS
        counted[name if known else "others"] += 1

    def note_http_request(self, door: str, status: int) -> None:
        """Counts a request over HTTP by its answer."""
        self.http_requests[door, str(status)] += 1

    def note_adapter(self, name: str, *, hit: bool) -> None:
        """Counts an item's first dispatch with an adapter."""
        known = name in self.adapter_items or len(self.adapter_items) < MOST_ADAPTERS
        counted = name if known else "others"
        self.adapter_items[counted] += 1
        self.adapter_hits[counted] += hit

    def collect(self) -> Iterator[Metric]:
        """Called in Prometheus' own thread."""
        yield from families(PREFIX, (*TABLE, *self.gauges), self)


def _by_model(field: str) -> Callable[[RouterMetrics], Mapping[str, Any]]:
    """Reads a field of each model."""
    read = attrgetter(field)
    return lambda metrics: {model: read(each) for model, each in metrics.models.copy().items()}


def _by_label(field: str) -> Callable[[RouterMetrics], Mapping[tuple[str, str], int]]:
    """Reads counts of each model, by the model and their own label."""
    read = attrgetter(field)
    return lambda metrics: {
        (model, label): count
        for model, each in metrics.models.copy().items()
        for label, count in read(each).copy().items()
    }


MODEL = ("model",)

# fmt: off
TABLE: tuple[Row[RouterMetrics], ...] = (
    Row(HISTOGRAM, "time_to_first_token_seconds", "From a request's arrival to a sequence's first token.",
        _by_model("time_to_first_token"), MODEL),
    Row(HISTOGRAM, "inter_token_seconds", "Time between arrivals of tokens of one sequence.",
        _by_model("inter_token"), MODEL),
    Row(HISTOGRAM, "queue_seconds", "From a request's arrival to the dispatch of an item.", _by_model("queue"), MODEL),
    Row(HISTOGRAM, "prompt_tokens_per_item", "Prompt tokens of an item.", _by_model("prompt_tokens"), MODEL),
    Row(HISTOGRAM, "generated_tokens_per_item", "Tokens generated for an item.",
        _by_model("generated_tokens"), MODEL),
    Row(COUNTER, "tokens_in", "Prompt tokens dispatched.", _by_model("tokens_in"), MODEL),
    Row(COUNTER, "tokens_out", "Generated tokens received from workers.", _by_model("tokens_out"), MODEL),
    Row(COUNTER, "requests", "Requests by outcome.", _by_label("requests"), ("model", "outcome")),
    Row(COUNTER, "items_failed", "Items that failed, by reason.", _by_label("failed"), ("model", "reason")),
    Row(COUNTER, "items_finished", "Items that finished, by reason.",
        _by_label("finished_words"), ("model", "reason")),
    Row(HISTOGRAM, "placement_seconds", "Time that one placement took.", "placement"),
    Row(HISTOGRAM, "adapter_delivery_seconds",
        "Time until a worker had loaded an adapter, or until the delivery failed.", "delivery"),
    Row(HISTOGRAM, "handoff_seconds",
        "From the end of a sequence on its sender to its first token on the receiver.", "handoff"),
    Row(COUNTER, "merged_tokens", "Tokens merged while they waited for a slow client."),
    Row(COUNTER, "client_messages", "Messages sent to clients."),
    Row(COUNTER, "resumed_requests", "Requests resumed here from another call.", "resumed"),
    Row(COUNTER, "bls_draft_failures",
        "Requests that went on without drafts because the model for drafts was slow, failed or was not there."),
    Row(COUNTER, "adapter_delivery_bytes", "Bytes of adapters sent to workers.", "delivered_bytes"),
    Row(COUNTER, "handoff_tokens", "Tokens whose KV moved to another worker."),
    Row(COUNTER, "moved_decodes", "Sequences moved to another tokenizer."),
    Row(COUNTER, "slow_clients", "Requests coalesced, paused (each time) or cancelled for a slow client.",
        labels=("action",)),
    Row(COUNTER, "requests_refused", "Requests refused for lack of a key or at admission, by reason and caller.",
        "refused", ("reason", "caller")),
    Row(COUNTER, "unknown_parameters", "Request parameters of Triton calls without effect, by name.",
        labels=("parameter",)),
    Row(COUNTER, "http_requests", "Requests over HTTP by door and status; 499 where the client left before the answer.",
        labels=("door", "status")),
    Row(COUNTER, "items_placed", "Placements.", "placed", ("policy", "worker")),
    Row(COUNTER, "moved_sequences", "Sequences moved to another worker, by cause.", "moved", ("cause",)),
    Row(COUNTER, "canary_items",
        "Sampled items, by what their repetition showed: identical or different; or dropped, unfit, inexact or failed.",
        labels=("outcome",)),
    Row(COUNTER, "canary_alerts", "Items whose tokens two workers contradict, by the worker at fault.",
        labels=("worker",)),
    Row(COUNTER, "hedges", "Second copies of late sequences, by cause and outcome; each started one has another later.",
        labels=("cause", "outcome")),
    Row(COUNTER, "hedges_refused", "Late sequences without a second copy, by reason.", labels=("reason",)),
    Row(COUNTER, "hedge_wasted_tokens", "Tokens generated by two workers because of a second copy."),
    Row(COUNTER, "hedge_copied_tokens", "Tokens, of prompts and generated before, with which second copies started."),
    Row(COUNTER, "hedge_saved_seconds", "Time that clients would have waited for the first worker."),
    Row(COUNTER, "hedge_differences", "Second copies with other tokens: one of two workers computes wrongly."),
    Row(COUNTER, "unanswered_commands", "Times that a tokenizer left texts or tokens unanswered for too long.",
        "unanswered", ("kind",)),
    Row(COUNTER, "contract_breaches", "Times that a worker or tokenizer broke its contract and was left.",
        "breaches", ("peer",)),
    Row(COUNTER, "handoffs", "Handoffs of KV by cause and result.", labels=("cause", "result")),
    Row(COUNTER, "adapter_deliveries", "Deliveries of adapters to workers, by outcome.", "deliveries", ("outcome",)),
    Row(COUNTER, "adapter_items", "Items by adapter.", labels=("adapter",)),
    Row(COUNTER, "adapter_hits", "Items whose worker had their adapter, by adapter.", labels=("adapter",)),
)
# fmt: on


def _reason_word(reason: int) -> str:
    if reason not in pb.FinishReason.values():
        # From a newer worker.
        return "unknown"
    return (
        pb.FinishReason.Name(pb.FinishReason.ValueType(reason))
        .removeprefix("FINISH_REASON_")
        .lower()
    )
