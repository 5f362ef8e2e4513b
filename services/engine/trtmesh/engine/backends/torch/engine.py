"""The steps of a loaded model: schedule, compute, choose, advance. Everything here runs on the engine's thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

import torch
from torch import Tensor
from trtmesh.chassis.errors import BackendFailed, TrtmeshError
from trtmesh.chassis.logs import request_id_bound
from trtmesh.engine.backend import SequenceEnd, StepOutput
from trtmesh.engine.backends.torch.beams.item import BeamItem
from trtmesh.engine.backends.torch.compute.forwards import Forwards
from trtmesh.engine.backends.torch.memory.kvcache import KvCache
from trtmesh.engine.backends.torch.model.prompt_table import Embedding, PromptTable
from trtmesh.engine.backends.torch.sampling.choice import Choice, choose, search_log_probs
from trtmesh.engine.backends.torch.sampling.details import told_beside
from trtmesh.engine.backends.torch.sampling.readers import reader_for
from trtmesh.engine.backends.torch.scheduling.chunk import Chunk
from trtmesh.engine.backends.torch.scheduling.deadlines import Deadlines
from trtmesh.engine.backends.torch.scheduling.forks import Pairs
from trtmesh.engine.backends.torch.scheduling.scheduler import Scheduler
from trtmesh.engine.backends.torch.scheduling.sequence import Sequence
from trtmesh.v1 import generation_pb2 as pb

log = logging.getLogger(__name__)


class Engine:
    """Owns the sequences. A sequence's blocks are free before its end is handed out."""

    def __init__(
        self, forwards: Forwards, cache: KvCache, scheduler: Scheduler, embedding: Embedding
    ) -> None:
        self.scheduler = scheduler
        self.embedding = embedding
        self.step_count = 0
        self.generated_tokens = 0
        self._forwards = forwards
        self._cache = cache
        # What became known between steps: ends, and of searches what these had yet to tell.
        self._between = StepOutput(0)
        self._deadlines = Deadlines(self._lives)
        # Under the keys of their sequences that come back, and under those of their lanes.
        self._searches: dict[int, BeamItem] = {}
        self._lanes: dict[int, BeamItem] = {}

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def device_memory_bytes(self) -> int:
        """What tensors hold on the device; 0 where that is the host."""
        device = self._cache.pool.device
        return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

    @property
    def pinned_memory_bytes(self) -> int:
        """The cache in the host's memory, where the device copies by itself."""
        return self._cache.host.nbytes if self._cache.pool.device.type == "cuda" else 0

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Takes the sequences of an item; one that was generated to its end elsewhere ends at once."""
        for sequence in sequences:
            sequence.reader = reader_for(sequence)
            self.scheduler.add(sequence, self.step_count)
            end = sequence.rule.end_after(sequence.tokens) if sequence.generated_tokens else None
            if end:
                self._end(sequence, *end)
            else:
                self._deadlines.add(sequence, len(self.scheduler.sequences))

    def add_beams(self, item: BeamItem) -> None:
        """Takes an item under beam search."""
        self._searches.update(dict.fromkeys(item.keys, item))
        for lane in item.lanes:
            lane.reader = reader_for(lane)
            self._lanes[lane.key] = item
            self.scheduler.add(lane, self.step_count)
        self._deadlines.add(item.first, len(self.scheduler.sequences))

    def prepared(self, sequences: Iterable[Sequence], table: PromptTable | TrtmeshError) -> None:
        """Lets sequences of an item start, as far as they live, with their prompt table; or says what is wrong with
        it."""
        for sequence in sequences:
            # Lanes of one search fail together.
            if not self._lives(sequence):
                continue
            if isinstance(table, TrtmeshError):
                self._fail(sequence, table)
            else:
                sequence.give_table(table)
                self.scheduler.ready(sequence)

    def stop(self, keys: Iterable[int], reason: int) -> None:
        """Ends sequences, of a beam search all with any; a key that is unknown or over is ignored."""
        for key in keys:
            search = self._searches.get(key)
            sequence = self.scheduler.find(key)
            if search:
                search.tell_all(self._between)
                self._end_search(search, search.broken_off(reason))
            elif sequence:
                self._end(sequence, reason)

    def stop_all(self, reason: int) -> None:
        self.stop([sequence.key for sequence in self.scheduler.sequences], reason)

    def fail_all(self, error: TrtmeshError) -> None:
        for sequence in self.scheduler.sequences:
            if self._lives(sequence):
                self._fail(sequence, error)

    def end_overdue(self) -> None:
        """Ends the sequences whose deadline has passed."""
        overdue = self._deadlines.take(time.monotonic())
        self.stop([sequence.key for sequence in overdue], pb.FINISH_REASON_CANCELLED)

    def take_ends(self) -> StepOutput | None:
        """What ended between steps, if anything did."""
        return self._output(self._begin_output()) if self._between.ends else None

    def step(self) -> StepOutput:
        """Computes one step and tells what it made known. Raises BackendFailed once the model was found broken."""
        chunks = self.scheduler.schedule()
        self._cache.carry_out(self.scheduler.pool.take_moves())
        forward = self._forwards.compute(chunks)
        for chunk in forward.computed:
            self.scheduler.computed(chunk)
        for chunk, failure in forward.failures:
            # Lanes of one search fail together.
            if self._lives(chunk.sequence):
                self._blame(chunk.sequence, failure)
        self.step_count += 1
        output = self._begin_output()
        self._read(chunks, output)
        for completing, logits in forward.results:
            if logits is None:
                continue
            # What could not be read has failed, and its mates with it.
            rows = [row for row, chunk in enumerate(completing) if self._lives(chunk.sequence)]
            if len(rows) < len(completing):
                logits = logits[rows]  # noqa: PLW2901 - without the rows of failed sequences
            if rows:
                self._continue([completing[row].sequence for row in rows], logits, output)
        return self._output(output)

    def _begin_output(self) -> StepOutput:
        """Of what became known between steps; what ends from here on joins it in `_output`."""
        output, self._between = self._between, StepOutput(0)
        output.step_count = self.step_count
        return output

    def _output(self, output: StepOutput) -> StepOutput:
        output.ends += self._between.ends
        self._between = StepOutput(0)
        output.kv_events = self.scheduler.pool.take_events()
        return output

    def _blame(self, sequence: Sequence, error: TrtmeshError) -> None:
        """Ends a sequence for its own fault. Where the model is broken it stays, and the next step says so."""
        if not (isinstance(error, BackendFailed) and self._forwards.is_broken()):
            self._fail(sequence, error)

    def _lives(self, sequence: Sequence) -> bool:
        return self.scheduler.find(sequence.key) is sequence

    def _read(self, chunks: list[Chunk], output: StepOutput) -> None:
        """Reads what was asked of the tokens given, before the next one is chosen."""
        for chunk in chunks:
            reader = chunk.sequence.reader
            if reader is None or chunk.given_logits is None or not self._lives(chunk.sequence):
                continue
            try:
                output.prompts += reader.read(chunk.given_logits)
            except Exception as error:  # noqa: BLE001 - it ends this item alone
                self._give_up(chunk.sequence, "the prompt's logits cannot be read", error)
            if reader.next >= reader.end:
                chunk.sequence.reader = None

    def _continue(self, sequences: list[Sequence], logits: Tensor, output: StepOutput) -> None:
        """Gives each sequence what comes next: a token, or to a lane the beam that it holds from now on."""
        lanes = [row for row, sequence in enumerate(sequences) if sequence.key in self._lanes]
        if not lanes:
            self._choose(sequences, logits, output)
            return
        others = [row for row, sequence in enumerate(sequences) if sequence.key not in self._lanes]
        if others:
            self._choose([sequences[row] for row in others], logits[others], output)
        self._search([sequences[row] for row in lanes], logits[lanes], output)

    def _search(self, lanes: list[Sequence], logits: Tensor, output: StepOutput) -> None:
        """Lets the searches go on for which everything is there; where that fails, each lane is tried on its own."""
        try:
            log_probs, failures = search_log_probs(lanes, logits)
        except Exception as error:  # noqa: BLE001 - it ends this item alone
            if len(lanes) == 1:
                self._give_up(lanes[0], "the beam search has no log-probabilities", error)
                return
            for row, lane in enumerate(lanes):
                if lane.key in self._lanes:
                    self._search([lane], logits[row : row + 1], output)
            return
        for row, lane in enumerate(lanes):
            item = self._lanes.get(lane.key)
            if item is None:  # Another lane of it has failed.
                continue
            if row in failures:
                self._blame(lane, failures[row])
                continue
            try:
                beside = told_beside(lane, log_probs[row], logits[row : row + 1])
                if not item.take(lane, log_probs[row], beside):
                    continue
                pairs = item.advance(time.time_ns())
            except Exception as error:  # noqa: BLE001 - it ends this item alone
                self._give_up(lane, "the beam search cannot go on", error)
                continue
            self._go_on(item, pairs, output)

    def _go_on(self, item: BeamItem, pairs: Pairs, output: StepOutput) -> None:
        # Not guarded: the pool is everybody's, so with its counts half changed nobody may go on.
        self.scheduler.reassign(pairs)
        self.generated_tokens += len(item.lanes)
        try:
            item.tell(output)
            ends = item.ends() if item.over else None
        except Exception as error:  # noqa: BLE001 - it ends this item alone
            self._give_up(item.first, "the beam search cannot be told", error)
            return
        if ends is not None:
            self._end_search(item, ends)

    def _choose(self, sequences: list[Sequence], logits: Tensor, output: StepOutput) -> None:
        """Chooses and appends tokens; where that fails for all at once, each is tried on its own."""
        try:
            choice = choose(sequences, logits)
        except Exception as error:  # noqa: BLE001 - it ends this item alone
            if len(sequences) == 1:
                self._give_up(sequences[0], "no token could be chosen", error)
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
                self._blame(sequence, choice.failures[row])
                continue
            try:
                sequence.tell_next(choice.token_ids[row], choice.details.get(row), output, now)
                self.generated_tokens += 1
                end = sequence.rule.end_after(sequence.tokens)
            except Exception as error:  # noqa: BLE001 - it ends this item alone
                self._give_up(sequence, "a token could not be appended", error)
                continue
            if end:
                self._end(sequence, *end)

    def _end(self, sequence: Sequence, reason: int, stop_token_ids: tuple[int, ...] = ()) -> None:
        end = sequence.end(reason, stop_token_ids)
        self.scheduler.remove(sequence)
        self._between.ends.append(end)

    def _end_search(
        self, item: BeamItem, ends: list[SequenceEnd], *, content_is_good: bool = True
    ) -> None:
        for key in item.keys:
            del self._searches[key]
        for lane in item.lanes:
            del self._lanes[lane.key]
            self.scheduler.remove(lane, content_is_good=content_is_good)
        self._between.ends += ends

    def _give_up(self, sequence: Sequence, what: str, error: Exception) -> None:
        """Ends a sequence that `what` is true of because of `error`."""
        with request_id_bound(sequence.request_id):
            log.error("item %d: %s", sequence.batch_index, what, exc_info=error)
        self._blame(sequence, BackendFailed(f"{what}: {error}"))

    def _fail(self, sequence: Sequence, error: TrtmeshError) -> None:
        item = self._lanes.get(sequence.key)
        if item:
            ends = item.broken_off(pb.FINISH_REASON_ERROR, error)
            self._end_search(item, ends, content_is_good=False)
            return
        end = sequence.end(pb.FINISH_REASON_ERROR, error=error)
        self.scheduler.remove(sequence, content_is_good=False)
        self._between.ends.append(end)
