"""The router's metrics: plain numbers, and the table by which a scrape reads them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from trtmesh.chassis.errors import ERROR_TABLE
from trtmesh.chassis.metrics import (
    COUNTER,
    HISTOGRAM,
    OTHER,
    TOKEN_BUCKETS,
    BoundedNames,
    Histogram,
    Label,
    Row,
    families,
)
from trtmesh.v1 import generation_pb2 as pb

PREFIX = "trtmesh_router_"

GENAI_PREFIX = "gen_ai_server_"
"""Of names, labels and bucket bounds of OpenTelemetry's conventions for servers of models."""

PROVIDER = "trtmesh"

DURATION_BUCKETS = tuple(0.01 * 2**power for power in range(14))
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)  # fmt: skip
OUTPUT_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)  # fmt: skip
PLACEMENT_BUCKETS = tuple(step / 1e5 for step in (*range(1, 11), 15, 20, 30, 50, 100, 1000))
"""Bucket bounds in seconds."""

MOST_MODELS = 64
MOST_CALLERS = 256
MOST_ADAPTERS = 64
MOST_PARAMETERS = 64
MOST_WORKERS = 64
"""Most values of labels that others name."""

CHAT, TEXT_COMPLETION = "chat", "text_completion"
"""Operations."""

UNLISTED = "unlisted"
"""Caller of all keys in no file."""


OURS = tuple(row.reason for row in ERROR_TABLE if row.is_ours)
"""Reasons of items that failed because of the mesh, counted from a model's first request on: a rate needs the count
before."""


class Latencies:
    """What OpenTelemetry's conventions measure of the requests of one model and operation."""

    def __init__(self) -> None:
        self.request_duration = defaultdict[str, Histogram](partial(Histogram, DURATION_BUCKETS))
        """By the type of the error; '' for complete requests."""
        self.time_to_first_token = Histogram(FIRST_TOKEN_BUCKETS)
        self.time_per_output_token = Histogram(OUTPUT_TOKEN_BUCKETS)


class ModelMetrics:
    """What is counted of the requests of one model."""

    def __init__(self) -> None:
        self.latencies = defaultdict[str, Latencies](Latencies)
        """By operation."""
        self.inter_token = Histogram()
        self.stall = Histogram()
        self.queue = Histogram()
        self.prompt_tokens = Histogram(TOKEN_BUCKETS)
        self.generated_tokens = Histogram(TOKEN_BUCKETS)
        self.tokens_in = 0
        self.tokens_out = 0
        self.requests: Counter[tuple[str, str]] = Counter()
        self.finished: Counter[int] = Counter()
        self.failed: Counter[str] = Counter(dict.fromkeys(OURS, 0))

    @property
    def finished_words(self) -> Counter[str]:
        """Finished items by the word of their reason."""
        words: Counter[str] = Counter()
        for reason, count in self.finished.copy().items():
            words[_reason_word(reason)] += count
        return words


class _CallerNames(BoundedNames):
    """Anyone can draw a key: those in no file count together."""

    def __missing__(self, name: str) -> str:
        return UNLISTED if name.startswith(f"{UNLISTED}:") else super().__missing__(name)


class _Models(dict[str, ModelMetrics]):
    """The metrics of each model by its label; those beyond the bound share theirs."""

    def __init__(self, names: BoundedNames) -> None:
        super().__init__()
        self._names = names

    def __missing__(self, model: str) -> ModelMetrics:
        label = self._names[model]
        known = self.get(label)
        if known is None:
            known = self[label] = ModelMetrics()
        return known


