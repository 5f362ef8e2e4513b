"""Counts requests by model, for ModelStatistics and for Prometheus."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Self

from trtmesh.chassis.errors import Blame, TrtmeshError
from trtmesh.chassis.metrics import Histogram
from trtmesh.kserve import grpc_service_pb2
from trtmesh.router.doors.triton.answers import Answers, PlainText
from trtmesh.router.doors.triton.models import MODEL_VERSION
from trtmesh.router.doors.triton.templates.template import Call, Model, Share, Spent
from trtmesh.router.requests.item import ItemRun
from trtmesh.router.requests.live_request import LiveRequest

FAILURE_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
"""Triton's reasons for the failure of a request."""

REASONS_BY_BLAME = {Blame.LOAD: "REJECTED", Blame.CLIENT: "CANCELED", Blame.PEER: "BACKEND"}

LENGTH_BOUNDS = (10, 50, 100, 500, 1000)
"""Histogram buckets of TensorRT-LLM's backend."""


@dataclass(slots=True)
class _Served:
    """The requests to a model by its own name, and the sum of each phase of those that succeeded."""

    succeeded: int = 0
    rows: int = 0
    last_ms: int = 0
    phases: list[int] = field(default_factory=lambda: [0] * len(Spent._fields))
    failed: Counter[str] = field(default_factory=Counter)
    """Those that failed, of other models in which this one generates too."""
    failure_ns: int = 0


@dataclass(slots=True)
class Counts:
    """Counts of a model. A request is an execution."""

    succeeded: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    success_ns: int = 0
    failure_ns: int = 0
    queue_ns: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0
    rows: int = 0
    last_ms: int = 0

    def add(self, served: _Served, success_ns: int, share: Share) -> None:
        """Counts what succeeded, with this model's share of its time."""
        self.succeeded += served.succeeded
        self.rows += served.rows
        self.success_ns += success_ns
        self.queue_ns += share.queued
        self.input_ns += share.input
        self.infer_ns += share.infer
        self.output_ns += share.output
        self.last_ms = max(self.last_ms, served.last_ms)


@dataclass(slots=True)
class TokenLengths:
    """Tokens of prompts and of outputs, the sequences of an output summed."""

    prompts: Histogram = field(default_factory=lambda: Histogram(LENGTH_BOUNDS))
    outputs: Histogram = field(default_factory=lambda: Histogram(LENGTH_BOUNDS))


class Counting(AbstractContextManager["Counting"]):
    """The block of a request: failed where something is raised inside or answered as an error."""

    def __init__(
        self, statistics: Statistics, call: Call, steps: Sequence[Model], core: Model | None
    ) -> None:
        self._statistics = statistics
        self.call = call
        self.steps = steps
        self.core = core
        """The generating model: the model of the call, or a step."""
        self.error: TrtmeshError | None = None
        """Error of the first failed row."""
        self._encode_ns = self._queue_ns = 0
        """Encoding time of the first row, and the rest of the row's wait."""
        self._decode_ns = 0
        """Decoding time of the last row after its generation."""
        self._over_ns = 0
        """End of the last row; 0 without rows."""
        self.lengths: list[tuple[int, int]] = []
        """Tokens of prompt and output of each row."""
        self.live: LiveRequest | None = None
        """Its request of the mesh, while that runs."""
        self._read_ns = time.monotonic_ns() - call.arrived_ns

    def __enter__(self) -> Self:
        self._statistics.running.add(self)
        return self

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> None:
        self._statistics.running.discard(self)
        self._statistics.ended(self, error or self.error)

    def generated(self, items: Sequence[ItemRun], error: TrtmeshError | None) -> None:
        """Reads the items of a request of the mesh at its end, and the `error` that it was answered with, if any."""
        self.error = error
        self.lengths = [(item.prompt_tokens, item.generated_tokens) for item in items]
        first = items[0]
        self._encode_ns = int(first.encode_seconds * 1e9)
        waited = (first.queue_seconds or 0.0) - first.encode_seconds
        self._queue_ns = max(0, int(waited * 1e9))
        last = max(items, key=attrgetter("over_ns"))
        self._over_ns, self._decode_ns = last.over_ns, last.over_ns - last.generated_ns

    def spent(self) -> Spent:
        """The phases until now."""
        now = time.monotonic_ns()
        read, encoding, queued, decoding = (
            self._read_ns,
            self._encode_ns,
            self._queue_ns,
            self._decode_ns,
        )
        writing = now - self._over_ns if self._over_ns else 0
        known = read + encoding + queued + decoding + writing
        generating = max(0, now - self.call.arrived_ns - known)
        return Spent(read, encoding, queued, generating, decoding, writing)

    @property
    def pending(self) -> bool:
        """Whether a request of the mesh waits for execution."""
        live = self.live
        return live is not None and all(item.queue_seconds is None for item in live.items)


