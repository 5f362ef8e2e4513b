"""The metrics of Triton and of TensorRT-LLM's backend, under their names and as Triton writes them."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, NamedTuple

from trtmesh.router.doors.triton.models import MODEL_VERSION
from trtmesh.router.doors.triton.statistics import (
    FAILURE_REASONS,
    Counts,
    Lengths,
    Statistics,
    TokenLengths,
)
from trtmesh.router.doors.triton.templates.template import Model
from trtmesh.router.fleet.worker import Worker

log = logging.getLogger(__name__)

Number = int | float

COUNTERS: Mapping[str, tuple[str, Callable[[Counts], int]]] = {
    "request_success": ("Number of successful inference requests", lambda c: c.succeeded),
    "count": ("Number of inferences performed, each row of a batch one", lambda c: c.rows),
    "exec_count": ("Number of model executions performed", lambda c: c.succeeded),
    "request_duration_us": (
        "Cumulative inference request duration in microseconds",
        lambda c: c.success_ns // 1000,
    ),
    "queue_duration_us": (
        "Cumulative inference queuing duration in microseconds",
        lambda c: c.queue_ns // 1000,
    ),
    "compute_input_duration_us": ("Part of compute_infer here", lambda _: 0),
    "compute_infer_duration_us": (
        "Cumulative compute inference duration in microseconds",
        lambda c: c.compute_ns // 1000,
    ),
    "compute_output_duration_us": ("Part of compute_infer here", lambda _: 0),
}
"""Families nv_inference_*: help text and value."""


class TritonMetrics:
    """Text for the metrics endpoint, called on the endpoint's thread."""

    def __init__(
        self,
        models: Mapping[str, Model],
        statistics: Statistics,
        figures_of: Callable[[Model], EngineFigures],
    ) -> None:
        self._cores = [model for model in models.values() if model.template.is_core]
        self._statistics = statistics
        self._figures_of = figures_of

    def text(self) -> str:
        """All families in Prometheus' text format; at debug level the figures of engines are logged too."""
        figures = {model.name: self._figures_of(model) for model in self._cores}
        if log.isEnabledFor(logging.DEBUG):
            for name, own in figures.items():
                log.debug("model %s: %s", name, verbose_line(own))
        engines = engine_families(figures)
        return "".join((*self._of_requests(), *engines, *self._of_lengths()))

    def _of_requests(self) -> Iterator[str]:
        """Of models that had requests. Triton has all loaded models, but here every model is always loaded."""
        pending = self._statistics.pending()
        counts = {name: Counts() for name in pending} | self._statistics.counts()
        for name, (text, value) in COUNTERS.items():
            samples = [Sample(labels_of(model), value(own)) for model, own in counts.items()]
            yield family(f"nv_inference_{name}", text, "counter", samples)
        yield family(
            "nv_inference_request_failure",
            "Number of failed inference requests",
            "counter",
            [
                Sample(labels_of(model, reason=reason), own.failed[reason])
                for model, own in counts.items()
                for reason in FAILURE_REASONS
            ],
        )
        yield family(
            "nv_inference_pending_request_count",
            "Instantaneous number of pending requests awaiting execution per-model.",
            "gauge",
            [Sample(labels_of(model), pending[model]) for model in counts],
        )

    def _of_lengths(self) -> Iterator[str]:
        """One observation for each item."""
        known = self._statistics.lengths
        lengths = {model.name: known.get(model.name, TokenLengths()) for model in self._cores}
        for way, own in (
            ("input", {model: each.prompts for model, each in lengths.items()}),
            ("output", {model: each.outputs for model, each in lengths.items()}),
        ):
            yield family(
                f"nv_llm_{way}_token_len",
                "TRT LLM response metrics",
                "histogram",
                [
                    sample
                    for model, each in own.items()
                    for sample in _histogram(
                        labels_of(model, response_metric_type=f"total_{way}_tokens"), each
                    )
                ],
            )


def _histogram(labels: Mapping[str, str], lengths: Lengths) -> Sequence[Sample]:
    buckets = [
        Sample({**labels, "le": bound}, count, "_bucket") for bound, count in lengths.buckets()
    ]
    count = buckets[-1].value
    return [Sample(labels, count, "_count"), Sample(labels, lengths.total, "_sum"), *buckets]


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """Sums over the workers of one model."""

    max_batch_size: int = 0
    running: int = 0
    waiting: int = 0
    in_context: int = 0
    """Running sequences without a token yet."""
    paused: int = 0
    pending_prompt_tokens: int = 0
    steps: int = 0
    total_blocks: int = 0
    used_blocks: int = 0
    free_blocks: int = 0
    reused_blocks: int = 0
    tokens_per_block: int = 0
    static_batching: bool = False
    host_memory_bytes: int = 0
    device_memory_bytes: int = 0
    pinned_memory_bytes: int = 0


