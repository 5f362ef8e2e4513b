"""Adds drafts to the steps of an engine, and counts accepted drafts."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from math import ceil

from trtmesh.chassis.panics import is_failure
from trtmesh.engine.backends.torch.drafts.drafter import Drafter
from trtmesh.engine.backends.torch.drafts.lengths import MOST_DRAFTS, Lengths, StepTime
from trtmesh.engine.backends.torch.sampling.mask_time import may_be_late
from trtmesh.engine.backends.torch.sequence import Chunk, Sequence
from trtmesh.engine.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)

FIRST_RATE = 0.6
"""Assumed share of accepted drafts, before any sequence."""
RATE_WEIGHT, PRIOR_WEIGHT = 1 / 12, 1 / 128
"""Weight of a draft in the share of the sequence, and in that of all of a similar temperature."""
SIMILAR, MOST_RANGES = 0.25, 8
"""Width of the ranges of similar temperatures, and their number above 0."""
LOWEST_RATE, HIGHEST_RATE = 0.02, 0.98
MOST_GIVEN = 64
"""Most drafts of a client in a step."""
PAUSE_STEPS = 256
"""Steps without drafts after an error of the drafter."""
FORESIGHT, FORESEEN = 0.05, 8
"""Share of the time of steps launched ahead for guesses of what could follow them, and the most sequences guessed for;
the others are taken to be alike."""


@dataclass(slots=True)
class Prior:
    """What the next sequence of a similar temperature begins with: the share of its right guesses."""

    rate: float = FIRST_RATE

    def add(self, *, is_right: bool) -> None:
        self.rate += PRIOR_WEIGHT * (is_right - self.rate)


@dataclass(slots=True)
class Followed:
    """A sequence open to drafts."""

    sequence: Sequence
    prior: Prior
    rates: list[float] = field(init=False)
    """Shares of accepted drafts, given that all drafts before were accepted: of guesses, and of forced runs."""
    is_forced: bool = False
    """Whether the last guess is a forced run of the guide, in the tokenizer's own tokens."""
    guess: SequenceOf[int] = ()
    guessed_at: int = 0
    """The number of tokens before the guess."""
    given: SequenceOf[int] = ()
    """The output guessed by the client; empty after the first difference."""
    given_right: int = 0
    """Leading tokens of `given` equal to the output."""

    def __post_init__(self) -> None:
        self.rates = [min(max(self.prior.rate, LOWEST_RATE), HIGHEST_RATE), HIGHEST_RATE]

    @property
    def rate(self) -> float:
        return self.rates[self.is_forced]

    def given_rest(self) -> SequenceOf[int]:
        """The rest of the client's guess."""
        first = self.sequence.prompt_tokens
        for token in self.sequence.tokens[first + self.given_right :]:
            if self.given_right >= len(self.given) or self.given[self.given_right] != token:
                self.given = ()
                break
            self.given_right += 1
        return self.given[self.given_right : self.given_right + MOST_GIVEN]

    def observe(self) -> None:
        """Compares the last guess with the new tokens. With or without a verification, the tokens are the model's
        choice."""
        rate, tokens = self.rate, self.sequence.tokens[self.guessed_at :]
        for guess, token in zip(self.guess, tokens, strict=False):
            rate += RATE_WEIGHT * ((guess == token) - rate)
            if not self.is_forced:
                self.prior.add(is_right=guess == token)
            if guess != token:
                break
        self.rates[self.is_forced] = min(max(rate, LOWEST_RATE), HIGHEST_RATE)

    def guessed(self, guess: SequenceOf[int], most: int) -> SequenceOf[int]:
        """Takes the drafter's guess, and replaces the guess by a forced run of the guide. Returns the guess."""
        sequence, forced = self.sequence, list[int]()
        if most > 0 and sequence.token_rules.guided and sequence.guide:
            forced = list(sequence.guide.forced(sequence.tokens)[:most])
        self.is_forced = list(guess[: len(forced)]) != forced and bool(forced)
        self.guess, self.guessed_at = forced if self.is_forced else guess, len(sequence.tokens)
        return self.guess


@dataclass(slots=True)
class Speculation:
    """The drafts of a step."""

    time: StepTime
    started: float
    chunks: list[Chunk] = field(default_factory=list)
    """With drafts, to be verified."""


@dataclass(slots=True)
class DraftCounts:
    """Counters; they only grow."""

    drafts: int = 0
    """Runs of draft tokens, one per sequence and step."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=lambda: [0] * MOST_DRAFTS)
    """Of MOST_DRAFTS positions, and up to MOST_GIVEN once a client's drafts have held so far."""
    failures: int = 0
    """Errors of the drafter."""


