"""Beam search without model and blocks.

A step ranks all continuations of the running beams by a token. Among the first `width`, ending continuations become
complete sequences; the best `width` others keep running. Complete sequences are ranked by score, the sum of
log-probabilities divided by length ** length_penalty, and the best `width` are kept. The result equals transformers'
`generate` to the token, and to TensorRT-LLM with `diversity_rate`: candidates are ranked by their sum plus
diversity_rate times the number of their beam, in favour of later beams. Sums and scores exclude the rate. Stop texts
are found in the texts of tokens.

The search is over when no beam runs on, or when `width` sequences are complete and, by `early_stopping`, FIRST_COMPLETE
at once; HEURISTIC the best running sum, normalised by the present length, is no better than the worst complete score;
EXHAUSTIVE the same, normalised by the longest length where the penalty rewards length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trtmesh.chassis import vocabulary
from trtmesh.chassis.log_prob_sums import next_sum
from trtmesh.chassis.stopping import End, StopVocabulary
from trtmesh.engine.backend import TopLogProbs
from trtmesh.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Extras:
    """Optional data of a token."""

    top: TopLogProbs
    """The most likely alternatives."""
    logits: vocabulary.Tensor | None = None
    """The model's own, [1, vocabulary]."""


NO_STOP = (StopVocabulary.START, "")

MORE_CANDIDATES = 4
"""Factor on the candidates of a beam where most of them end at stop texts."""

MOST_EXPONENT = 700.0
"""Largest exponent of e in a score; keeps scores finite for every length and penalty."""


@dataclass(slots=True, eq=False)
class Hypothesis:
    """A sequence of the search: generated tokens with their log-probabilities."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    total: float = 0.0
    """Sum of the log-probabilities, for the rank."""
    end: End | None = None
    """None while running."""
    extras: list[Extras] = field(default_factory=list)
    """An entry per token; empty where the item asks for nothing."""
    text_state: int = StopVocabulary.START
    """The part of a stop text at the end of the text."""
    reported_total: float = 0.0
    """The sum in float32, as in messages."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    rank: float
    parent: int
    token: int
    log_prob: float
    text_state: int
    stopped_text: str
    """The text of the token up to the end of a completed stop text; empty without any."""


EndAfter = Callable[[Hypothesis, int], End | None]
"""The end of a hypothesis with a further token; None to continue."""