def engine_figures(workers: Iterable[Worker]) -> EngineFigures:
    """The sums of the workers' last reports."""
    workers = list(workers)
    loads = [worker.load for worker in workers]
    return EngineFigures(
        max_batch_size=sum(worker.engine.max_batch_size for worker in workers),
        running=sum(load.running_sequences for load in loads),
        waiting=sum(load.waiting_sequences for load in loads),
        in_context=sum(_in_context(worker) for worker in workers),
        paused=sum(load.paused_sequences for load in loads),
        pending_prompt_tokens=sum(load.pending_prompt_tokens for load in loads),
        steps=sum(load.step_count for load in loads),
        total_blocks=sum(load.total_blocks for load in loads),
        used_blocks=sum(load.used_blocks for load in loads),
        free_blocks=sum(load.free_blocks for load in loads),
        reused_blocks=sum(load.reused_blocks for load in loads),
        tokens_per_block=max((worker.engine.tokens_per_block for worker in workers), default=0),
        static_batching=any(worker.engine.static_batching for worker in workers),
        host_memory_bytes=sum(load.host_memory_bytes for load in loads),
        device_memory_bytes=sum(load.device_memory_bytes for load in loads),
        pinned_memory_bytes=sum(load.pinned_memory_bytes for load in loads),
    )


def _in_context(worker: Worker) -> int:
    """Running sequences of this router in the context phase."""
    runs = list(worker.sequences.values())
    without_token = sum(not run.token_ids for run in runs)
    return min(max(0, without_token - worker.load.waiting_sequences), worker.load.running_sequences)


Read = Callable[[EngineFigures], Number]


class _Family(NamedTuple):
    """A family with one label besides model and version."""

    name: str
    text: str
    label: str
    values: Mapping[str, Read]
    kind: Literal["gauge", "counter"] = "gauge"


_REQUESTS = _Family(
    "nv_trt_llm_request_metrics",
    "TRT LLM request metrics",
    "request_type",
    {
        "active": lambda f: f.running + f.waiting,
        "max": lambda f: f.max_batch_size,
        "scheduled": lambda f: f.running,
        "context": lambda f: f.in_context,
        "waiting": lambda f: f.waiting,
    },
)
_MEMORY = _Family(
    "nv_trt_llm_runtime_memory_metrics",
    "TRT LLM runtime memory metrics",
    "memory_type",
    {
        "cpu": lambda f: f.host_memory_bytes,
        "gpu": lambda f: f.device_memory_bytes,
        "pinned": lambda f: f.pinned_memory_bytes,
    },
)
_BLOCKS = _Family(
    "nv_trt_llm_kv_cache_block_metrics",
    "TRT LLM KV cache block metrics",
    "kv_cache_block_type",
    {
        "max": lambda f: f.total_blocks,
        "free": lambda f: f.free_blocks,
        "used": lambda f: f.used_blocks,
        "tokens_per": lambda f: f.tokens_per_block,
        "reused": lambda f: f.reused_blocks,
        "fraction": lambda f: f.used_blocks / f.total_blocks if f.total_blocks else 0,
    },
)
_INFLIGHT = _Family(
    "nv_trt_llm_inflight_batcher_metrics",
    "TRT LLM inflight_batcher-specific metrics",
    "inflight_batcher_specific_metric",
    {
        "total_context_tokens": lambda f: f.pending_prompt_tokens,
        "generation_requests": lambda f: f.running - f.in_context,
        # Batches are never split.
        "micro_batch_id": lambda _: 0,
        "paused_requests": lambda f: f.paused,
    },
)
_V1 = _Family(
    "nv_trt_llm_v1_metrics",
    "TRT LLM v1-specific metrics",
    "v1_specific_metric",
    {
        "total_context_tokens": lambda f: f.pending_prompt_tokens,
        # A step gives each sequence one token.
        "total_generation_tokens": lambda f: f.running - f.in_context,
        "empty_generation_slots": lambda f: max(0, f.max_batch_size - f.running),
    },
)
_GENERAL = _Family(
    "nv_trt_llm_general_metrics",
    "General TRT LLM metrics",
    "general_type",
    {
        "timestamp": lambda _: time.time_ns() // 1000,
        "iteration_counter": lambda f: f.steps,
    },
)
_HANDOFFS = _Family(
    "nv_trt_llm_disaggregated_serving_metrics",
    "TRT LLM disaggregated serving metrics",
    "disaggregated_serving_type",
    # No worker of this release hands KV over.
    {"kv_cache_transfer_ms": lambda _: 0, "request_count": lambda _: 0},
    kind="counter",
)


