"""The steps of a loaded model: schedule, compute, choose, advance. Everything here runs on the engine's thread."""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Iterable
from itertools import count

from torch import Tensor
from trtmesh.chassis.errors import BackendFailed, TrtmeshError
from trtmesh.engine.backend import SequenceEnd, StepOutput
from trtmesh.engine.backends.torch.kvcache import KvCache
from trtmesh.engine.backends.torch.prompt_table import Embedding
from trtmesh.engine.backends.torch.readers import reader_for
from trtmesh.engine.backends.torch.runner import Runner
from trtmesh.engine.backends.torch.sampling import Choice, choose
from trtmesh.engine.backends.torch.scheduler import Chunk, Scheduler
from trtmesh.engine.backends.torch.sequence import Sequence
from trtmesh.v1 import generation_pb2 as pb

FATAL_STEPS = 2
"""Steps in a row that could compute nothing at all, after which the fault is not one of the items."""

log = logging.getLogger(__name__)


class Engine:
    """Owns the sequences. A sequence's blocks are free before its end is handed out."""

    def __init__(
        self, runner: Runner, cache: KvCache, scheduler: Scheduler, embedding: Embedding
    ) -> None:
        self.scheduler = scheduler
        self.embedding = embedding
        self.step_count = 0
        self.generated_tokens = 0
        self._runner = runner
        self._cache = cache
        self._ends: list[SequenceEnd] = []
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._numbers = count()
        self._failed_steps = 0

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Takes the sequences of an item; one that was generated to its end elsewhere ends at once."""
        for sequence in sequences:
            sequence.reader = reader_for(sequence)
            self.scheduler.add(sequence, self.step_count)
            end = sequence.rule.end_after(sequence.tokens) if sequence.generated_tokens else None
            if end:
                self._end(sequence, *end)
            elif sequence.deadline is not None:
                entry = (sequence.deadline, next(self._numbers), sequence)
                heapq.heappush(self._deadlines, entry)

    def stop(self, keys: Iterable[int], reason: int) -> None:
        """Ends sequences; a key that is unknown or over is ignored."""
        for key in keys:
            sequence = self.scheduler.find(key)
            if sequence:
                self._end(sequence, reason)

    def stop_all(self, reason: int) -> None:
        self.stop([sequence.key for sequence in self.scheduler.sequences], reason)

    def fail_all(self, error: BackendFailed) -> None:
        for sequence in self.scheduler.sequences:
            self._fail(sequence, error)

    def end_overdue(self) -> None:
        """Ends the sequences whose deadline has passed."""
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            sequence = heapq.heappop(self._deadlines)[2]
            if self.scheduler.find(sequence.key) is sequence:
                self._end(sequence, pb.FINISH_REASON_CANCELLED)

    def take_ends(self) -> StepOutput | None:
        """What ended between steps, if anything did."""
        return self._output() if self._ends else None

    def step(self) -> StepOutput:
        """Computes one step and tells what it made known."""
        chunks = self.scheduler.schedule()
        self._cache.carry_out(self.scheduler.pool.take_moves())
        results = self._compute(chunks) if chunks else []
        self.step_count += 1
        output = StepOutput(self.step_count)
        failed = self._read(chunks, output)
        for completing, logits in results:
            if logits is None:
                continue
            rows = [row for row, chunk in enumerate(completing) if chunk.sequence not in failed]
            if len(rows) < len(completing):
                logits = logits[rows]  # noqa: PLW2901 - without the rows of failed sequences
            if rows:
                self._choose([completing[row].sequence for row in rows], logits, output)
        return self._output(output)

    def _output(self, output: StepOutput | None = None) -> StepOutput:
        output = output or StepOutput(self.step_count)
        output.ends, self._ends = self._ends, []
        output.kv_events = self.scheduler.pool.take_events()
        return output

    def _compute(self, chunks: list[Chunk]) -> list[tuple[list[Chunk], Tensor | None]]:
        """Completing chunks with their logits; where computing all at once fails, each is tried on its own."""
        try:
            results = [self._runner.compute(chunks)]
        except Exception:
            log.exception("a step of %d sequences failed; trying each alone", len(chunks))
            results = self._compute_alone(chunks)
        else:
            for chunk in chunks:
                self.scheduler.computed(chunk)
        if results:
            self._failed_steps = 0
            return results
        self._failed_steps += 1
        if self._failed_steps >= FATAL_STEPS:
            raise BackendFailed(f"{self._failed_steps} steps in a row could compute no sequence")
        return []

    def _compute_alone(self, chunks: list[Chunk]) -> list[tuple[list[Chunk], Tensor | None]]:
        results = []
        for chunk in chunks:
            try:
                results.append(self._runner.compute([chunk]))
            except Exception as error:  # noqa: BLE001 - whatever it is, it ends this sequence alone
                self._fail(chunk.sequence, BackendFailed(f"the model failed: {error}"))
            else:
                self.scheduler.computed(chunk)
        return results

    def _read(self, chunks: list[Chunk], output: StepOutput) -> list[Sequence]:
        """Reads what was asked of the tokens given, before the next one is chosen; gives the sequences that failed."""
        failed = []
        for chunk in chunks:
            reader = chunk.sequence.reader
            if reader is None or chunk.given_logits is None:
                continue
            try:
                output.prompts += reader.read(chunk.given_logits)
            except Exception as error:
                log.exception("logits could not be read")
                failed.append(chunk.sequence)
                self._fail(
                    chunk.sequence, BackendFailed(f"the prompt's logits cannot be read: {error}")
                )
            if reader.next >= reader.end:
                chunk.sequence.reader = None
        return failed

    def _choose(self, sequences: list[Sequence], logits: Tensor, output: StepOutput) -> None:
        """Chooses and appends tokens; where that fails for all at once, each is tried on its own."""
        try:
            choice = choose(sequences, logits)
        except Exception as error:
            if len(sequences) == 1:
                log.exception("no token could be chosen")
                self._fail(sequences[0], BackendFailed(f"no token could be chosen: {error}"))
                return
            for row, sequence in enumerate(sequences):
                self._choose([sequence], logits[row : row + 1], output)
            return
        self._advance(sequences, choice, output)

    def _advance(self, sequences: list[Sequence], choice: Choice, output: StepOutput) -> None:
        """Gives each sequence its token, and ends those for which it was the last."""
        now = time.time_ns()
        for row, sequence in enumerate(sequences):
            if row in choice.failures:
                self._fail(sequence, choice.failures[row])
                continue
            token = choice.token_ids[row]
            output.keys.append(sequence.key)
            output.token_offsets.append(sequence.generated_tokens)
            output.token_counts.append(1)
            output.token_ids.append(token)
            sequence.append(token, now)
            self.generated_tokens += 1
            details = choice.details.get(row)
            if details:
                details.cumulative_log_prob = sequence.add_log_probs(details.log_probs)
                output.details.append(details)
            end = sequence.rule.end_after(sequence.tokens)
            if end:
                self._end(sequence, *end)

    def _end(self, sequence: Sequence, reason: int, stop_token_ids: tuple[int, ...] = ()) -> None:
        end = sequence.end(reason, stop_token_ids)
        self.scheduler.remove(sequence)
        self._ends.append(end)

    def _fail(self, sequence: Sequence, error: TrtmeshError) -> None:
        end = sequence.end(pb.FINISH_REASON_ERROR, error=error)
        self.scheduler.remove(sequence, content_is_good=False)
        self._ends.append(end)
