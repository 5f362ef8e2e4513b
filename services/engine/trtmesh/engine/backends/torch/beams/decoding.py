"""An item under beam search: beams as sequences of the scheduler, and changing results.

A lane is a sequence with the KV of a beam. There are as many lanes as beams from the start, admitted and paused only
together; a spare lane repeats the first. After each step a surviving beam keeps the lane; a second child takes over the
lane of a dead beam, shares the full blocks and copies the last. All lanes have equally many tokens, so no further block
is ever needed.

Results are the best sequences so far, best first. Growth is delivered as new tokens; any other change delivers a
sequence again from the first token, in place of the earlier delivery. Logits are too large for repetition: with them
everything is delivered once, at the end. The search depends on the item alone, so another worker comes to the same
result.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trtmesh.chassis.errors import InvalidRequest, TrtmeshError
from trtmesh.chassis.stopping import End
from trtmesh.chassis.vocabulary import Tensor as TensorValue
from trtmesh.engine.backend import SequenceEnd, SequenceStart, StepOutput, TokenDetails
from trtmesh.engine.backends.torch.beams.search import Beams, Extras, Hypothesis
from trtmesh.engine.backends.torch.decoding import Decoding
from trtmesh.engine.backends.torch.memory.tensors import to_message
from trtmesh.engine.backends.torch.sampling.choice import most_likely
from trtmesh.engine.backends.torch.sampling.token_rules import BANS
from trtmesh.engine.backends.torch.sequence import Sequence
from trtmesh.engine.scheduling.sequence import Pairs
from trtmesh.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from torch import Tensor
    from trtmesh.engine.backends.torch.compute.device import Compute
    from trtmesh.engine.backends.torch.sampling.choice import Ranking


@dataclass(frozen=True, slots=True)
class _Row:
    """The next token of a lane with `tokens` tokens."""

    tokens: int
    log_probs: Tensor
    extras: Extras


class BeamDecoding(Decoding["Ranking"]):
    """A step of the search needs the rows of all lanes."""

    def __init__(self, keys: SequenceOf[int], lanes: SequenceOf[Sequence]) -> None:
        """`keys` name the returned sequences; `lanes` are new, and the first has the first key."""
        super().__init__(keys, lanes)
        self.first = first = lanes[0]
        self._search = Beams(
            first.config.beam_search,
            most_tokens=first.rule.limit - first.prompt_tokens,
            ending_tokens=first.rule.ending_tokens,
            stop_vocabulary=first.rule.stop_vocabulary,
            min_tokens=first.rule.min_tokens,
        )
        self._beams = [0] * len(lanes)
        """The running beam of each lane."""
        self._rows: dict[int, _Row] = {}
        self._told: list[list[int]] = [[] for _ in keys]
        mates = list(lanes)
        for lane in lanes:
            lane.mates = mates
            lane.times = first.times
            lane.leader = None if lane is first else first

    @staticmethod
    def choose(compute: Compute, sequences: SequenceOf[Sequence], logits: Tensor) -> Ranking:
        return compute.rank(sequences, logits)

    def advance(
        self, sequence: Sequence, choice: Ranking, row: int, output: StepOutput, now_ns: int
    ) -> int:
        asked, log_probs = sequence.token_rules.output, choice.log_probs[row]
        logits = None
        if asked.generation_logits:
            logits = to_message(choice.logits[row : row + 1], asked.logits_data_type)
        extras = Extras(most_likely(log_probs, asked.top_log_probs), logits)
        if not self.take(sequence, log_probs, extras):
            return 0
        self._advance_search(now_ns)
        if self._search.over or not self.first.token_rules.output.generation_logits:
            self.deliver(output)
        self.settle()
        return len(self.sequences)

    def settle(self) -> None:
        if self._search.over:
            self.ends = self._ends()

    def take(self, lane: Sequence, log_probs: Tensor, extras: Extras) -> bool:
        """Takes the row of a lane's next token, [vocabulary]. Returns whether all lanes have theirs."""
        self._rows[lane.key] = _Row(len(lane.tokens), log_probs, extras)
        if all(map(self._is_there, self.sequences)):
            return True
        # Kept while a lane is paused; a view would keep the rows of the whole step.
        self._rows[lane.key] = _Row(len(lane.tokens), log_probs.clone(), extras)
        return False

    def _is_there(self, lane: Sequence) -> bool:
        """Whether the lane has a row for the present tokens; after a pause a lane computes the row again."""
        row = self._rows.get(lane.key)
        return (
            row is not None
            and row.tokens == len(lane.tokens) == lane.num_computed
            and lane.slot >= 0
            and not lane.in_flight
        )

    def _advance_search(self, now_ns: int) -> None:
        """Takes a step of the search, and sets `forks`."""
        holders = [self._beams.index(beam) for beam in range(len(self._search.running))]
        rows = [self._rows[self.sequences[lane].key] for lane in holders]
        self._rows.clear()
        log_probs = rows[0].log_probs.new_empty((len(rows), len(rows[0].log_probs)))
        for place, row in enumerate(rows):
            log_probs[place] = row.log_probs
        parents = self._search.advance(log_probs, self._end_after, [row.extras for row in rows])
        times = self.first.times
        times.first_token_ns = times.first_token_ns or now_ns
        times.last_token_ns = now_ns
        if not self._search.over:
            self.forks = self._place(parents)

    def deliver(self, output: StepOutput) -> None:
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

    def broken_off(self, reason: int, error: TrtmeshError | None = None) -> list[SequenceEnd]:
        return [
            self._end(key, len(told), reason, error=error)
            for key, told in zip(self.keys, self._told, strict=True)
        ]

    def _ends(self) -> list[SequenceEnd]:
        ends = []
        best = self._search.best()
        for place, key in enumerate(self.keys):
            if place < len(best):
                beam = best[place]
                reason, words = beam.end or (pb.FINISH_REASON_LENGTH, ())
                ends.append(self._end(key, len(beam.tokens), reason, words, beam.reported_total))
            else:
                problem = f"together leave only {len(best)} sequences to find; forbid less, or search fewer beams"
                error = InvalidRequest(problem, fields=BANS)
                ends.append(self._end(key, 0, pb.FINISH_REASON_ERROR, error=error))
        return ends

    def _end_after(self, beam: Hypothesis, token: int) -> End | None:
        lane = self.sequences[self._beams.index(self._search.running.index(beam))]
        lane.tokens.append(token)
        end = lane.rule.end_after(lane.tokens)
        lane.tokens.pop()
        return end

    def _place(self, parents: SequenceOf[int]) -> Pairs[Sequence]:
        """Gives every running beam a lane. Returns the pairs of a lane and the lane to continue from."""
        wanted = [*enumerate(parents)]
        wanted += [(0, parents[0])] * (len(self.sequences) - len(parents))
        free = dict(enumerate(self._beams))
        sources = {beam: self.sequences[lane] for lane, beam in reversed(free.items())}
        beams, homeless = list(self._beams), []
        for beam, parent in wanted:
            lane = next((lane for lane, held in free.items() if held == parent), None)
            if lane is None:
                homeless.append((beam, parent))
                continue
            del free[lane]
            beams[lane] = beam
            self.sequences[lane].tokens.append(self._search.running[beam].tokens[-1])
        pairs = []
        for (beam, parent), lane in zip(homeless, free, strict=True):
            beams[lane] = beam
            pairs.append((self.sequences[lane], sources[parent]))
            self._rewrite(self.sequences[lane], self._search.running[beam])
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
            details.cumulative_log_prob = beam.reported_total
        if rules.output.top_log_probs:
            details.top_log_probs = [extras.top for extras in beam.extras[offset:]]
        if rules.output.generation_logits:
            details.generation_logits = _stacked(beam.extras[offset:])
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


def _stacked(extras: SequenceOf[Extras]) -> TensorValue:
    """All logits, [tokens, vocabulary]."""
    rows = [each.logits for each in extras if each.logits is not None]
    shape = (len(rows), *rows[0].shape[1:])
    return replace(rows[0], shape=shape, data=b"".join(row.data for row in rows))