class Drafting:
    """Follows the sequences of an engine open to drafts: all but beams.

    A sequence has no drafts while logits of earlier tokens are read, in the last step before a handoff, while masks of
    its guide are late and, except for drafts of a client, before the first token. Drafts of a client are verified at
    any length.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        lengths: Lengths,
        *,
        most_step_tokens: int,
        vocabulary_size: int,
        is_apart: bool = False,
    ) -> None:
        """Without a `drafter` all drafts come from clients. `is_apart` means a device computing beside the engine's
        thread."""
        self.counts = DraftCounts()
        self.drafter = drafter
        self.lengths = lengths
        self._most_step_tokens = most_step_tokens
        self._vocabulary_size = vocabulary_size
        self._followed: dict[int, Followed] = {}
        self._priors = defaultdict[int, Prior](Prior)
        """By range of temperature."""
        self._paused_steps = 0
        # On a CPU of the engine's thread alone: other processes must not count.
        self._now = time.perf_counter if is_apart else time.thread_time
        self._is_apart = is_apart
        self._finished = self._seconds = 0.0
        """The end and the time of the last step."""
        self._held = 0
        self._has_waited = False
        self._sat_out = set[int]()
        """Sequences without a token of the last step, by key."""
        self._resting_steps = 0
        """Steps launched ahead without foresight."""

    def follow(self, sequence: Sequence) -> None:
        draft = sequence.config.draft
        given = draft.token_ids if draft else ()
        if self.drafter or given:
            temperature = sequence.config.sampling.temperature or 0.0
            prior = self._priors[min(MOST_RANGES, ceil(temperature / SIMILAR))]
            self._followed[sequence.key] = Followed(sequence, prior, given=given)

    def forget(self, sequence: Sequence) -> None:
        if self._followed.pop(sequence.key, None) and self.drafter:
            try:
                self.drafter.forget(sequence)
            except BaseException as error:
                if not is_failure(error):
                    raise
                log.exception("the drafter failed at the end of a sequence")
                self.counts.failures += 1

    def extend(
        self, chunks: SequenceOf[Chunk], scheduler: Scheduler[Sequence]
    ) -> Speculation | None:
        """Adds drafts to scheduled chunks, within the rest of the step's tokens. Returns None without a sequence open
        to drafts."""
        if not self._followed:
            return None
        taken = [chunk for chunk in chunks if self._takes(chunk)]
        decodes = len(taken) == len(chunks) and all(chunk.count == 1 for chunk in taken)
        step = Speculation(StepTime(len(chunks) if decodes else 0), self._now())
        step.time.has_waited, self._has_waited = self._has_waited, False
        if not taken:
            return step
        left = self._most_step_tokens - sum(chunk.count for chunk in chunks)
        for chunk, drafts in zip(taken, self._drafts(taken, step, len(chunks)), strict=True):
            if drafts and left > 0:
                scheduler.add_drafts(chunk, drafts[:left])
                if chunk.drafts:
                    left -= len(chunk.drafts)
                    step.chunks.append(chunk)
        # Of drafts, the number that holds must be known.
        self._has_waited = self._is_apart and bool(step.chunks)
        return step

    def waits(self, sequences: SequenceOf[Sequence]) -> bool:
        """Whether the next step waits for the tokens of the sequences, and so may have drafts, instead of a launch
        ahead."""
        followed = [
            self._followed[each.key]
            for each in sequences
            if each.key in self._followed and not may_be_late(each)
        ]
        if any(each.given_right < len(each.given) for each in followed):
            return True
        if self.drafter is None or self._paused_steps or not followed:
            return False
        if self._resting_steps:
            self._resting_steps -= 1
            return False
        began = time.perf_counter()
        asked, alike = followed[:FORESEEN], ceil(len(followed) / FORESEEN)
        cap = self._most_of(len(sequences))
        most = [min(cap, each) for each in self._foreseen(self.drafter, asked)]
        rates = [each.rate for each in asked]
        self._has_waited = self.lengths.waits(len(sequences), rates * alike, most * alike)
        seconds = time.perf_counter() - began
        self._resting_steps = int(seconds / (FORESIGHT * self._seconds)) if self._seconds else 0
        return self._has_waited

    def _most_of(self, rows: int) -> int:
        """Most drafts of a sequence, where all have equally many."""
        return max(1, min(MOST_DRAFTS, self._most_step_tokens // rows - 1))

    def _foreseen(self, drafter: Drafter, followed: SequenceOf[Followed]) -> list[int]:
        """How many drafts could follow the tokens under way, by the tokens known."""
        if not drafter.is_free:
            return [MOST_DRAFTS] * len(followed)
        for each in followed:
            each.observe()
        guesses = self._guesses(drafter, followed, [MOST_DRAFTS + 1] * len(followed))
        return [max(0, len(guess) - 1) for guess in guesses]

    def ahead(self, chunks: SequenceOf[Chunk]) -> Speculation | None:
        """The step of `chunks` launched ahead, to be measured; None without a sequence open to drafts."""
        if self._paused_steps:
            self._paused_steps -= 1
        self._has_waited = False
        if not any(chunk.sequence.key in self._followed for chunk in chunks):
            return None
        return Speculation(StepTime(len(chunks), is_ahead=True), self._now())

    def computed(self, step: Speculation, sat_out: Iterable[int]) -> None:
        """Counts the drafts of a step, before the tokens may end sequences. Those of sequences that `sat_out` are not
        verified, and had a part in the time of the step."""
        self._sat_out = set(sat_out)
        for chunk in step.chunks:
            if chunk.sequence.key in self._sat_out:
                step.time.is_typical = False
                continue
            self.counts.drafts += bool(chunk.drafts)
            self.counts.draft_tokens += len(chunk.drafts)
            chunk.sequence.times.draft_tokens += len(chunk.drafts)

    def accepted(self, chunk: Chunk, position: int) -> None:
        """Counts an accepted draft, which has the step choose another token, before that may end the sequence."""
        self.counts.accepted_tokens += 1
        self._held += 1
        counts = self.counts.accepted_by_position
        if position == len(counts):
            counts.append(0)
        counts[position] += 1
        chunk.sequence.times.accepted_draft_tokens += 1

    def finished(self, step: Speculation) -> None:
        """Learns from the time of a collected step. The time of a step launched ahead begins at the end of the step
        before."""
        now, took = self._now(), step.time
        took.seconds = self._seconds = now - max(step.started, self._finished)
        took.drafts, took.held = sum(len(chunk.drafts) for chunk in step.chunks), self._held
        self._finished, self._held = now, 0
        if took.rows:
            self.lengths.measured(took)

    def _takes(self, chunk: Chunk) -> bool:
        sequence = chunk.sequence
        followed = self._followed.get(sequence.key)
        return (
            followed is not None
            and chunk.completes
            and ((chunk.count == 1 and sequence.times.first_token_ns > 0) or bool(followed.given))
            and sequence.reader is None
            and sequence.outgoing is None
        )

    def _drafts(
        self, chunks: SequenceOf[Chunk], step: Speculation, rows: int
    ) -> SequenceOf[SequenceOf[int]]:
        drafts: list[SequenceOf[int]] = []
        asking: dict[int, tuple[Followed, int]] = {}
        for place, chunk in enumerate(chunks):
            sequence = chunk.sequence
            followed = self._followed[sequence.key]
            # The step emits one token more than accepted drafts.
            rest = sequence.rule.limit - len(sequence.tokens) - 1
            is_late = sequence.key in self._sat_out or may_be_late(sequence)
            most = 0 if is_late else rest
            drafts.append(followed.given_rest()[:most] if followed.given and most > 0 else ())
            if not drafts[-1] and chunk.count == 1:
                followed.observe()
                asking[place] = followed, min(self._most_of(rows), most)
        if self._paused_steps:
            self._paused_steps -= 1
        elif asking and self.drafter:
            before = self.drafter.seconds_apart
            followings, mosts = zip(*asking.values(), strict=True)
            found, step.time.is_typical = self._found(self.drafter, followings, mosts, rows)
            if not self._is_apart:
                step.started -= self.drafter.seconds_apart - before
            for place, guess in zip(asking, found, strict=True):
                drafts[place] = guess
        return drafts

    def _found(
        self,
        drafter: Drafter,
        followed: SequenceOf[Followed],
        most: SequenceOf[int],
        rows: int,
    ) -> tuple[list[SequenceOf[int]], bool]:
        """Returns the drafter's guesses, cut to worthwhile lengths, and whether the step's time is typical. A sequence
        without a guess despite a worthwhile length makes the time untypical: reading a prompt, for example, costs
        more."""
        if drafter.is_free:
            guesses = self._guesses(drafter, followed, most)
            rates = [each.rate for each in followed]
            lengths = self.lengths.choose(rows, rates, list(map(len, guesses)))
        else:
            # A further draft costs a step of the drafter, for one sequence or for all.
            mean = sum(each.rate for each in followed) / len(followed)
            lengths = self.lengths.choose(rows, [mean] * len(followed), most)
            guesses = self._guesses(drafter, followed, lengths)
        cut = [guess[:length] for guess, length in zip(guesses, lengths, strict=True)]
        return cut, all(guess or not length for guess, length in zip(cut, lengths, strict=True))

    def _guesses(
        self, drafter: Drafter, followed: SequenceOf[Followed], most: SequenceOf[int]
    ) -> SequenceOf[SequenceOf[int]]:
        """Guesses of known ids, at most so many; none after an error."""
        guesses: list[SequenceOf[int]] = [()] * len(followed)
        asked = [place for place, cap in enumerate(most) if cap > 0]
        try:
            wishes = [(followed[place].sequence, most[place]) for place in asked]
            found = drafter.propose(wishes) if asked else ()
            for place, guess in zip(asked, found, strict=True):
                guesses[place] = self._known(guess[: most[place]])
            return [
                each.guessed(guess, cap)
                for each, guess, cap in zip(followed, guesses, most, strict=True)
            ]
        except BaseException as error:
            if not is_failure(error):
                raise
            log.exception("no drafts for %d steps: the drafter failed", PAUSE_STEPS)
            self.counts.failures += 1
            self._paused_steps = PAUSE_STEPS
            for each in followed:
                each.guess = ()
            return [()] * len(followed)

    def _known(self, guess: SequenceOf[int]) -> SequenceOf[int]:
        """The ids up to the first id beyond the vocabulary, such as an id of a prompt table."""
        for place, token in enumerate(guess):
            if not 0 <= token < self._vocabulary_size:
                return guess[:place]
        return guess