class RouterMetrics(Collector):
    """The metrics of a router process, besides what its rooms hold."""

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
        self.slow_clients: Counter[str] = Counter(coalesced=0, paused=0, cancelled=0)
        self.refused: Counter[tuple[str, str]] = Counter()
        self.caller_items: Counter[str] = Counter()
        self.caller_prompt_tokens: Counter[str] = Counter()
        self.caller_generated_tokens: Counter[str] = Counter()
        self.unknown_parameters: Counter[str] = Counter()
        self.http_requests: Counter[tuple[str, str]] = Counter()
        self.placed: Counter[tuple[str, str]] = Counter()
        self.moved_decodes = 0
        self.breaches: Counter[str] = Counter(worker=0, tokenizer=0)
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
        self.model_names = BoundedNames(MOST_MODELS)
        self.models = _Models(self.model_names)
        """What is counted of each model; '' stands for requests whose model is not served."""
        self._caller_names = _CallerNames(MOST_CALLERS)
        self._adapter_names = BoundedNames(MOST_ADAPTERS)
        self._parameter_names = BoundedNames(MOST_PARAMETERS)
        self._worker_names = BoundedNames(MOST_WORKERS)

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
        self.refused[reason, self._caller_names[caller]] += 1

    def note_item(self, caller: str, prompt_tokens: int, generated_tokens: int) -> None:
        """Counts an item of a caller, by name, that ended."""
        caller = self._caller_names[caller]
        self.caller_items[caller] += 1
        self.caller_prompt_tokens[caller] += prompt_tokens
        self.caller_generated_tokens[caller] += generated_tokens

    def note_unknown_parameter(self, name: str) -> bool:
        """Counts a request parameter without effect, and returns whether it is the first of a name that counts."""
        self.unknown_parameters[counted := self._parameter_names[name]] += 1
        return counted == name and self.unknown_parameters[counted] == 1

    def note_http_request(self, door: str, status: int) -> None:
        """Counts a request over HTTP by its answer."""
        self.http_requests[door, str(status)] += 1

    def note_adapter(self, name: str, *, hit: bool) -> None:
        """Counts an item's first dispatch with an adapter."""
        counted = self._adapter_names[name]
        self.adapter_items[counted] += 1
        self.adapter_hits[counted] += hit

    def note_canary_alert(self, worker: str) -> None:
        """Counts an item whose tokens show a fault of a worker."""
        self.canary_alerts[self._worker_names[worker]] += 1

    def collect(self) -> Iterator[Metric]:
        """Called in Prometheus' own thread."""
        yield from families(GENAI_PREFIX, GENAI_TABLE, self)
        yield from families(PREFIX, TABLE, self)


def _by_model(field: str) -> Callable[[RouterMetrics], Mapping[str, Any]]:
    """Reads a field of each model."""
    read = attrgetter(field)
    return lambda metrics: {model: read(each) for model, each in metrics.models.copy().items()}


def _by_label(field: str) -> Callable[[RouterMetrics], Mapping[tuple[str, ...], int]]:
    """Reads counts of each model, by the model and their own labels."""
    read = attrgetter(field)
    return lambda metrics: {
        (model, *((label,) if isinstance(label, str) else label)): count
        for model, each in metrics.models.copy().items()
        for label, count in read(each).copy().items()
    }


def _latencies(field: str) -> Callable[[RouterMetrics], Mapping[tuple[str, ...], Histogram]]:
    """Reads a histogram of each operation and model."""
    read = attrgetter(field)
    return lambda metrics: {
        (operation, PROVIDER, model): read(each)
        for model, known in metrics.models.copy().items()
        for operation, each in known.latencies.copy().items()
    }


def _durations(metrics: RouterMetrics) -> Mapping[tuple[str, ...], Histogram]:
    """The durations of requests, by operation, model and type of error."""
    return {
        (operation, PROVIDER, model, error_type): each
        for model, known in metrics.models.copy().items()
        for operation, latencies in known.latencies.copy().items()
        for error_type, each in latencies.request_duration.copy().items()
    }


