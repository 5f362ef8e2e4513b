"""What a router counts, in plain numbers that Prometheus reads when it scrapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from trtmesh.chassis.metrics import TOKEN_BUCKETS, Histogram
from trtmesh.v1 import generation_pb2 as pb

PREFIX = "trtmesh_router_"

PLACEMENT_BUCKETS = (
    1e-5, 2e-5, 3e-5, 4e-5, 5e-5, 6e-5, 7e-5, 8e-5, 9e-5, 1e-4, 1.5e-4, 2e-4, 3e-4, 5e-4, 1e-3, 1e-2,
)  # fmt: skip
"""Seconds."""

MOST_REFUSED = 1000
"""Label sets of refusals; keys beyond them are counted together."""

Gauges = Callable[[], dict[str, tuple[str, float]]]


class RouterMetrics(Collector):
    """The metrics of one router process. `gauges` gives name → (help, value) at each scrape."""

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
        self.placement = Histogram(
            PREFIX + "placement_seconds", "Time that one placement took.", PLACEMENT_BUCKETS
        )
        self.prompt_tokens = Histogram(
            PREFIX + "prompt_tokens_per_item", "Prompt tokens of an item.", TOKEN_BUCKETS
        )
        self.generated_tokens = Histogram(
            PREFIX + "generated_tokens_per_item", "Tokens generated for an item.", TOKEN_BUCKETS
        )
        self.tokens_in = 0
        self.tokens_out = 0
        self.merged_tokens = 0
        self.client_messages = 0
        self.requests: Counter[str] = Counter()
        self.slow_clients: Counter[str] = Counter()
        self.refused: Counter[tuple[str, str]] = Counter()
        self.finished: Counter[int] = Counter()
        self.failed: Counter[str] = Counter()
        self.placed: Counter[tuple[str, str]] = Counter()
        self.moved_decodes = 0
        self.resumed = 0
        self.moved: Counter[str] = Counter()
        self.gauges: Gauges = dict

    def note_refusal(self, reason: str, api_key: str) -> None:
        """A request was refused at admission; `api_key` is the name of its key."""
        if (reason, api_key) not in self.refused and len(self.refused) >= MOST_REFUSED:
            api_key = "others"
        self.refused[reason, api_key] += 1

    def collect(self) -> Iterator[Metric]:
        """What Prometheus scrapes; called from its own thread."""
        for histogram in (
            self.time_to_first_token,
            self.inter_token,
            self.queue,
            self.placement,
            self.prompt_tokens,
            self.generated_tokens,
        ):
            yield histogram.family()
        for name, text, value in (
            ("tokens_in", "Prompt tokens dispatched.", self.tokens_in),
            ("tokens_out", "Generated tokens received from workers.", self.tokens_out),
            (
                "merged_tokens",
                "Tokens that waited for a lagging client and were merged.",
                self.merged_tokens,
            ),
            ("client_messages", "Messages sent to clients.", self.client_messages),
            ("resumed_requests", "Requests that went on here from another call.", self.resumed),
            ("moved_decodes", "Sequences moved to another tokenizer.", self.moved_decodes),
        ):
            yield CounterMetricFamily(PREFIX + name, text, value=value)
        yield _labelled("requests", "Requests by outcome.", ("outcome",), self.requests)
        yield _labelled(
            "slow_clients",
            "Requests whose tokens were coalesced, which were paused (each time) or cancelled for a slow client.",
            ("action",),
            self.slow_clients,
        )
        yield _labelled(
            "requests_refused",
            "Requests refused at admission, by reason and hashed API key.",
            ("reason", "api_key"),
            self.refused,
        )
        yield _labelled("items_failed", "Items that failed, by reason.", ("reason",), self.failed)
        yield _labelled("items_placed", "Placements.", ("policy", "worker"), self.placed)
        yield _labelled(
            "moved_sequences",
            "Sequences taken over by another worker, by cause.",
            ("cause",),
            self.moved,
        )
        finished: Counter[str] = Counter()
        for reason, count in self.finished.copy().items():
            finished[_reason_word(reason)] += count
        yield _labelled("items_finished", "Items that finished, by reason.", ("reason",), finished)
        for name, (text, level) in self.gauges().items():
            yield GaugeMetricFamily(PREFIX + name, text, value=level)


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
        # A worker may be newer than this router.
        return "unknown"
    return (
        pb.FinishReason.Name(pb.FinishReason.ValueType(reason))
        .removeprefix("FINISH_REASON_")
        .lower()
    )
