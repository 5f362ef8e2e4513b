"""The metrics of Triton and of TensorRT-LLM's backend, under their names and as Triton writes them."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, NamedTuple

from trtmesh.chassis.metrics import Described, Histogram, Label
from trtmesh.router.doors.triton.models import MODEL_VERSION
from trtmesh.router.doors.triton.statistics import FAILURE_REASONS, Counts, Statistics, TokenLengths
from trtmesh.router.doors.triton.templates.template import Model
from trtmesh.router.fleet.worker import Worker
from trtmesh.v1 import engine_pb2 as engine_pb
from trtmesh.v1.kv_transfer_pb2 import HandoffCounts

log = logging.getLogger(__name__)

Number = int | float

WITH_CACHED = "(includes cached requests)"
WITHOUT_CACHED = "(does not include cached requests)"
LENGTHS = "TRT LLM response metrics"
MODEL = Label("model", "models of Triton")
VERSION = Label("version", f"`{MODEL_VERSION}`")

# fmt: off
COUNTERS: Mapping[str, tuple[str, Callable[[Counts], int]]] = {
    "request_success": ("Number of successful inference requests, all batch sizes", lambda c: c.succeeded),
    "count": (f"Number of inferences performed {WITHOUT_CACHED}", lambda c: c.rows),
    "exec_count": (f"Number of model executions performed {WITHOUT_CACHED}", lambda c: c.succeeded),
    "request_duration_us": (f"Cumulative inference request duration in microseconds {WITH_CACHED}",
                            lambda c: c.success_ns // 1000),
    "queue_duration_us": (f"Cumulative inference queuing duration in microseconds {WITH_CACHED}",
                          lambda c: c.queue_ns // 1000),
    "compute_input_duration_us": (f"Cumulative compute input duration in microseconds {WITHOUT_CACHED}",
                                  lambda c: c.input_ns // 1000),
    "compute_infer_duration_us": (f"Cumulative compute inference duration in microseconds {WITHOUT_CACHED}",
                                  lambda c: c.infer_ns // 1000),
    "compute_output_duration_us": (f"Cumulative inference compute output duration in microseconds {WITHOUT_CACHED}",
                                   lambda c: c.output_ns // 1000),
}
# fmt: on
"""Families nv_inference_*: Triton's help text, and the value."""


FAILURES = Described(
    "nv_inference_request_failure",
    "counter",
    "Number of failed inference requests, all batch sizes",
    (MODEL, Label("reason", ", ".join(f"`{reason}`" for reason in FAILURE_REASONS)), VERSION),
)
PENDING = Described(
    "nv_inference_pending_request_count",
    "gauge",
    "Instantaneous number of pending requests awaiting execution per-model.",
    (MODEL, VERSION),
)


class TritonMetrics:
    """Text for the metrics endpoint, called on the endpoint's thread."""

    def __init__(
        self,
        models: Mapping[str, Model],
        statistics: Statistics,
        figures_of: Callable[[Model], EngineFigures],
        listed: Iterable[str],
    ) -> None:
        self._cores = [model for model in models.values() if model.template.is_core]
        self._statistics = statistics
        self._figures_of = figures_of
        self._listed = [*listed]

    def text(self) -> str:
        """All families in Prometheus' text format; at debug level the figures of engines are logged too."""
        figures = {model.name: self._figures_of(model) for model in self._cores}
        if log.isEnabledFor(logging.DEBUG):
            for name, own in figures.items():
                log.debug("model %s: %s", name, verbose_line(own))
        engines = engine_families(figures)
        return "".join((*self._of_requests(), *engines, *self._of_lengths()))

    def _of_requests(self) -> Iterator[str]:
        """Families of listed models, and of others with requests.

        Scripts of Triton's users expect equal counts of all models in the metrics, hence only models of the operator's
        choice are listed from the start: requests to `ensemble` leave the other defaults out.
        """
        pending = self._statistics.pending()
        known = dict.fromkeys((*self._listed, *pending))
        counts = {name: Counts() for name in known} | self._statistics.counts()
        for name, (text, value) in COUNTERS.items():
            samples = [Sample(labels_of(model), value(own)) for model, own in counts.items()]
            yield family(f"nv_inference_{name}", text, "counter", samples)
        yield family(
            FAILURES.name,
            FAILURES.text,
            FAILURES.kind,
            [
                Sample(labels_of(model, reason=reason), own.failed[reason])
                for model, own in counts.items()
                for reason in FAILURE_REASONS
            ],
        )
        yield family(
            PENDING.name,
            PENDING.text,
            PENDING.kind,
            [Sample(labels_of(model), pending[model]) for model in counts],
        )

    def _of_lengths(self) -> Iterator[str]:
        """One observation for each item."""
        known = self._statistics.lengths
        lengths = [(core.name, known.get(core.name, TokenLengths())) for core in self._cores]
        for way, own in (
            ("input", [(model, each.prompts) for model, each in lengths]),
            ("output", [(model, each.outputs) for model, each in lengths]),
        ):
            kind = f"total_{way}_tokens"
            samples = [
                sample
                for model, each in own
                for sample in _histogram(labels_of(model, response_metric_type=kind), each)
            ]
            yield family(f"nv_llm_{way}_token_len", LENGTHS, "histogram", samples)