class Beams:
    def __init__(
        self,
        asked: vocabulary.BeamSearch,
        *,
        most_tokens: int,
        ending_tokens: int,
        stop_vocabulary: StopVocabulary | None = None,
        min_tokens: int = 0,
    ) -> None:
        """Every sequence ends at `most_tokens`; at most `ending_tokens` ids end a sequence earlier, besides the stop
        texts of `stop_vocabulary` after `min_tokens`."""
        self.width = asked.beam_width
        self.running = [Hypothesis()]
        """Incomplete beams in the order of their latest ranks."""
        self.complete: list[Hypothesis] = []
        """Best score first, at most `width`."""
        self._length_penalty = asked.length_penalty or 0.0
        self._diversity_rate = asked.diversity_rate or 0.0
        self._early_stopping = asked.early_stopping or pb.EARLY_STOPPING_FIRST_COMPLETE
        self._most_tokens = most_tokens
        self._ending_tokens = ending_tokens
        self._stop_vocabulary = stop_vocabulary
        self._min_tokens = min_tokens

    @property
    def over(self) -> bool:
        if not self.running:
            return True
        if len(self.complete) < self.width:
            return False
        if self._early_stopping == pb.EARLY_STOPPING_FIRST_COMPLETE:
            return True
        best = max(self.running, key=lambda beam: beam.total)
        longest = self._early_stopping == pb.EARLY_STOPPING_EXHAUSTIVE and self._length_penalty > 0
        length = self._most_tokens if longest else len(best.tokens)
        return self._normalised(best.total, length) <= self.score(self.complete[-1])

    def score(self, hypothesis: Hypothesis) -> float:
        """The rank of complete sequences."""
        return self._normalised(hypothesis.total, len(hypothesis.tokens))

    def best(self) -> list[Hypothesis]:
        """The best sequences so far, at most `width`; running beams compete until the search is over."""
        if self.over:
            return list(self.complete)
        return sorted([*self.complete, *self.running], key=self.score, reverse=True)[: self.width]

    def advance(
        self, log_probs: Tensor, end_after: EndAfter, extras: Sequence[Extras] = ()
    ) -> list[int]:
        """Takes a step. `log_probs` are [running beams, vocabulary]; `extras` belong to each beam's next token. Returns
        the parent of each running beam.
        """
        # At most `width` continuations of a beam keep running; only ending tokens can rank between these.
        chosen, ending = self._choose(log_probs, end_after, self.width + self._ending_tokens)
        before = self.running
        complete = [_follow(before, candidate, extras, end) for candidate, end in ending]
        self.running = [_follow(before, candidate, extras) for candidate in chosen]
        ranked = sorted([*self.complete, *complete], key=self.score, reverse=True)
        self.complete = ranked[: self.width]
        return [candidate.parent for candidate in chosen]

    def _choose(
        self, log_probs: Tensor, end_after: EndAfter, count: int
    ) -> tuple[list[_Candidate], list[tuple[_Candidate, End]]]:
        """Splits the best `count` continuations of each beam into running and ended, and looks at more if stop texts
        end too many. Of continuations with equal text up to a stop text, only the best counts."""
        chosen, ending = list[_Candidate](), list[tuple[_Candidate, End]]()
        seen, stopped = [0] * len(self.running), set[tuple[int, str]]()
        place = -1
        for candidate in self._candidates(log_probs, count):
            seen[candidate.parent] += 1
            text = (candidate.parent, candidate.stopped_text)
            if text in stopped:
                continue
            place += 1
            if place >= self.width and len(chosen) == self.width:
                break
            if candidate.stopped_text:
                stopped.add(text)
            end = self._end_of(candidate, end_after)
            if end is None and len(chosen) < self.width:
                chosen.append(candidate)
            elif end is not None and place < self.width:
                ending.append((candidate, end))
        if self._stop_vocabulary and max(seen) >= count < log_probs.shape[1]:
            return self._choose(log_probs, end_after, count * MORE_CANDIDATES)
        return chosen, ending

    def _end_of(self, candidate: _Candidate, end_after: EndAfter) -> End | None:
        if candidate.stopped_text:
            return pb.FINISH_REASON_STOP_WORD, ()
        return end_after(self.running[candidate.parent], candidate.token)

    def _candidates(self, log_probs: Tensor, count: int) -> list[_Candidate]:
        """The best `count` continuations of each beam, best first."""
        values, tokens = log_probs.topk(min(count, log_probs.shape[1]), dim=1)
        stops, may_end = self._stop_vocabulary, len(self.running[0].tokens) >= self._min_tokens
        found = [
            _Candidate(
                beam.total + log_prob + self._diversity_rate * parent,
                parent,
                token,
                log_prob,
                *(stops.follow(beam.text_state, token, may_end=may_end) if stops else NO_STOP),
            )
            for parent, (beam, row, ids) in enumerate(
                zip(self.running, values.tolist(), tokens.tolist(), strict=True)
            )
            for token, log_prob in zip(ids, row, strict=True)
            if log_prob > -math.inf
        ]
        return sorted(found, key=lambda each: (-each.rank, each.parent, each.token))

    def _normalised(self, total: float, length: int) -> float:
        # Before the first step there is a single, empty sequence.
        exponent = self._length_penalty * math.log(max(1, length))
        return total * math.exp(-max(-MOST_EXPONENT, min(MOST_EXPONENT, exponent)))


def _follow(
    beams: Sequence[Hypothesis],
    candidate: _Candidate,
    extras: Sequence[Extras],
    end: End | None = None,
) -> Hypothesis:
    beam = beams[candidate.parent]
    return Hypothesis(
        [*beam.tokens, candidate.token],
        [*beam.log_probs, candidate.log_prob],
        beam.total + candidate.log_prob,
        end,
        [*beam.extras, extras[candidate.parent]] if extras else [],
        candidate.text_state,
        next_sum(beam.reported_total, candidate.log_prob),
    )
