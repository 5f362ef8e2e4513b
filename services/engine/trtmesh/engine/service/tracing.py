"""The spans of an item at a worker: queue, prefill and decode, by the steps in which they began and ended."""

from __future__ import annotations

import time

from trtmesh.chassis.tracing.spans import Span, Tracer, Value, continued, end
from trtmesh.engine.backend import SequenceEnd
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb


class WorkerTrace:
    """An item that is traced, from its submit to the end of its last sequence."""

    def __init__(self, tracer: Tracer, span: Span, model: str, step: int) -> None:
        """`step` is the number of the worker's latest step."""
        self._tracer, self._span, self._model = tracer, span, model
        self._first_step = self._last_step = step
        self._first_token_ns = self._first_token_step = 0
        self._scheduled_ns = 0
        self._tokens = self._cached_tokens = 0
        self._error = ""

    @classmethod
    def begin(
        cls, tracer: Tracer, command: epb.SubmitCommand, worker: str, model: str, step: int
    ) -> WorkerTrace | None:
        """None if the router's span is not valid."""
        span = continued(command.traceparent, f"generate {model}")
        if span is None:
            return None
        prompt_tokens = len(command.token_ids) - command.emitted_tokens
        span.attributes |= {
            "trtmesh.worker": worker,
            "trtmesh.batch_index": command.batch_index,
            "trtmesh.prompt_tokens": prompt_tokens,
            "trtmesh.offset": command.emitted_tokens,
        }
        return cls(tracer, span, model, step)

    def first_token(self, step: int) -> None:
        if not self._first_token_ns:
            self._first_token_ns, self._first_token_step = time.time_ns(), step

    def ended(self, end: SequenceEnd, step: int) -> None:
        self._last_step = max(self._last_step, step)
        if not self._scheduled_ns:
            self._scheduled_ns = self._span.begin_ns + int(end.queue_seconds * 1e9)
        self._tokens += end.generated_tokens
        self._cached_tokens = max(self._cached_tokens, end.cached_prompt_tokens)
        if end.error is not None:
            self._error = self._error or end.error.reason
        elif end.reason == pb.FINISH_REASON_CANCELLED:
            self._error = self._error or "CANCELLED"

    def refused(self, reason: str) -> None:
        end(self._tracer, self._span, reason)

    def close(self) -> None:
        """The last sequence ended."""
        now = time.time_ns()
        begin, scheduled = self._span.begin_ns, min(self._scheduled_ns, now)
        first = max(self._first_token_ns, scheduled) if self._first_token_ns else 0
        self._part("queue", begin, scheduled, {})
        steps = self._first_step + 1, self._first_token_step or self._last_step
        self._part("prefill", scheduled, first or now, _steps(*steps))
        if first:
            self._part("decode", first, now, _steps(self._first_token_step, self._last_step))
        self._span.attributes |= {
            **_steps(steps[0], self._last_step),
            "trtmesh.tokens": self._tokens,
            "trtmesh.cached_tokens": self._cached_tokens,
            "gen_ai.latency.time_in_scheduler": (scheduled - begin) / 1e9,
            "gen_ai.latency.time_in_model_prefill": ((first or now) - scheduled) / 1e9,
            "gen_ai.latency.time_in_model_decode": (now - first) / 1e9 if first else 0.0,
            "gen_ai.latency.time_in_model_inference": (now - scheduled) / 1e9,
        }
        end(self._tracer, self._span, self._error, now)

    def _part(self, name: str, begin_ns: int, end_ns: int, attributes: dict[str, Value]) -> None:
        part = self._span.child(f"{name} {self._model}")
        part.begin_ns, part.attributes = begin_ns, attributes
        end(self._tracer, part, at_ns=end_ns)


def _steps(first: int, last: int) -> dict[str, Value]:
    return {"trtmesh.first_step": first, "trtmesh.last_step": max(first, last)}
