"""What each model served, as ModelStatistics tells it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tritonclient.grpc import service_pb2
from trtmesh.router.triton.calls import Call
from trtmesh.router.triton.models import MODEL_VERSION, Model


@dataclass(slots=True)
class _Counts:
    succeeded: int = 0
    failed: int = 0
    success_ns: int = 0
    failure_ns: int = 0
    rows: int = 0
    last_ms: int = 0


class Statistics:
    """Counts requests by model, from the moment that their inputs are read."""

    def __init__(self) -> None:
        self._counts: dict[str, _Counts] = {}

    @contextmanager
    def counting(self, call: Call) -> Iterator[None]:
        """Counts one request; whatever is raised inside makes it a failed one."""
        counts = self._counts.setdefault(call.model.name, _Counts())
        started = time.monotonic_ns()
        try:
            yield
        except BaseException:
            counts.failed += 1
            counts.failure_ns += time.monotonic_ns() - started
            raise
        counts.succeeded += 1
        counts.success_ns += time.monotonic_ns() - started
        counts.rows += call.batch_size
        counts.last_ms = time.time_ns() // 1_000_000

    def describe(self, model: Model) -> service_pb2.ModelStatistics:
        """The counts of one model. A request is one execution; what is spent is told as inference alone, because the
        mesh does not queue, copy in and copy out as one process would."""
        counts = self._counts.get(model.name, _Counts())
        answer = service_pb2.ModelStatistics(
            name=model.name,
            version=MODEL_VERSION,
            last_inference=counts.last_ms,
            inference_count=counts.rows,
            execution_count=counts.succeeded,
        )
        stats = answer.inference_stats
        stats.success.count, stats.success.ns = counts.succeeded, counts.success_ns
        stats.fail.count, stats.fail.ns = counts.failed, counts.failure_ns
        stats.compute_infer.count, stats.compute_infer.ns = counts.succeeded, counts.success_ns
        for part in (stats.queue, stats.compute_input, stats.compute_output):
            part.count = counts.succeeded
        return answer
