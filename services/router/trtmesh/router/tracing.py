"""The history of a traced call and of its items, told as spans.

A call has the span of its door, and below it one of each item. Below an item are its stages, one after another, and its
legs: the time of its sequences at a worker. The spans of tokenizers and workers are below the stage or the leg that
asked them. A leg is linked to the former one, whose worker may be dead; a stage or a leg is exported at its own end, so
that an item holds few spans however long it lives.

Tokens are not seen here: an item's sequences know their counts and times.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trtmesh.chassis.errors import TrtmeshError
from trtmesh.chassis.tracing.spans import Span, TraceContext, Tracer, Value, end, parent_in
from trtmesh.router.metrics import CHAT, TEXT_COMPLETION
from trtmesh.router.placement.place import Decision
from trtmesh.router.streams.sequence import SequenceRun
from trtmesh.router.values.request import GenerationRequest, ItemRequest
from trtmesh.v1 import generation_pb2 as pb

PROVIDER = "trtmesh"
UNTOLD_STAGES = frozenset({"generate", "over"})
"""The legs tell of them."""
SPAN_NAMES = {"admit": "queue"}
"""Names of stages where they have an established one."""
REQUESTED = (
    ("gen_ai.request.max_tokens", "stopping.max_tokens"),
    ("gen_ai.request.temperature", "sampling.temperature"),
    ("gen_ai.request.top_p", "sampling.top_p"),
    ("gen_ai.request.top_k", "sampling.top_k"),
    ("gen_ai.request.seed", "sampling.seed"),
    ("gen_ai.request.frequency_penalty", "sampling.frequency_penalty"),
    ("gen_ai.request.presence_penalty", "sampling.presence_penalty"),
)
"""Attributes of a request, and its fields. Stop texts are content of the client's, and left out."""


class CallTrace:
    """The span of a client's call."""

    def __init__(
        self, tracer: Tracer, context: TraceContext, parent: TraceContext | None, door: str
    ) -> None:
        self.tracer = tracer
        self.operation, self.model = TEXT_COMPLETION, ""
        self._span = Span(self.operation, context, parent, serves=True)
        self._span.attributes.update(
            {"gen_ai.provider.name": PROVIDER, "trtmesh.door": door},
        )

    @classmethod
    def begin(
        cls, tracer: Tracer | None, door: str, headers: Iterable[tuple[str, str | bytes]]
    ) -> CallTrace | None:
        """A call at a door that is sampled; None for the others, and without a tracer."""
        if tracer is None:
            return None
        parent = parent_in(headers)
        context = tracer.begin(parent, door)
        return None if context is None else cls(tracer, context, parent, door)

    @property
    def trace_id(self) -> str:
        """In hexadecimal digits, for exemplars."""
        return f"{self._span.context.trace_id:032x}"

    def opens(self, request: GenerationRequest) -> None:
        """The request is read, and asks for admission."""
        if request.is_chat:
            self.operation = CHAT
        self.model = request.model
        streamed = any(item.config.output.stream for item in request.items)
        self._span.attributes.update(
            {
                "gen_ai.request.model": request.model,
                "gen_ai.request.stream": streamed,
                "gen_ai.response.id": request.request_id,
                "trtmesh.items": request.size,
            }
        )

    def began(self, model: str) -> None:
        """The request was admitted, for a model of the mesh."""
        self.model = self._span.attributes["gen_ai.response.model"] = model

    def item(self, item: ItemRequest) -> ItemTrace:
        return ItemTrace(self, self._span.child(self.named(self.operation)), item)

    def end(self, outcome: str, error: str) -> None:
        """The call ended: complete, refused, failed or cancelled; with the reason word of an error, if any."""
        self._span.name = self.named(self.operation)
        self._span.attributes["gen_ai.operation.name"] = self.operation
        self._span.attributes["trtmesh.outcome"] = outcome
        end(self.tracer, self._span, "" if outcome == "complete" else error or outcome.upper())

    def named(self, operation: str) -> str:
        return f"{operation} {self.model}".rstrip()


