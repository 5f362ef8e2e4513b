"""A step: decoding sequences as a captured graph, chunks of prompts as others, and all else operation by operation."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor
from trtmesh.engine.backends.torch.compute.device import Drafted, Forward
from trtmesh.engine.backends.torch.compute.runner import Runner
from trtmesh.engine.backends.torch.cuda.capturing import Rows
from trtmesh.engine.backends.torch.cuda.choice import GraphChoice, PickedChoice
from trtmesh.engine.backends.torch.cuda.chunk_graphs import ChunkGraphs
from trtmesh.engine.backends.torch.cuda.decode_graphs import DecodeGraphs
from trtmesh.engine.backends.torch.cuda.ruled_rows import RuledRows
from trtmesh.engine.backends.torch.cuda.run_graphs import RunGraphs
from trtmesh.engine.backends.torch.sampling.choice import Chooser, Ranking, TokenChoice
from trtmesh.engine.backends.torch.sampling.continuation import Continuation
from trtmesh.engine.backends.torch.sampling.filters import indexes
from trtmesh.engine.backends.torch.sequence import Chunk, Sequence


class GraphRunner:
    """Implements Compute."""

    def __init__(
        self,
        runner: Runner,
        graphs: DecodeGraphs,
        chunks: ChunkGraphs,
        runs: RunGraphs | None,
        rules: RuledRows,
        chooser: Chooser,
    ) -> None:
        """`runner` computes, and `chooser` chooses, all that no graph can. `runs` are for drafts; None without any."""
        self._runner = runner
        self._graphs = graphs
        self._chunks = chunks
        self._runs = runs
        # Those of the last step.
        self._own = graphs
        self._rules = rules
        self._chooser = chooser
        # Of the last step, where graphs computed any.
        self._rows: Rows | None = None
        self._decoded = 0
        """The leading rows, of the graphs of `follow`."""
        self._completing: list[Chunk] = []
        # The places of the last choice.
        self._chosen: SequenceOf[int] = ()
        self.may_follow = False
        self.captured_steps = 0
        self.move = runner.move
        self.synchronize = runner.synchronize
        self.check = runner.check
        self.release_memory = runner.release_memory

    @property
    def most_run_tokens(self) -> int | None:
        return self._runs.most_rows if self._runs and self._runs.are_captured else None

    def forward(
        self, chunks: SequenceOf[Chunk], written: Callable[[int], None] | None = None
    ) -> Forward:
        self._rows, self.may_follow = None, False
        decoding = self._decoding(chunks)
        taken = {chunk.sequence.key for chunk in decoding}
        prefilling = [chunk for chunk in chunks if chunk.sequence.key not in taken]
        batch = None
        if prefilling and not self._chunks.takes(prefilling):
            # Before any launch, for whose end its copies to the device would wait.
            batch = self._runner.prepare(prefilling)
        self._decoded = len(decoding)
        self._own, rows, drafted = self._graphs, None, list[Drafted]()
        if self._runs and any(chunk.drafts for chunk in decoding):
            self._own = self._runs
            rows, drafted = self._runs.launch_runs(decoding)
        elif decoding:
            rows = self._graphs.launch(decoding)
        if batch:
            rest = self._runner.compute(batch, written)
            if rows is None:
                return rest
            logits = torch.cat((rows.logits.float(), rest.logits))
            self._rows = Rows(logits, rows.tokens, rows.log_probs)
            self._completing = decoding + rest.completing
            return Forward(self._completing, logits, rest.given, [*drafted, *rest.drafted])
        self.captured_steps += 1
        completing = [chunk for chunk in prefilling if chunk.completes]
        if prefilling:
            rows = self._own.with_more(rows, self._chunks.launch(prefilling))
        assert rows
        self._rows, self._completing = rows, decoding + completing
        return Forward(self._completing, rows.logits, [], drafted)

    def _decoding(self, chunks: SequenceOf[Chunk]) -> list[Chunk]:
        """The chunks for the graphs of decode steps, or of new tokens with drafts where these have room."""
        graphs = self._graphs
        if self._runs and any(chunk.drafts for chunk in chunks):
            rows = sum(chunk.count for chunk in chunks if self._runs.takes(chunk))
            if rows <= self._runs.most_rows:
                graphs = self._runs
        return [chunk for chunk in chunks if graphs.takes(chunk)]

    def follow(self, chunks: SequenceOf[Chunk], rows: SequenceOf[int]) -> Forward:
        # Other ranks than the first choose nothing: theirs are the rows of the graphs.
        places = [self._chosen[row] for row in rows] if self._chosen else rows
        self._rows, self.may_follow = self._graphs.follow(chunks, places), False
        self._own = self._graphs
        self._completing, self._decoded = list(chunks), len(chunks)
        self.captured_steps += 1
        return Forward(self._completing, self._rows.logits, [])

    def can_follow(self, chunk: Chunk) -> bool:
        return self._graphs.takes(chunk)

    def awaits(self, sequences: SequenceOf[Sequence]) -> bool:
        found = self._rules.find(list(sequences))
        return bool(found.by_host or found.guided)

    @torch.inference_mode()
    def choose(self, sequences: SequenceOf[Continuation], logits: Tensor) -> TokenChoice:
        self.may_follow = False
        places = self._places(sequences, logits)
        if self._rows is None or places is None:
            return self._chooser.choose(sequences, logits.float())
        own = [self._completing[place].sequence for place in places]
        tokens, log_probs, count = self._rows.tokens, self._rows.log_probs, len(self._rows.tokens)
        found = self._rules.find(own)
        late = [row for row in found.guided if places[row] < self._decoded]
        beyond = [row for row, place in enumerate(places) if place >= count]
        rest = sorted({*found.by_host, *found.guided, *beyond}.difference(late))
        if late:
            rows = [places[row] for row in late]
            guided = self._own.choose_guided(rows, [own[row] for row in late])
            log_probs = _with_rows(log_probs, guided, rows, count)
        # After drafts, the last tokens are not in the rows of their sequences.
        follows = self._own is self._graphs and self._graphs.are_captured
        if self._graphs.are_shared:
            follows = follows and places == range(count)
        self._chosen, self.may_follow = places, follows
        choice = None
        if rest:
            # A copy of a graph's logits, which the next step overwrites.
            part = logits[indexes(rest, logits)].float()
            choice = self._chooser.choose([sequences[row] for row in rest], part)
            there = [places[row] for row in rest]
            are_there = follows and max(there) < count
            self.may_follow = are_there and self._graphs.take(there, choice.ids)
        return GraphChoice(own, places, tokens, log_probs, rest, choice)

    def verify(self, drafted: SequenceOf[Drafted], position: int) -> TokenChoice:
        picked: list[tuple[TokenChoice, int]] = []
        rest = [each for each in drafted if each.chosen is None]
        if rest:
            rows = torch.stack([each.logits[position] for each in rest])
            choice = self._chooser.choose([each.chunk.sequence for each in rest], rows.float())
        places = iter(range(len(rest)))
        for each in drafted:
            if each.chosen:
                picked.append((each.chosen[0], each.chosen[1] + position))
            else:
                picked.append((choice, next(places)))
        return PickedChoice(picked)

    def _places(
        self, sequences: SequenceOf[Continuation], logits: Tensor
    ) -> SequenceOf[int] | None:
        """The rows of the last step with these sequences, a range for all of them; None where others are meant."""
        if self._rows is not None and logits is self._rows.logits:
            return range(len(sequences))
        known = {id(chunk.sequence): place for place, chunk in enumerate(self._completing)}
        if any(id(sequence) not in known for sequence in sequences):
            return None
        return [known[id(sequence)] for sequence in sequences]

    def rank(self, lanes: SequenceOf[Continuation], logits: Tensor) -> Ranking:
        # The next step overwrites a graph's logits.
        is_graphs = self._rows is not None and logits is self._rows.logits
        return self._chooser.rank(lanes, logits.to(torch.float32, copy=is_graphs))


def _with_rows(
    log_probs: Tensor | None, found: Tensor | None, rows: SequenceOf[int], count: int
) -> Tensor | None:
    """The log-probabilities of a step's `count` rows, those in `rows` from another launch."""
    if found is None:
        return log_probs
    if log_probs is None:
        return found[:count]
    if log_probs.data_ptr() != found.data_ptr():
        log_probs[indexes(rows, found)] = found[indexes(rows, found)]
    return log_probs
