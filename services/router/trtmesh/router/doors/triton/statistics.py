"""Counts requests by model, for ModelStatistics and for Prometheus."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

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

    def succeed(self, rows: int, total: int, share: Share) -> None:
        self.succeeded += 1
        self.rows += rows
        self.success_ns += total
        self.queue_ns += share.queued
        self.input_ns += share.input
        self.infer_ns += share.infer
        self.output_ns += share.output
        self.last_ms = time.time_ns() // 1_000_000

    def fail(self, reason: str, ns: int) -> None:
        self.failed[reason] += 1
        self.failure_ns += ns


@dataclass(slots=True)
class TokenLengths:
    """Tokens of prompts and of outputs, the sequences of an output summed."""

    prompts: Histogram = field(default_factory=lambda: Histogram(LENGTH_BOUNDS))
    outputs: Histogram = field(default_factory=lambda: Histogram(LENGTH_BOUNDS))


class Counting:
    """A request being served."""

    def __init__(self, call: Call, steps: Sequence[Model], core: Model | None) -> None:
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

    @contextmanager
    def timed(self, answers: Answers | PlainText, live: LiveRequest) -> Iterator[None]:
        """Follows a request of the mesh, and reads its items at the end."""
        self.live = live
        try:
            yield
            self._generated(live.items, answers.error)
        finally:
            self.live = None

    def _generated(self, items: Sequence[ItemRun], error: TrtmeshError | None) -> None:
        self.error = error
        self.lengths = [(item.prompt_tokens, item.generated_tokens) for item in items]
        first = items[0]
        self._encode_ns = int(first.encode_seconds * 1e9)
        waited = (first.queue_seconds or 0.0) - first.encode_seconds
        self._queue_ns = max(0, int(waited * 1e9))
        last = max(items, key=lambda item: item.over_ns)
        self._over_ns, self._decode_ns = last.over_ns, last.over_ns - last.generated_ns

    @property
    def elapsed_ns(self) -> int:
        return time.monotonic_ns() - self.call.arrived_ns

    def spent(self) -> Spent:
        """The phases until now."""
        elapsed = self.elapsed_ns
        writing = self.call.arrived_ns + elapsed - self._over_ns if self._over_ns else 0
        known = Spent(self._read_ns, self._encode_ns, self._queue_ns, 0, self._decode_ns, writing)
        return known._replace(generating=max(0, elapsed - known.total))

    @property
    def pending(self) -> bool:
        """Whether a request of the mesh waits for execution."""
        live = self.live
        return live is not None and all(item.queue_seconds is None for item in live.items)


class Statistics:
    """Counts requests by model, once their inputs are read. Requests to an ensemble or BLS count for the steps too."""

    def __init__(self, models: Mapping[str, Model]) -> None:
        self._models = models
        self._steps = {name: self._steps_of(model) for name, model in models.items()}
        self._counts = defaultdict[str, Counts](Counts)
        self._running: set[Counting] = set()
        self.lengths = defaultdict[str, TokenLengths](TokenLengths)
        """Token lengths by generating model."""

    @contextmanager
    def counting(self, call: Call) -> Iterator[Counting]:
        """Counts a request: as failed where something is raised inside or answered as an error."""
        steps, core = self._steps[call.model.name]
        counting = Counting(call, steps, core)
        self._running.add(counting)
        try:
            yield counting
        except BaseException as error:
            self._fail(counting, error)
            raise
        else:
            if counting.error is not None:
                self._fail(counting, counting.error)
            else:
                self._succeed(counting)
        finally:
            self._running.discard(counting)

    def counts(self) -> dict[str, Counts]:
        """A copy of the counts by model, for another thread; omits models without requests."""
        return dict(self._counts)

    def pending(self) -> Counter[str]:
        """Requests waiting for execution, by model."""
        return Counter(
            model.name
            for counting in list(self._running)
            if counting.pending
            for model in (counting.call.model, *counting.steps)
        )

    def describe(self, model: Model) -> grpc_service_pb2.ModelStatistics:
        """The counts of one model."""
        counts = self._counts.get(model.name, Counts())
        answer = grpc_service_pb2.ModelStatistics(
            name=model.name,
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

    def _steps_of(self, model: Model) -> tuple[Sequence[Model], Model | None]:
        """Returns the steps of a model, with the models of a BLS among the steps, and the generating model."""
        names = dict.fromkeys(model.steps)
        for step in (self._models[name] for name in model.steps if name in self._models):
            names |= dict.fromkeys(step.steps)
        steps = [self._models[name] for name in names if name in self._models]
        return steps, next((each for each in (model, *steps) if each.template.is_core), None)

    def _succeed(self, counting: Counting) -> None:
        call, spent = counting.call, counting.spent()
        own = self._counts[call.model.name]
        own.succeed(call.batch_size, spent.total, _own_share(call.model, spent))
        for step in counting.steps:
            share = step.template.share(spent)
            self._counts[step.name].succeed(call.batch_size, share.total, share)
        if counting.lengths and counting.core is not None:
            lengths = self.lengths[counting.core.name]
            for prompt_tokens, generated_tokens in counting.lengths:
                lengths.prompts.observe(prompt_tokens)
                lengths.outputs.observe(generated_tokens)

    def _fail(self, counting: Counting, error: BaseException) -> None:
        reason, ns = failure_reason(error), counting.elapsed_ns
        failed = [counting.call.model]
        if counting.core is not None and counting.core is not counting.call.model:
            failed.append(counting.core)
        for model in failed:
            self._counts[model.name].fail(reason, ns)


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
