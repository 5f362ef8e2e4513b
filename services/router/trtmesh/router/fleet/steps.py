"""Distributes a worker's steps to the sequences."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trtmesh.chassis.error_wire import from_proto
from trtmesh.router.fleet.assignments import Assignments
from trtmesh.router.links.contract import ContractBroken
from trtmesh.router.metrics import ModelMetrics, RouterMetrics
from trtmesh.router.placement.load_guard import LoadGuard
from trtmesh.router.streams.sequence import End, SequenceRun
from trtmesh.v1 import engine_pb2 as pb

UNACKNOWLEDGED_STEPS = 4
"""Most steps in flight. Few, because held-back tokens merge at the worker, while each step in flight adds latency."""

ACKNOWLEDGE_EVERY = 2
"""Steps per acknowledgement, since a write costs as much as several tokens."""

LARGE_STEP_TOKENS = 2**14
"""Tokens of a step beyond which its counts are added up before they are read."""

MOST_UNASKED_TOKENS = 2**12
"""Most tokens of a sequence in a large step, if this router does not wait for it any more."""


@dataclass(slots=True)
class Steps:
    """Reads and acknowledges the steps of a worker."""

    _assignments: Assignments
    _guard: LoadGuard
    _metrics: RouterMetrics
    _send: Callable[[pb.EngineCommand], None]
    _received: int = 0
    most_tokens: int = sys.maxsize
    """Most tokens of a sequence of the worker."""

    def opened(self) -> None:
        """Starts counting on a new stream."""
        self._received = 0

    def distribute(self, step: pb.Step) -> None:
        """Hands new tokens to each sequence. Hot: no per-token objects, no logging. Raises ContractBroken."""
        sequences = self._assignments.sequences
        _check_step(step, sequences, self.most_tokens)
        details = {each.handle: each.details for each in step.details} if step.details else {}
        for prompt in step.prompts:
            if (run := sequences.get(prompt.handle)) is not None:
                run.on_prompt(prompt.details)
        for start in step.starts:
            if (run := sequences.get(start.handle)) is not None:
                run.on_start(start.perf_metrics)
        now = asyncio.get_running_loop().time()
        awaiting = self._guard.awaiting
        metrics: ModelMetrics | None = None
        token_ids = list(step.token_ids)
        position = 0
        for handle, offset, count in zip(
            step.handles, step.token_offsets, step.token_counts, strict=True
        ):
            if awaiting and (booking := awaiting.pop(handle, None)) is not None:
                booking.started(now)
            run = sequences.get(handle)
            if run is not None:
                run.on_tokens(offset, token_ids[position : position + count], details.get(handle))
                if metrics is None:
                    # A worker serves one model.
                    metrics = self._metrics.of(run.model)
                run.times.on_tokens(count, now, metrics)
                if run.charge is not None:
                    run.charge.up_to(len(run.token_ids), now)
            position += count
        for end in step.ends:
            if (run := sequences.get(end.handle)) is not None:
                run.check_end(end)
            ended = _end_of(end)
            if (run := self._assignments.ended(end.handle, ended.error, now)) is not None:
                run.on_end(ended)
        self._acknowledge()

    def _acknowledge(self) -> None:
        self._received += 1
        if self._received % ACKNOWLEDGE_EVERY == 0:
            acknowledge = pb.AcknowledgeCommand(received_steps=self._received)
            self._send(pb.EngineCommand(acknowledge=acknowledge))


def _end_of(end: pb.SequenceEnd) -> End:
    return End(
        reason=end.reason,
        error=from_proto(end.error) if end.HasField("error") else None,
        cached_prompt_tokens=end.cached_prompt_tokens,
        stop_token_ids=tuple(end.stop_token_ids),
        cumulative_log_prob=(
            end.cumulative_log_prob if end.HasField("cumulative_log_prob") else None
        ),
        perf_metrics=end.perf_metrics if end.HasField("perf_metrics") else None,
        handoff=end.handoff if end.HasField("handoff") else None,
    )


def _check_step(step: pb.Step, sequences: Mapping[int, SequenceRun], most_tokens: int) -> None:
    """Raises ContractBroken unless the lists of a step fit each other, and a large one the sequences of a worker, which
    have at most `most_tokens`."""
    tokens = len(step.token_ids)
    lengths = {len(step.handles), len(step.token_offsets), len(step.token_counts)}
    if len(lengths) > 1 or sum(step.token_counts) != tokens:
        raise ContractBroken(
            f"a step has {len(step.handles)} handles, {len(step.token_offsets)} offsets,"
            f" {len(step.token_counts)} counts and {tokens} tokens"
        )
    if tokens > LARGE_STEP_TOKENS:
        for handle, count in zip(step.handles, step.token_counts, strict=True):
            run = sequences.get(handle)
            most = min(run.most_tokens, most_tokens) if run is not None else MOST_UNASKED_TOKENS
            if count > most:
                raise ContractBroken(f"a step has {count} tokens of a sequence of at most {most}")
