"""The metrics of Triton and of TensorRT-LLM's backend, under their names, over what this router knows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from trtmesh.router.doors.triton.engine_metrics import EngineFigures, engine_families, verbose_line
from trtmesh.router.doors.triton.exposition import Sample, family, labels_of
from trtmesh.router.doors.triton.models import Model
from trtmesh.router.doors.triton.statistics import FAILURE_REASONS, Counts, Statistics
from trtmesh.router.doors.triton.token_lengths import Lengths, TokenLengths

log = logging.getLogger(__name__)

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
"""Families nv_inference_*: what they count, and where it stands."""


class TritonMetrics:
    """Text for the metrics endpoint, which asks for it on a thread of its own."""

    def __init__(
        self,
        models: Mapping[str, Model],
        statistics: Statistics,
        figures_of: Callable[[Model], EngineFigures],
    ) -> None:
        self._cores = [model for model in models.values() if model.is_core]
        self._statistics = statistics
        self._figures_of = figures_of

    def text(self) -> str:
        """All families in Prometheus' text format; what they tell of engines is logged too, where all is."""
        figures = {model.name: self._figures_of(model) for model in self._cores}
        if log.isEnabledFor(logging.DEBUG):
            for name, own in figures.items():
                log.debug("model %s: %s", name, verbose_line(own))
        engines = engine_families(figures)
        return "".join((*self._of_requests(), *engines, *self._of_lengths()))

    def _of_requests(self) -> Iterator[str]:
        """Of models that had requests: Triton tells of all that are loaded, but here all are there always."""
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
        """One observation for each item that ended."""
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
