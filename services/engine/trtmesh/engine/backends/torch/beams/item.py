"""An item under beam search: its beams as sequences of the scheduler, and its results as they change.

A lane is a sequence that holds the KV of one beam. There are as many lanes as the search is wide, from the start,
admitted and paused only together; a lane that no beam needs repeats the first. After each step a beam that lives on
keeps its lane, and a further beam that grew from it takes over a lane whose own beam died: all full blocks are shared
then, and the last one is copied. All lanes have equally many tokens, so this never needs a block more.

What is told is how the best sequences stand, best first. One that only grew is told by its new tokens; any other is
told again from its first, which replaces what was told. With logits, which are too large for that, everything is told
once, when the search is over or broken off. The search depends on nothing but the item, so where it has to begin
again, on another worker, it comes to the same.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trtmesh.chassis.errors import InvalidRequest, TrtmeshError
from trtmesh.chassis.vocabulary import Tensor as TensorValue
from trtmesh.engine.backend import SequenceEnd, SequenceStart, StepOutput, TokenDetails
from trtmesh.engine.backends.torch.beams.search import Beside, Hypothesis, Search
from trtmesh.engine.backends.torch.scheduling.sequence import Sequence
from trtmesh.engine.backends.torch.stopping import End
from trtmesh.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from torch import Tensor

Pairs = list[tuple[Sequence, Sequence]]


@dataclass(frozen=True, slots=True)
class _Row:
    """What comes after the first `length` tokens of a lane."""

    length: int
    log_probs: Tensor
    beside: Beside


class BeamItem:
    """The search of one item, over the log-probabilities that its lanes yield."""

    def __init__(self, keys: SequenceOf[int], lanes: SequenceOf[Sequence]) -> None:
        """`keys` name the sequences that come back; `lanes` are new, and the first has the first key."""
        first = lanes[0]
        self.keys = tuple(keys)
        self.lanes = list(lanes)
        self.first = first
        self._search = Search(
            first.config.beam_search,
            most_tokens=first.rule.limit - first.prompt_tokens,
            ending_tokens=first.rule.ending_tokens,
        )
        self._beams = [0] * len(lanes)
        """Which running beam each lane holds."""
        self._rows: dict[int, _Row] = {}
        self._told: list[list[int]] = [[] for _ in keys]
        self._mates = list(lanes)
        for lane in lanes:
            lane.mates = self._mates
            lane.times = first.times
            lane.leader = None if lane is first else first

    @property
    def over(self) -> bool:
        return self._search.over

    def take(self, lane: Sequence, log_probs: Tensor, beside: Beside) -> bool:
        """Takes what comes after a lane's tokens, [vocabulary], and what is told of it.

        Returns whether that of every lane is there now.
        """
        self._rows[lane.key] = _Row(lane.length, log_probs, beside)
        if all(map(self._is_there, self.lanes)):
            return True
        # Kept for as long as a lane is paused; a view would keep the rows of the whole step.
        self._rows[lane.key] = _Row(lane.length, log_probs.clone(), beside)
        return False

    def _is_there(self, lane: Sequence) -> bool:
        """Whether the row of a lane is that of its tokens; one that was paused is computed again and gives it again."""
        row = self._rows.get(lane.key)
        return row is not None and row.length == lane.length == lane.num_computed and lane.slot >= 0

    def advance(self, now_ns: int) -> Pairs:
        """One step of the search; returns which lanes are to go on from the KV of which."""
        holders = [self._beams.index(beam) for beam in range(len(self._search.running))]
        rows = [self._rows[self.lanes[lane].key] for lane in holders]
        self._rows.clear()
        log_probs = rows[0].log_probs.new_empty((len(rows), len(rows[0].log_probs)))
        for place, row in enumerate(rows):
            log_probs[place] = row.log_probs
        parents = self._search.advance(log_probs, self._end_after, [row.beside for row in rows])
        times = self.first.times
        times.first_token_ns = times.first_token_ns or now_ns
        times.last_token_ns = now_ns
        return [] if self.over else self._place(parents)

    def tell(self, output: StepOutput) -> None:
        """Adds what changed of the sequences that come back in a step."""
        if self.over or not self.first.token_rules.output.generation_logits:
            self.tell_all(output)

    def tell_all(self, output: StepOutput) -> None:
        """Adds what was not told of the sequences that come back."""
        for place, beam in enumerate(self._search.best()[: len(self.keys)]):
            told, tokens = self._told[place], beam.tokens
            if told == tokens:
                continue
            offset = len(told) if tokens[: len(told)] == told else 0
            self._told[place] = tokens
            if not told and self.first.config.output.perf_metrics:
                start = SequenceStart(self.keys[place], self.first.times.metrics_at_start())
                output.starts.append(start)
            output.keys.append(self.keys[place])
            output.token_offsets.append(offset)
            output.token_counts.append(len(tokens) - offset)
            output.token_ids += tokens[offset:]
            if self.first.token_rules.wants_details:
                output.details.append(self._details(self.keys[place], beam, offset))

    def ends(self) -> list[SequenceEnd]:
        """How the sequences ended, once the search is over."""
        ends = []
        best = self._search.best()
        for place, key in enumerate(self.keys):
            if place < len(best):
                beam = best[place]
                reason, words = beam.end or (pb.FINISH_REASON_LENGTH, ())
                ends.append(self._end(key, len(beam.tokens), reason, words, beam.total))
            else:
                error = InvalidRequest(
                    f"only {len(best)} sequences are left to find: bad_token_ids, no_repeat_ngram_size,"
                    " embedding_bias and min_tokens together forbid all others; forbid less, or lower"
                    " beam_search.beam_width"
                )
                ends.append(self._end(key, 0, pb.FINISH_REASON_ERROR, error=error))
        return ends

    def broken_off(self, reason: int, error: TrtmeshError | None = None) -> list[SequenceEnd]:
        """The ends of all sequences, as far as they were told."""
        return [
            self._end(key, len(told), reason, error=error)
            for key, told in zip(self.keys, self._told, strict=True)
        ]

    def _end_after(self, beam: Hypothesis, token: int) -> End | None:
        lane = self.lanes[self._beams.index(self._search.running.index(beam))]
        lane.tokens.append(token)
        end = lane.rule.end_after(lane.tokens)
        lane.tokens.pop()
        return end

    def _place(self, parents: SequenceOf[int]) -> Pairs:
        """Gives every beam that now runs a lane."""
        wanted = [*enumerate(parents)]
        wanted += [(0, parents[0])] * (len(self.lanes) - len(parents))
        free = dict(enumerate(self._beams))
        sources = {beam: self.lanes[lane] for lane, beam in reversed(free.items())}
        beams, homeless = list(self._beams), []
        for beam, parent in wanted:
            lane = next((lane for lane, held in free.items() if held == parent), None)
            if lane is None:
                homeless.append((beam, parent))
                continue
            del free[lane]
            beams[lane] = beam
            self.lanes[lane].tokens.append(self._search.running[beam].tokens[-1])
        pairs = []
        for (beam, parent), lane in zip(homeless, free, strict=True):
            beams[lane] = beam
            pairs.append((self.lanes[lane], sources[parent]))
            self._rewrite(self.lanes[lane], self._search.running[beam])
        self._beams = beams
        kept = {source.key: (source, source) for _, source in pairs}
        return [*pairs, *kept.values()]

    def _rewrite(self, lane: Sequence, beam: Hypothesis) -> None:
        prompt = lane.tokens[: lane.prompt_tokens]
        lane.tokens = prompt + beam.tokens
        lane.history = None

    def _details(self, key: int, beam: Hypothesis, offset: int) -> TokenDetails:
        rules, details = self.first.token_rules, TokenDetails(key)
        if rules.wants_log_probs:
            details.log_probs = beam.log_probs[offset:]
            details.cumulative_log_prob = beam.total
        if rules.output.top_log_probs:
            details.top_log_probs = [beside.top for beside in beam.beside[offset:]]
        if rules.output.generation_logits:
            details.generation_logits = _stacked(beam.beside[offset:])
        return details

    def _end(
        self,
        key: int,
        generated_tokens: int,
        reason: int,
        stop_token_ids: tuple[int, ...] = (),
        total: float | None = None,
        *,
        error: TrtmeshError | None = None,
    ) -> SequenceEnd:
        rules = self.first.token_rules
        return replace(
            self.first.end(reason, stop_token_ids, error),
            key=key,
            generated_tokens=generated_tokens,
            cumulative_log_prob=total if rules.wants_log_probs else None,
        )


def _stacked(beside: SequenceOf[Beside]) -> TensorValue:
    """The logits of all, [tokens, vocabulary]."""
    rows = [each.logits for each in beside if each.logits is not None]
    shape = (len(rows), *rows[0].shape[1:])
    return replace(rows[0], shape=shape, data=b"".join(row.data for row in rows))
