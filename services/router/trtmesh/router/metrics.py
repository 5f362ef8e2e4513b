"""The router's metrics: plain numbers, read by Prometheus at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from trtmesh.chassis.metrics import TOKEN_BUCKETS, Histogram
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

Gauges = Callable[[], dict[str, tuple[str, float]]]


class ModelMetrics:
    """What is counted of the requests of one model."""

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(
            PREFIX + "time_to_first_token_seconds",
            "From a request's arrival to a sequence's first token.",
        )
        self.inter_token = Histogram(
            PREFIX + "inter_token_seconds", "Time between arrivals of tokens of one sequence."
        )
        self.queue = Histogram(
            PREFIX + "queue_seconds", "From a request's arrival to the dispatch of an item."
        )
        self.prompt_tokens = Histogram(
            PREFIX + "prompt_tokens_per_item", "Prompt tokens of an item.", TOKEN_BUCKETS
        )
        self.generated_tokens = Histogram(
            PREFIX + "generated_tokens_per_item", "Tokens generated for an item.", TOKEN_BUCKETS
        )
        self.tokens_in = 0
        self.tokens_out = 0
        self.requests: Counter[str] = Counter()
        self.finished: Counter[int] = Counter()
        self.failed: Counter[str] = Counter()

    @property
    def histograms(self) -> tuple[Histogram, ...]:
        return (
            self.time_to_first_token,
            self.inter_token,
            self.queue,
            self.prompt_tokens,
            self.generated_tokens,
        )


class RouterMetrics(Collector):
    """The metrics of a router process. `gauges` returns name → (help, value) at each scrape."""

    def __init__(self) -> None:
        self.placement = Histogram(
            PREFIX + "placement_seconds", "Time that one placement took.", PLACEMENT_BUCKETS
        )
        self.delivery = Histogram(
            PREFIX + "adapter_delivery_seconds",
            "Time until a worker had loaded an adapter, or until the delivery failed.",
        )
        self.handoff = Histogram(
            PREFIX + "handoff_seconds",
            "From the end of a sequence on its sender to its first token on the receiver.",
        )
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
        self.placed: Counter[tuple[str, str]] = Counter()
        self.models: dict[str, ModelMetrics] = {}
        self.moved_decodes = 0
        self.breaches: Counter[str] = Counter()
        self.unanswered: Counter[str] = Counter()
        self.resumed = 0
        self.moved: Counter[str] = Counter()
        self.gauges: Gauges = dict

    def of(self, model: str) -> ModelMetrics:
        """What is counted of a model; '' stands for requests whose model is not served."""
        known = self.models.get(model)
        if known is None:
            name = model if len(self.models) < MOST_MODELS else "others"
            known = self.models.setdefault(name, ModelMetrics())
        return known

    def note_placement(self, policy: str, worker: str, workers: Iterable[str]) -> None:
        """Counts a placement on one of the workers of the fleet; those that left are dropped."""
        if (policy, worker) not in self.placed:
            names = {worker, *workers}
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

    def note_adapter(self, name: str, *, hit: bool) -> None:
        """Counts an item's first dispatch with an adapter."""
        known = name in self.adapter_items or len(self.adapter_items) < MOST_ADAPTERS
        counted = name if known else "others"
        self.adapter_items[counted] += 1
        self.adapter_hits[counted] += hit

    def collect(self) -> Iterator[Metric]:
        """Called in Prometheus' own thread."""
        yield from self._of_models()
        for histogram in (self.placement, self.delivery, self.handoff):
            yield histogram.family()
        for name, text, value in (
            (
                "merged_tokens",
                "Tokens merged while they waited for a slow client.",
                self.merged_tokens,
            ),
            ("client_messages", "Messages sent to clients.", self.client_messages),
            ("resumed_requests", "Requests resumed here from another call.", self.resumed),
            (
                "adapter_delivery_bytes",
                "Bytes of adapters sent to workers.",
                self.delivered_bytes,
            ),
            (
                "handoff_tokens",
                "Tokens whose KV moved to another worker.",
                self.handoff_tokens,
            ),
            ("moved_decodes", "Sequences moved to another tokenizer.", self.moved_decodes),
        ):
            yield CounterMetricFamily(PREFIX + name, text, value=value)
        by_caller = ("reason", "caller")
        slow = "Requests coalesced, paused (each time) or cancelled for a slow client."
        refused = "Requests refused for lack of a key or at admission, by reason and caller."
        moved = "Sequences moved to another worker, by cause."
        yield _labelled("slow_clients", slow, ("action",), self.slow_clients)
        yield _labelled("requests_refused", refused, by_caller, self.refused)
        unknown = "Request parameters of Triton calls without effect, by name."
        yield _labelled("unknown_parameters", unknown, ("parameter",), self.unknown_parameters)
        yield _labelled("items_placed", "Placements.", ("policy", "worker"), self.placed)
        yield _labelled("moved_sequences", moved, ("cause",), self.moved)
        unanswered = "Times that a tokenizer left texts or tokens unanswered for too long."
        yield _labelled("unanswered_commands", unanswered, ("kind",), self.unanswered)
        breaches = "Times that a worker or tokenizer broke its contract and was left."
        yield _labelled("contract_breaches", breaches, ("peer",), self.breaches)
        handoffs = "Handoffs of KV by cause and result."
        yield _labelled("handoffs", handoffs, ("cause", "result"), self.handoffs)
        deliveries = "Deliveries of adapters to workers, by outcome."
        yield _labelled("adapter_deliveries", deliveries, ("outcome",), self.deliveries)
        items, hits = "Items by adapter.", "Items whose worker had their adapter, by adapter."
        yield _labelled("adapter_items", items, ("adapter",), self.adapter_items)
        yield _labelled("adapter_hits", hits, ("adapter",), self.adapter_hits)
        for name, (text, level) in self.gauges().items():
            yield GaugeMetricFamily(PREFIX + name, text, value=level)

    def _of_models(self) -> Iterator[Metric]:
        models = self.models.copy()
        families: list[HistogramMetricFamily | None] = []
        for model, each in models.items():
            families = families or [None] * len(each.histograms)
            families = [
                histogram.add_to(family, "model", model)
                for histogram, family in zip(each.histograms, families, strict=True)
            ]
        yield from filter(None, families)
        counts = {
            name: CounterMetricFamily(PREFIX + name, text, labels=["model", *labels])
            for name, text, labels in (
                ("tokens_in", "Prompt tokens dispatched.", ()),
                ("tokens_out", "Generated tokens received from workers.", ()),
                ("requests", "Requests by outcome.", ("outcome",)),
                ("items_failed", "Items that failed, by reason.", ("reason",)),
                ("items_finished", "Items that finished, by reason.", ("reason",)),
            )
        }
        for model, each in models.items():
            counts["tokens_in"].add_metric([model], each.tokens_in)
            counts["tokens_out"].add_metric([model], each.tokens_out)
            finished: Counter[str] = Counter()
            for reason, count in each.finished.copy().items():
                finished[_reason_word(reason)] += count
            for name, own in (
                ("requests", each.requests),
                ("items_failed", each.failed),
                ("items_finished", finished),
            ):
                for label, count in own.copy().items():
                    counts[name].add_metric([model, label], count)
        yield from counts.values()


def _labelled(
    name: str,
    text: str,
    labels: tuple[str, ...],
    counts: dict[str, int] | dict[tuple[str, str], int],
) -> CounterMetricFamily:
    family = CounterMetricFamily(PREFIX + name, text, labels=labels)
    for key, count in counts.copy().items():
        family.add_metric([key] if isinstance(key, str) else list(key), count)
    return family


def _reason_word(reason: int) -> str:
    if reason not in pb.FinishReason.values():
        # From a newer worker.
        return "unknown"
    return (
        pb.FinishReason.Name(pb.FinishReason.ValueType(reason))
        .removeprefix("FINISH_REASON_")
        .lower()
    )