def _histogram(labels: Mapping[str, str], lengths: Histogram) -> Sequence[Sample]:
    buckets = [
        Sample({**labels, "le": bound}, count, "_bucket") for bound, count in lengths.buckets()
    ]
    count = buckets[-1].value
    return [Sample(labels, count, "_count"), Sample(labels, lengths.sum, "_sum"), *buckets]


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """Figures over the workers of one model."""

    load: engine_pb.Load = field(default_factory=engine_pb.Load)
    """The sums of the workers' last reports."""
    unplaced: int = 0
    """Sequences that wait in this router for a worker."""
    max_batch_size: int = 0
    in_context: int = 0
    """Running sequences without a token yet."""
    tokens_per_block: int = 0
    static_batching: bool = False

    @property
    def generating(self) -> int:
        return self.load.running_sequences - self.in_context

    @property
    def active(self) -> int:
        return self.load.running_sequences + self.waiting

    @property
    def waiting(self) -> int:
        return self.load.waiting_sequences + self.unplaced


NARROW = (
    *("running_sequences", "waiting_sequences", "paused_sequences"),
    *("total_blocks", "used_blocks", "free_blocks"),
)
WIDE = (
    *("pending_prompt_tokens", "reused_blocks", "step_count"),
    *("host_memory_bytes", "device_memory_bytes", "pinned_memory_bytes"),
)
"""The fields of EngineFigures.load, besides those of handoffs; of 32 and of 64 bits."""


def engine_figures(workers: Iterable[Worker], unplaced: int = 0) -> EngineFigures:
    workers = list(workers)
    sums = {
        name: min(most, sum(getattr(worker.load, name) for worker in workers))
        for names, most in ((NARROW, 2**32 - 1), (WIDE, 2**64 - 1))
        for name in names
    }
    received = [worker.load.received_handoffs for worker in workers]
    handoffs = HandoffCounts(
        consumed=sum(counts.consumed for counts in received),
        transfer_ms=sum(counts.transfer_ms for counts in received),
    )
    return EngineFigures(
        engine_pb.Load(received_handoffs=handoffs, **sums),
        unplaced,
        max_batch_size=sum(worker.description.max_batch_size for worker in workers),
        in_context=sum(_in_context(worker) for worker in workers),
        tokens_per_block=max(
            (worker.description.tokens_per_block for worker in workers), default=0
        ),
        static_batching=any(worker.description.static_batching for worker in workers),
    )


def _in_context(worker: Worker) -> int:
    """Running sequences of this router in the context phase."""
    runs = list(worker.sequences.values())
    without_token = sum(not run.token_ids for run in runs)
    return min(max(0, without_token - worker.load.waiting_sequences), worker.load.running_sequences)


Figure = tuple[str, str, Callable[[EngineFigures], Number]]
"""A sample: the label, the name in the backend's verbose log or '', and the value."""


class EngineFamily(NamedTuple):
    """A family with one label besides model and version."""

    name: str
    text: str
    label: str
    figures: Sequence[Figure]
    kind: Literal["gauge", "counter"] = "gauge"
    static_batching: bool | None = None
    """The way of batching counted by the sample, None for both."""

    def is_about(self, figures: EngineFigures) -> bool:
        return self.static_batching in (None, figures.static_batching)