MODEL = Label("model", f"served models, '' for others; at most {MOST_MODELS}, then `{OTHER}`")
CALLER = Label(
    "caller",
    "names of keys, `certificate:NAME`, `unlisted` for keys in no file, `anonymous`;"
    f" at most {MOST_CALLERS}, then `{OTHER}`",
)
DOOR = Label("door", "`native`, `triton`, `openai`")
OUTCOME = Label("outcome", "`refused`, `failed` (with any item), `cancelled`, `complete`")
FINISH = Label("reason", "finish reasons of generation.proto, in small letters")
ERROR = Label("reason", "reason words of the table of errors")
ADAPTER = Label(
    "adapter", f"names in the registry, `brought`; at most {MOST_ADAPTERS}, then `{OTHER}`"
)
WORKER = Label("worker", f"at most {MOST_WORKERS} workers, then `{OTHER}`")

RACE = Label("outcome", "`running`, `won`, `lost`, `ended`, `refused`")

# fmt: off
GENAI = (
    Label("gen_ai_operation_name", f"`{CHAT}`, `{TEXT_COMPLETION}`"),
    Label("gen_ai_provider_name", "`trtmesh`"),
    Label("gen_ai_request_model", "as `model`"),
)
ERROR_TYPE = Label("error_type", "reason words of the table of errors, '' for complete requests")
GENAI_TABLE: tuple[Row[RouterMetrics], ...] = (
    Row(HISTOGRAM, "request_duration_seconds",
        "Seconds from the arrival of a request to the end of its answer.",
        _durations, (*GENAI, ERROR_TYPE)),
    Row(HISTOGRAM, "time_to_first_token_seconds",
        "Seconds from the admission of a request to the first token of a sequence.",
        _latencies("time_to_first_token"), GENAI),
    Row(HISTOGRAM, "time_per_output_token_seconds",
        "Mean seconds between tokens of a finished sequence, after its first.",
        _latencies("time_per_output_token"), GENAI),
)
TABLE: tuple[Row[RouterMetrics], ...] = (
    Row(COUNTER, "requests", "Requests that ended.", _by_label("requests"), (MODEL, DOOR, OUTCOME)),
    Row(COUNTER, "caller_items", "Items that ended.", labels=(CALLER,)),
    Row(COUNTER, "caller_prompt_tokens", "Prompt tokens of items that ended.", labels=(CALLER,)),
    Row(COUNTER, "caller_generated_tokens", "Tokens generated for items that ended.", labels=(CALLER,)),
    Row(HISTOGRAM, "inter_token_seconds",
        "Seconds between two arrivals of tokens of a sequence: every gap, not the mean of a sequence.",
        _by_model("inter_token"), (MODEL,)),
    Row(HISTOGRAM, "stall_seconds", "Longest seconds between two arrivals of tokens of a sequence, at its end.",
        _by_model("stall"), (MODEL,)),
    Row(HISTOGRAM, "queue_seconds", "Seconds from the admission of a request to the dispatch of an item.",
        _by_model("queue"), (MODEL,)),
    Row(HISTOGRAM, "prompt_tokens_per_item", "Prompt tokens of an item.", _by_model("prompt_tokens"), (MODEL,)),
    Row(HISTOGRAM, "generated_tokens_per_item", "Tokens generated for an item.",
        _by_model("generated_tokens"), (MODEL,)),
    Row(COUNTER, "tokens_in", "Prompt tokens dispatched.", _by_model("tokens_in"), (MODEL,)),
    Row(COUNTER, "tokens_out", "Generated tokens received from workers.", _by_model("tokens_out"), (MODEL,)),
    Row(COUNTER, "items_failed", "Items that failed.", _by_label("failed"), (MODEL, ERROR)),
    Row(COUNTER, "items_finished", "Items that finished.", _by_label("finished_words"), (MODEL, FINISH)),
    Row(HISTOGRAM, "placement_seconds", "Seconds that a placement took.", "placement"),
    Row(HISTOGRAM, "adapter_delivery_seconds",
        "Seconds until a worker had loaded an adapter, or until the delivery failed.", "delivery"),
    Row(HISTOGRAM, "handoff_seconds",
        "Seconds from the end of a sequence on its sender to its first token on the receiver.", "handoff"),
    Row(COUNTER, "merged_tokens", "Tokens merged while they waited for a slow client."),
    Row(COUNTER, "client_messages", "Messages sent to clients."),
    Row(COUNTER, "resumed_requests", "Requests resumed here from another call.", "resumed"),
    Row(COUNTER, "bls_draft_failures",
        "Requests that went on without drafts because the model for drafts was slow, failed or was not there."),
    Row(COUNTER, "adapter_delivery_bytes", "Bytes of adapters sent to workers.", "delivered_bytes"),
    Row(COUNTER, "handoff_tokens", "Tokens whose KV moved to another worker."),
    Row(COUNTER, "moved_decodes", "Sequences moved to another tokenizer."),
    Row(COUNTER, "slow_clients", "Requests coalesced, paused (each time) or cancelled for a slow client.",
        labels=(Label("action", "`coalesced`, `paused`, `cancelled`"),)),
    Row(COUNTER, "requests_refused", "Requests refused for lack of a key or at admission.", "refused", (ERROR, CALLER)),
    Row(COUNTER, "unknown_parameters", "Request parameters of Triton calls without effect.",
        labels=(Label("parameter", f"at most {MOST_PARAMETERS} names, then `{OTHER}`"),)),
    Row(COUNTER, "http_requests", "Requests over HTTP; status 499 where the client left before the answer.",
        labels=(Label("door", "`triton`, `openai`, `console`"), Label("status", "HTTP statuses"))),
    Row(COUNTER, "items_placed", "Placements of items on workers.", "placed",
        (Label("policy", "policies of placement"), Label("worker", "workers of the fleet"))),
    Row(COUNTER, "moved_sequences", "Sequences moved to another worker.", "moved",
        (Label("cause", "`moved`, `paused`, `hedged`, or reason words of the table of errors in small letters"),)),
    Row(COUNTER, "canary_items", "Sampled items, by what their repetition showed.",
        labels=(Label("outcome", "`identical`, `different`, `dropped`, `unfit`, `inexact`, `failed`"),)),
    Row(COUNTER, "canary_alerts", "Items whose tokens two workers contradict, by the worker at fault.",
        labels=(WORKER,)),
    Row(COUNTER, "hedges", "Second copies of late sequences; each started one has another outcome later.",
        labels=(Label("cause", "`stall`, `first_token`, `slow`"), RACE)),
    Row(COUNTER, "hedges_refused", "Late sequences without a second copy.",
        labels=(Label("reason", "`budget`, `busy`, `kv_full` and other obstacles of a second copy"),)),
    Row(COUNTER, "hedge_wasted_tokens", "Tokens generated by two workers because of a second copy."),
    Row(COUNTER, "hedge_copied_tokens", "Tokens, of prompts and generated before, with which second copies started."),
    Row(COUNTER, "hedge_saved_seconds", "Seconds that clients would have waited for the first worker."),
    Row(COUNTER, "hedge_differences", "Second copies with other tokens: one of two workers computes wrongly."),
    Row(COUNTER, "unanswered_commands", "Times that a tokenizer left texts or tokens unanswered for too long.",
        "unanswered", (Label("kind", "kinds of commands to tokenizers, `texts`"),)),
    Row(COUNTER, "contract_breaches", "Times that a worker or tokenizer broke its contract and was left.",
        "breaches", (Label("peer", "`worker`, `tokenizer`"),)),
    Row(COUNTER, "handoffs", "Handoffs of KV that ended.", labels=(
        Label("cause", "`disaggregated`, `context_only`, `generation_only`, `paused`, `drain`, `rebalance`"),
        Label("result", "`moved`, `finished`, `migrated`, `cancelled`, `given`"))),
    Row(COUNTER, "adapter_deliveries", "Deliveries of adapters to workers.", "deliveries",
        (Label("outcome", "`loaded`, `unwanted`, or reason words of the table of errors in small letters"),)),
    Row(COUNTER, "adapter_items", "Items by their adapter.", labels=(ADAPTER,)),
    Row(COUNTER, "adapter_hits", "Items whose worker had their adapter.", labels=(ADAPTER,)),
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