def engine_families(figures: Mapping[str, EngineFigures]) -> Iterator[str]:
    """The families in Prometheus' text format, over figures by model."""
    static = {model: own for model, own in figures.items() if own.static_batching}
    inflight = {model: own for model, own in figures.items() if not own.static_batching}
    for each, whose in (
        (_REQUESTS, figures),
        (_MEMORY, figures),
        (_BLOCKS, figures),
        (_INFLIGHT, inflight),
        (_V1, static),
        (_GENERAL, figures),
        (_HANDOFFS, figures),
    ):
        samples = [
            Sample(labels_of(model, **{each.label: word}), read(own))
            for model, own in whose.items()
            for word, read in each.values.items()
        ]
        yield family(each.name, each.text, each.kind, samples)


_LOGGED: Mapping[str, tuple[_Family, str]] = {
    "Active Request Count": (_REQUESTS, "active"),
    "Max Request Count": (_REQUESTS, "max"),
    "Scheduled Requests": (_REQUESTS, "scheduled"),
    "Context Requests": (_REQUESTS, "context"),
    "Waiting Requests": (_REQUESTS, "waiting"),
    "Runtime CPU Memory Usage": (_MEMORY, "cpu"),
    "Runtime GPU Memory Usage": (_MEMORY, "gpu"),
    "Runtime Pinned Memory Usage": (_MEMORY, "pinned"),
    "Max KV cache blocks": (_BLOCKS, "max"),
    "Free KV cache blocks": (_BLOCKS, "free"),
    "Used KV cache blocks": (_BLOCKS, "used"),
    "Tokens per KV cache block": (_BLOCKS, "tokens_per"),
    "Reused KV cache blocks": (_BLOCKS, "reused"),
    "Fraction used KV cache blocks": (_BLOCKS, "fraction"),
    "Iteration Counter": (_GENERAL, "iteration_counter"),
    "KV cache transfer time": (_HANDOFFS, "kv_cache_transfer_ms"),
    "Request count": (_HANDOFFS, "request_count"),
}
_LOGGED_INFLIGHT: Mapping[str, tuple[_Family, str]] = {
    "Total Context Tokens": (_INFLIGHT, "total_context_tokens"),
    "Generation Requests": (_INFLIGHT, "generation_requests"),
    "MicroBatch ID": (_INFLIGHT, "micro_batch_id"),
    "Paused Requests": (_INFLIGHT, "paused_requests"),
}
_LOGGED_V1: Mapping[str, tuple[_Family, str]] = {
    "Total Context Tokens": (_V1, "total_context_tokens"),
    "Total Generation Tokens": (_V1, "total_generation_tokens"),
    "Empty Generation Slots": (_V1, "empty_generation_slots"),
}
"""Names of the samples in the backend's verbose log."""


def verbose_line(figures: EngineFigures) -> str:
    """The samples of one model in the form of the backend's verbose log: a JSON object with the local time."""
    named = {**_LOGGED, **(_LOGGED_V1 if figures.static_batching else _LOGGED_INFLIGHT)}
    told: dict[str, Number | str] = {
        name: each.values[word](figures) for name, (each, word) in named.items()
    }
    told["Timestamp"] = datetime.now().astimezone().strftime("%m-%d-%Y %H:%M:%S.%f")
    return json.dumps(told)


class Sample(NamedTuple):
    """One line: labels in the order given, `suffix` after the family's name."""

    labels: Mapping[str, str]
    value: Number
    suffix: str = ""


def family(
    name: str,
    text: str,
    kind: Literal["counter", "gauge", "histogram"],
    samples: Iterable[Sample],
) -> str:
    """A family in Prometheus' text format; '' without samples."""
    lines = [
        f"{name}{suffix}{_labels(labels)} {number(value)}" for labels, value, suffix in samples
    ]
    if not lines:
        return ""
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
