"""What each model served: told by ModelStatistics, and to Prometheus under Triton's names."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tritonclient.grpc import service_pb2
from trtmesh.chassis.errors import Blame, TrtmeshError
from trtmesh.router.doors.triton.answers import Answers
from trtmesh.router.doors.triton.models import MODEL_VERSION, Model
from trtmesh.router.doors.triton.plain_text import PlainText
from trtmesh.router.doors.triton.templates.generation import Call
from trtmesh.router.doors.triton.templates.template import Kind
from trtmesh.router.doors.triton.token_lengths import TokenLengths
from trtmesh.router.requests.item import ItemRun
from trtmesh.router.requests.live_request import LiveRequest

FAILURE_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
"""Triton's words for why a request failed."""

REASONS_BY_BLAME = {Blame.LOAD: "REJECTED", Blame.CLIENT: "CANCELED", Blame.PEER: "BACKEND"}


@dataclass(slots=True)
class Counts:
    """What one model served. A request is one execution."""

    succeeded: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    success_ns: int = 0
    failure_ns: int = 0
    queue_ns: int = 0
    compute_ns: int = 0
    rows: int = 0
    last_ms: int = 0

    def succeed(self, rows: int, ns: int, compute_ns: int, queue_ns: int = 0) -> None:
        self.succeeded += 1
        self.rows += rows
        self.success_ns += ns
        self.compute_ns += compute_ns
        self.queue_ns += queue_ns
        self.last_ms = time.time_ns() // 1_000_000

    def fail(self, reason: str, ns: int) -> None:
        self.failed[reason] += 1
        self.failure_ns += ns


class Counting:
    """One request while it is served."""

    def __init__(self, call: Call, steps: Sequence[Model]) -> None:
        self.call = call
        self.steps = steps
        self.error: TrtmeshError | None = None
        """Of the first row that failed."""
        self.encode_ns = self.queue_ns = 0
        """In which its first row was encoded, and in which it waited beside that."""
        self.lengths: list[tuple[int, int]] = []
        """Tokens of prompt and output of each row."""
        self._live: LiveRequest | None = None
        self._began_ns = time.monotonic_ns()

    @contextmanager
    def generating(self, live: LiveRequest, answers: Answers | PlainText) -> Iterator[None]:
        """It is a request of the mesh while inside, and what it took is known at the end."""
        self._live = live
        try:
            yield
            self.error = answers.error
            self._read(live.items)
        finally:
            self._live = None

    def _read(self, items: Sequence[ItemRun]) -> None:
        self.lengths = [(item.prompt_tokens, item.generated_tokens) for item in items]
        first = items[0]
        self.encode_ns = int(first.encode_seconds * 1e9)
        waited = (first.queue_seconds or 0.0) - first.encode_seconds
        self.queue_ns = max(0, int(waited * 1e9))

    @property
    def ns(self) -> int:
        return time.monotonic_ns() - self._began_ns

    @property
    def pending(self) -> bool:
        """Whether it is a request of the mesh that waits to be executed."""
        live = self._live
        return live is not None and all(item.queue_seconds is None for item in live.items)

    @property
    def core(self) -> Model | None:
        """The model among it and its steps that generates."""
        models = (self.call.model, *self.steps)
        return next((model for model in models if model.is_core), None)


class Statistics:
    """Counts requests by model, from the moment that their inputs are read. What an ensemble serves, its steps serve
    too, and so it is with BLS."""

    def __init__(self, models: Mapping[str, Model]) -> None:
        self._models = models
        self._counts: dict[str, Counts] = {}
        self._running: set[Counting] = set()
        self.lengths: dict[str, TokenLengths] = {}
        """Of prompts and outputs, by the model that generated them."""

    @contextmanager
    def counting(self, call: Call) -> Iterator[Counting]:
        """Counts one request; whatever is raised inside, or answered as an error, makes it a failed one."""
        counting = Counting(call, self._steps_of(call.model))
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
        """By model; models without a request are left out. A copy that another thread may read."""
        return dict(self._counts)

    def pending(self) -> Counter[str]:
        """Requests that wait to be executed, by model."""
        return Counter(
            model.name
            for counting in list(self._running)
            if counting.pending
            for model in (counting.call.model, *counting.steps)
        )

    def describe(self, model: Model) -> service_pb2.ModelStatistics:
        """The counts of one model. What the mesh computes is told as inference; it does not copy in and out apart."""
        counts = self._counts.get(model.name, Counts())
        answer = service_pb2.ModelStatistics(
            name=model.name,
            version=MODEL_VERSION,
            last_inference=counts.last_ms,
            inference_count=counts.rows,
            execution_count=counts.succeeded,
        )
        stats = answer.inference_stats
        stats.success.count, stats.success.ns = counts.succeeded, counts.success_ns
        stats.fail.count, stats.fail.ns = counts.failed.total(), counts.failure_ns
        stats.queue.count, stats.queue.ns = counts.succeeded, counts.queue_ns
        stats.compute_infer.count, stats.compute_infer.ns = counts.succeeded, counts.compute_ns
        for part in (stats.compute_input, stats.compute_output):
            part.count = counts.succeeded
        return answer

    def _steps_of(self, model: Model) -> Sequence[Model]:
        return [self._models[name] for name in model.steps if name in self._models]

    def _of(self, model: Model) -> Counts:
        return self._counts.setdefault(model.name, Counts())

    def _succeed(self, counting: Counting) -> None:
        call, ns = counting.call, counting.ns
        encode_ns, queue_ns = counting.encode_ns, counting.queue_ns
        whole = 0 if call.model.is_ensemble else ns - queue_ns
        own_queue = queue_ns if call.model.is_core else 0
        self._of(call.model).succeed(call.batch_size, ns, whole, own_queue)
        for step in counting.steps:
            match step.kind:
                case Kind.PREPROCESSING:
                    self._of(step).succeed(call.batch_size, encode_ns, encode_ns)
                case Kind.TOKENS:
                    rest = max(0, ns - encode_ns)
                    computed = max(0, rest - queue_ns)
                    self._of(step).succeed(call.batch_size, rest, computed, queue_ns)
                case _:
                    # Texts are made of tokens while these come: it takes no time of its own.
                    self._of(step).succeed(call.batch_size, 0, 0)
        if counting.lengths and counting.core is not None:
            lengths = self.lengths.setdefault(counting.core.name, TokenLengths())
            for prompt_tokens, generated_tokens in counting.lengths:
                lengths.observe(prompt_tokens, generated_tokens)

    def _fail(self, counting: Counting, error: BaseException) -> None:
        reason, ns = failure_reason(error), counting.ns
        failed = [counting.call.model]
        if counting.core is not None and counting.core is not counting.call.model:
            failed.append(counting.core)
        for model in failed:
            self._of(model).fail(reason, ns)


def failure_reason(error: BaseException) -> str:
    """Triton's word for what ended a request."""
    match error:
        case asyncio.CancelledError() | GeneratorExit() | ConnectionError():
            return "CANCELED"
        case TrtmeshError():
            return REASONS_BY_BLAME.get(error.row.blame, "OTHER")
    return "OTHER"