# fmt: off
ENGINE_FAMILIES = (
    EngineFamily("nv_trt_llm_request_metrics", "TRT LLM request metrics", "request_type", (
        ("active", "Active Request Count", lambda f: f.active),
        ("max", "Max Request Count", lambda f: f.max_batch_size),
        ("scheduled", "Scheduled Requests", lambda f: f.load.running_sequences),
        ("context", "Context Requests", lambda f: f.in_context),
        ("waiting", "Waiting Requests", lambda f: f.waiting),
    )),
    EngineFamily("nv_trt_llm_runtime_memory_metrics", "TRT LLM runtime memory metrics", "memory_type", (
        ("cpu", "Runtime CPU Memory Usage", lambda f: f.load.host_memory_bytes),
        ("gpu", "Runtime GPU Memory Usage", lambda f: f.load.device_memory_bytes),
        ("pinned", "Runtime Pinned Memory Usage", lambda f: f.load.pinned_memory_bytes),
    )),
    EngineFamily("nv_trt_llm_kv_cache_block_metrics", "TRT LLM KV cache block metrics", "kv_cache_block_type", (
        ("max", "Max KV cache blocks", lambda f: f.load.total_blocks),
        ("free", "Free KV cache blocks", lambda f: f.load.free_blocks),
        ("used", "Used KV cache blocks", lambda f: f.load.used_blocks),
        ("tokens_per", "Tokens per KV cache block", lambda f: f.tokens_per_block),
        ("reused", "Reused KV cache blocks", lambda f: f.load.reused_blocks),
        ("fraction", "Fraction used KV cache blocks", lambda f: f.load.used_blocks / (f.load.total_blocks or 1)),
    )),
    EngineFamily("nv_trt_llm_inflight_batcher_metrics", "TRT LLM inflight_batcher-specific metrics",
                 "inflight_batcher_specific_metric", (
        ("total_context_tokens", "Total Context Tokens", lambda f: f.load.pending_prompt_tokens),
        ("generation_requests", "Generation Requests", lambda f: f.generating),
        # Batches are never split.
        ("micro_batch_id", "MicroBatch ID", lambda _: 0),
        ("paused_requests", "Paused Requests", lambda f: f.load.paused_sequences),
    ), static_batching=False),
    EngineFamily("nv_trt_llm_v1_metrics", "TRT LLM v1-specific metrics", "v1_specific_metric", (
        ("total_context_tokens", "Total Context Tokens", lambda f: f.load.pending_prompt_tokens),
        # A step gives each sequence one token.
        ("total_generation_tokens", "Total Generation Tokens", lambda f: f.generating),
        ("empty_generation_slots", "Empty Generation Slots",
         lambda f: max(0, f.max_batch_size - f.load.running_sequences)),
    ), static_batching=True),
    EngineFamily("nv_trt_llm_general_metrics", "General TRT LLM metrics", "general_type", (
        ("timestamp", "", lambda _: time.time_ns() // 1000),
        ("iteration_counter", "Iteration Counter", lambda f: f.load.step_count),
    )),
    EngineFamily("nv_trt_llm_disaggregated_serving_metrics", "TRT LLM disaggregated serving metrics",
                 "disaggregated_serving_type", (
        ("kv_cache_transfer_ms", "KV cache transfer time", lambda f: f.load.received_handoffs.transfer_ms),
        ("request_count", "Request count", lambda f: f.load.received_handoffs.consumed),
    ), kind="counter"),
)
# fmt: on


def described() -> Iterator[Described]:
    """The families, as their page describes them."""
    for name, (text, _) in COUNTERS.items():
        yield Described(f"nv_inference_{name}", "counter", text, (MODEL, VERSION))
    yield from (FAILURES, PENDING)
    for each in ENGINE_FAMILIES:
        words = ", ".join(f"`{word}`" for word, _, _ in each.figures)
        yield Described(each.name, each.kind, each.text, (MODEL, Label(each.label, words), VERSION))
    for way in ("input", "output"):
        label = Label("response_metric_type", f"`total_{way}_tokens`")
        yield Described(f"nv_llm_{way}_token_len", "histogram", LENGTHS, (MODEL, label, VERSION))


def engine_families(figures: Mapping[str, EngineFigures]) -> Iterator[str]:
    """The families in Prometheus' text format, over figures by model."""
    for each in ENGINE_FAMILIES:
        samples = [
            Sample(labels_of(model, **{each.label: word}), read(own))
            for model, own in figures.items()
            if each.is_about(own)
            for word, _, read in each.figures
        ]
        if samples:
            yield family(each.name, each.text, each.kind, samples)


def verbose_line(figures: EngineFigures) -> str:
    """The samples of one model in the form of the backend's verbose log: a JSON object with the local time."""
    told: dict[str, Number | str] = {
        name: read(figures)
        for each in ENGINE_FAMILIES
        if each.is_about(figures)
        for _, name, read in each.figures
        if name
    }
    told["Timestamp"] = datetime.now().astimezone().strftime("%m-%d-%Y %H:%M:%S.%f")
    return json.dumps(told)


class Sample(NamedTuple):
    """One line: labels in the order given, `suffix` after the family's name."""

    labels: Mapping[str, str]
    value: Number
    suffix: str = ""


def family(name: str, text: str, kind: str, samples: Iterable[Sample]) -> str:
    """A family in Prometheus' text format."""
    lines = [
        f"{name}{suffix}{_labels(labels)} {number(value)}" for labels, value, suffix in samples
    ]
    return "\n".join((f"# HELP {name} {text}", f"# TYPE {name} {kind}", *lines, ""))


def labels_of(model: str, **more: str) -> dict[str, str]:
    """The labels of a model and others, by name."""
    return dict(sorted({"model": model, "version": MODEL_VERSION, **more}.items()))


def number(value: Number) -> str:
    """Whole numbers have no decimal point: scripts of Triton's users match them with regular expressions."""
    return str(int(value)) if value == int(value) else repr(value)


def _labels(labels: Mapping[str, str]) -> str:
    pairs = (f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{','.join(pairs)}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