class Timed(AbstractContextManager[None]):
    """The block of a request of the mesh, whose items are read at its end."""

    def __init__(self, counting: Counting, answers: Answers | PlainText, live: LiveRequest) -> None:
        self._counting, self._answers = counting, answers
        counting.live = self._live = live

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> None:
        self._counting.live = None
        if error is None:
            self._counting.generated(self._live.items, self._answers.error)


class Statistics:
    """Counts requests by model, once their inputs are read. Requests to an ensemble or BLS count for the steps too."""

    def __init__(self, models: Mapping[str, Model]) -> None:
        self._models = models
        self._steps = {name: self._steps_of(model) for name, model in models.items()}
        self._served = defaultdict[str, _Served](_Served)
        self.running: set[Counting] = set()
        self.lengths = defaultdict[str, TokenLengths](TokenLengths)
        """Token lengths by generating model."""

    def counting(self, call: Call) -> Counting:
        """The block of a request, which counts it."""
        return Counting(self, call, *self._steps[call.model.name])

    def counts(self) -> dict[str, Counts]:
        """The counts by model, for any thread; omits models without requests."""
        counts = defaultdict[str, Counts](Counts)
        for name, served in list(self._served.items()):
            own, model = counts[name], self._models[name]
            own.failed, own.failure_ns = served.failed, served.failure_ns
            if not served.succeeded:
                continue
            spent = Spent._make(served.phases)
            own.add(served, sum(spent), _own_share(model, spent))
            for step in self._steps[name][0]:
                share = step.template.share(spent)
                counts[step.name].add(served, sum(share), share)
        return counts

    def pending(self) -> Counter[str]:
        """Requests waiting for execution, by model."""
        return Counter(
            model.name
            for counting in list(self.running)
            if counting.pending
            for model in (counting.call.model, *counting.steps)
        )

    def describe(self, models: Iterable[Model]) -> list[grpc_service_pb2.ModelStatistics]:
        counts = self.counts()
        return [_described(model.name, counts.get(model.name, Counts())) for model in models]

    def _steps_of(self, model: Model) -> tuple[Sequence[Model], Model | None]:
        """Returns the steps of a model, with the models of a BLS among the steps, and the generating model."""
        names = dict.fromkeys(model.steps)
        for step in (self._models[name] for name in model.steps if name in self._models):
            names |= dict.fromkeys(step.steps)
        steps = [self._models[name] for name in names if name in self._models]
        return steps, next((each for each in (model, *steps) if each.template.is_core), None)

    def ended(self, counting: Counting, error: BaseException | None) -> None:
        """Counts a request, which ends with an error if any."""
        if error is not None:
            self._fail(counting, error)
            return
        call, spent = counting.call, counting.spent()
        own = self._served[call.model.name]
        own.succeeded += 1
        own.rows += call.batch_size
        own.last_ms = time.time_ns() // 1_000_000
        for phase, ns in enumerate(spent):
            own.phases[phase] += ns
        if counting.lengths and counting.core is not None:
            lengths = self.lengths[counting.core.name]
            for prompt_tokens, generated_tokens in counting.lengths:
                lengths.prompts.observe(prompt_tokens)
                lengths.outputs.observe(generated_tokens)

    def _fail(self, counting: Counting, error: BaseException) -> None:
        reason = failure_reason(error)
        ns = time.monotonic_ns() - counting.call.arrived_ns
        failed = [counting.call.model]
        if counting.core is not None and counting.core is not counting.call.model:
            failed.append(counting.core)
        for model in failed:
            served = self._served[model.name]
            served.failed[reason] += 1
            served.failure_ns += ns


def _described(name: str, counts: Counts) -> grpc_service_pb2.ModelStatistics:
    answer = grpc_service_pb2.ModelStatistics(
        name=name,
        version=MODEL_VERSION,
        last_inference=counts.last_ms,
        inference_count=counts.rows,
        execution_count=counts.succeeded,
    )
    stats = answer.inference_stats
    stats.fail.count, stats.fail.ns = counts.failed.total(), counts.failure_ns
    for duration, ns in (
        (stats.success, counts.success_ns),
        (stats.queue, counts.queue_ns),
        (stats.compute_input, counts.input_ns),
        (stats.compute_infer, counts.infer_ns),
        (stats.compute_output, counts.output_ns),
    ):
        duration.count, duration.ns = counts.succeeded, ns
    return answer


def _own_share(model: Model, spent: Spent) -> Share:
    """The time counted for the requested model: of an ensemble the sum of its steps, queueing apart, as in Triton."""
    queued = spent.queued if model.template.is_core else 0
    waits = 0 if model.is_ensemble else spent.queued - queued
    infer = spent.encoding + spent.generating + spent.decoding + waits
    return Share(queued, spent.reading, infer, spent.writing)


def failure_reason(error: BaseException) -> str:
    """Triton's reason for what ended a request."""
    match error:
        case asyncio.CancelledError() | GeneratorExit() | ConnectionError():
            return "CANCELED"
        case TrtmeshError():
            return REASONS_BY_BLAME.get(error.row.blame, "OTHER")
    return "OTHER"