@dataclass(slots=True)
class LegTrace:
    """Some sequences of an item, or all, at a worker."""

    span: Span
    worker: str
    offsets: dict[int, int]
    """Tokens of each sequence at the start, by index; those that are still there."""
    offset: int
    """The least of them."""
    tokens: int = 0
    """Delivered by the worker."""
    reason: str = ""
    """Why the latest sequence left."""

    @property
    def traceparent(self) -> str:
        return str(self.span.context)


class ItemTrace:
    """The span of an item, with the stages and legs below."""

    def __init__(self, call: CallTrace, span: Span, item: ItemRequest) -> None:
        self._call, self._span, self._item = call, span, item
        self._stage: Span | None = None
        self._stage_name = ""
        self._placed: dict[str, Value] = {}
        """The latest decision."""
        self._legs: dict[int, LegTrace] = {}
        """The latest of each sequence, by index."""
        self._copies: dict[int, LegTrace] = {}
        """Those of second copies."""

    @property
    def traceparent(self) -> str:
        """For who works for the present stage."""
        return str((self._stage or self._span).context)

    def enters(self, stage: str) -> None:
        """The item enters a stage, or goes on with it."""
        if stage == self._stage_name:
            return
        self._end_stage()
        self._stage_name = stage
        if stage not in UNTOLD_STAGES:
            self._stage = self._span.child(self._call.named(SPAN_NAMES.get(stage, stage)))

    def _end_stage(self, error: str = "") -> None:
        if self._stage is not None:
            end(self._call.tracer, self._stage, error)
            self._stage = None

    def placed(self, cause: str, decision: Decision) -> None:
        """A worker was chosen for the next leg."""
        self._placed = {
            "trtmesh.placement.cause": cause,
            "trtmesh.placement.policy": decision.policy,
            "trtmesh.placement.workers": len(decision.fleet),
            "trtmesh.placement.cached_tokens": decision.query.cached_tokens.get(
                decision.chosen.address, 0
            ),
        }

    def leg(self, worker: str, tokens: Mapping[int, int]) -> LegTrace:
        """A leg that may begin, of sequences with so many tokens."""
        span = self._span.child(self._call.named("leg"))
        offset = min(tokens.values(), default=0)
        span.attributes.update(self._placed)
        span.attributes |= {
            "trtmesh.worker": worker,
            "trtmesh.offset": offset,
            "trtmesh.sequences": len(tokens),
        }
        return LegTrace(span, worker, dict(tokens), offset)

    def began(self, leg: LegTrace, *, by_handoff: bool) -> None:
        """The worker was told of a leg, and goes on from the sequences' former ones."""
        told = list[LegTrace]()
        for index, offset in leg.offsets.items():
            former = self._legs.get(index)
            self._legs[index] = leg
            if former is None:
                continue
            self._leave(former, index, offset, "left")
            if former not in told:
                told.append(former)
                self._goes_on(former, leg, "handoff" if by_handoff else "migrated")

    def copied(self, leg: LegTrace) -> None:
        """The worker was told of a leg that is a second copy."""
        for index in leg.offsets:
            if (former := self._legs.get(index)) is not None:
                leg.span.links.append(former.span.context)
            self._copies[index] = leg

    def _goes_on(self, former: LegTrace, leg: LegTrace, how: str) -> None:
        if former.span.context not in leg.span.links:
            leg.span.links.append(former.span.context)
        self._span.happened(
            how,
            time.time_ns(),
            **{"from": former.worker, "to": leg.worker},
            offset=leg.offset,
            reason=former.reason,
        )

    def left(self, runs: Sequence[SequenceRun], reason: str, error: TrtmeshError | None) -> None:
        """Sequences left their worker, because of its `error` if any."""
        for run in runs:
            if (leg := self._legs.get(run.sequence_index)) is not None:
                word = error.reason if error is not None else ""
                self._leave(leg, run.sequence_index, len(run.token_ids), reason, word)

    def _leave(self, leg: LegTrace, index: int, tokens: int, reason: str, error: str = "") -> None:
        """A sequence with so many tokens ends its leg, once."""
        offset = leg.offsets.pop(index, None)
        if offset is None:
            return
        leg.tokens += max(0, tokens - offset)
        leg.reason = reason
        leg.span.error = leg.span.error or error
        if not leg.offsets:
            leg.span.attributes |= {"trtmesh.tokens": leg.tokens, "trtmesh.end": reason}
            end(self._call.tracer, leg.span, leg.span.error)

    def switched(self, run: SequenceRun, lost: TrtmeshError | None) -> None:
        """A sequence goes on as its second copy."""
        index, copy = run.sequence_index, self._copies.pop(run.sequence_index, None)
        former = self._legs.get(index)
        if copy is None or former is None:
            return
        # As far as they are told.
        self._leave(former, index, len(run.token_ids), "hedged", lost.reason if lost else "")
        copy.offset = len(run.token_ids)
        self._legs[index] = copy
        self._goes_on(former, copy, "migrated")

    def dropped(self, run: SequenceRun, outcome: str) -> None:
        """A second copy was stopped."""
        index = run.sequence_index
        if (copy := self._copies.pop(index, None)) is not None:
            self._leave(copy, index, 0, outcome)

    def over(
        self,
        runs: Sequence[SequenceRun],
        usage: pb.Usage,
        reason: pb.FinishReason.ValueType,
        error: str,
        queue_seconds: float | None,
    ) -> None:
        """The item ended, with an error if it failed."""
        if not error and reason == pb.FINISH_REASON_CANCELLED:
            error = "CANCELLED"
        self._end_stage(error)
        for run in runs:
            self.dropped(run, "ended")
            if (leg := self._legs.get(run.sequence_index)) is not None:
                word = _word(run.reason)
                self._leave(leg, run.sequence_index, len(run.token_ids), word, error)
        self._tell_first_token(runs)
        self._span.attributes |= self._described(runs, usage, reason, queue_seconds)
        end(self._call.tracer, self._span, error)

    def _tell_first_token(self, runs: Sequence[SequenceRun]) -> None:
        first = min((run.times.first_token for run in runs if run.times.first_token), default=0.0)
        if not first:
            return
        ago = asyncio.get_running_loop().time() - first
        # The loop's clock stands still during a pass.
        at_ns = max(self._span.begin_ns, time.time_ns() - int(ago * 1e9))
        self._span.happened("first_token", at_ns)
        seconds = first - runs[0].times.arrival
        self._span.attributes |= {
            "gen_ai.response.time_to_first_chunk": seconds,
            "gen_ai.latency.time_to_first_token": seconds,
        }

    def _described(
        self,
        runs: Sequence[SequenceRun],
        usage: pb.Usage,
        reason: pb.FinishReason.ValueType,
        queue_seconds: float | None,
    ) -> dict[str, Value]:
        item, call = self._item, self._call
        told: dict[str, Value] = {
            "gen_ai.operation.name": call.operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": call.model,
            "gen_ai.response.model": call.model,
            "gen_ai.request.choice.count": item.sequences,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.generated_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_prompt_tokens,
            "gen_ai.usage.prompt_tokens": usage.prompt_tokens,
            "gen_ai.usage.completion_tokens": usage.generated_tokens,
            "gen_ai.latency.e2e": (time.time_ns() - self._span.begin_ns) / 1e9,
            "trtmesh.batch_index": item.batch_index,
        }
        for name, path in REQUESTED:
            if path in item.config.fields_set:
                group, field = path.split(".")
                value = getattr(getattr(item.config, group), field)
                # OTLP has no unsigned numbers.
                told[name] = value if abs(value) < 2**63 else str(value)
        if queue_seconds is not None:
            told["gen_ai.latency.time_in_queue"] = queue_seconds
        reasons = [_word(run.reason) for run in runs] or [_word(reason)]
        told["gen_ai.response.finish_reasons"] = reasons
        return told


def _word(reason: pb.FinishReason.ValueType) -> str:
    return pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
