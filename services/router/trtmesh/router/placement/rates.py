"""How fast a worker is, learned from its load reports and from the first tokens of what was sent to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

SMOOTHING = 0.2
"""Weight of a new sample in an exponentially weighted mean."""

FALLBACK_PREFILL_RATE = 2000.0
"""Prompt tokens a second of a worker of which nothing is known."""

FALLBACK_STEP_SECONDS = 0.02

FALLBACK_NEW_TOKENS = 128.0

LEAST_PROMPT_TOKENS = 64
"""Shorter prompts say more about the length of a step than about the prefill."""

MOST_RATE = 1e7

FADING_SECONDS = 5.0
"""Time without a sample after which half as much is made of how a worker differs from the fleet. Without this one that
was slow for a moment, as with its first prompt, would get nothing any more, and so never show that it is not."""

HALVING_VARIANCE = 1.0
"""Variance of the number of sequences at which half of a measured slope of the step time counts: ridge regression
(Hoerl and Kennard, 1970). Where the number hardly varies the slope is noise, and a prompt whose prefix a worker has
would go elsewhere for the sake of a single sequence that runs there."""

HELD_UP = 5.0
"""How many times longer than usual two reports may be apart for what lies between them to be learned from. Reports keep
their pace whatever a step takes; where they do not, somebody was frozen, or the network was. And how many times as long
as usual a step counts at most."""

SNAP = 1.5
"""A worker that is faster or slower than the fleet by less than this factor counts as equal to it. Measured rates are
never quite equal, and without this the worker that was measured fastest would get every item that finds the fleet idle;
workers that truly differ, by a generation of hardware or by a neighbour on the host, differ by more."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a load report says that rates and waits are made from, and when it arrived, in seconds of a clock."""

    at: float
    busy_seconds: float = 0.0
    """How long it had something to compute, by its own clock; like the counts it only grows."""
    step_count: int = 0
    running_sequences: int = 0
    waiting_sequences: int = 0
    pending_prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    used_blocks: int = 0
    total_blocks: int = 0

    @property
    def sequences(self) -> int:
        return self.running_sequences + self.waiting_sequences


class Ewma:
    """Exponentially weighted mean; None before the first sample."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, sample: float) -> None:
        self.value = (
            sample if self.value is None else self.value + SMOOTHING * (sample - self.value)
        )


class Rates:
    """What was learned of one worker.

    * prefill rate: prompt tokens computed between two reports that both had some waiting, over the time that the worker
      was busy; and, for a prompt that found the worker idle, its tokens over the time to its first token less one step.
    * step time, as a line over the number of running sequences: what a worker was busy between two reports over the
      steps made, by exponentially weighted least squares. Between short requests a worker has nothing to do, and all
      the time between the reports would be several times too long.

    Steps are counted from a report that saw one end, or the worker with nothing to do: any other may lie in the middle
    of a step, which can be many reports long.
    """

    def __init__(self) -> None:
        self.prefill_rate = Ewma()
        self._prefill_trust = 1.0
        self._step_trust = 1.0
        """How much is made of a difference to the fleet: 1 with a sample, then less and less."""
        self._since: Report | None = None
        """What the next steps are counted from; None where the last report may lie in the middle of a step."""
        self._interval = Ewma()
        self._sequences = Ewma()
        self._seconds = Ewma()
        self._squares = Ewma()
        self._products = Ewma()

    def learn(self, before: Report, after: Report) -> None:
        """Two successive reports of one process."""
        seconds = after.at - before.at
        if seconds <= 0:
            return
        fading = 0.5 ** (seconds / FADING_SECONDS)
        self._prefill_trust *= fading
        self._step_trust *= fading
        if self._note_interval(seconds):
            self._since = None
        elif after.step_count != before.step_count or not after.sequences:
            if self._since is not None:
                self._learn_steps(self._since, after)
            self._since = after

    def break_off(self) -> None:
        """The end of the step that is under way is not seen."""
        self._since = None

    def _learn_steps(self, before: Report, after: Report) -> None:
        steps, busy = after.step_count - before.step_count, after.busy_seconds - before.busy_seconds
        if busy <= 0:
            return
        computed = after.computed_prompt_tokens - before.computed_prompt_tokens
        if before.pending_prompt_tokens and after.pending_prompt_tokens and computed > 0:
            self._learn_prefill(min(computed / busy, MOST_RATE))
        elif before.running_sequences and after.running_sequences and computed == 0:
            # A step that also computes prompts takes longer, and that is the prefill's time.
            running = (before.running_sequences + after.running_sequences) / 2
            # A worker that stood still for a moment, which reports do not show, is not that slow.
            step = min(busy / steps, HELD_UP * (self._seconds.value or busy / steps))
            self._step_trust = 1.0
            self._sequences.add(running)
            self._seconds.add(step)
            self._squares.add(running * running)
            self._products.add(running * step)

    def _note_interval(self, seconds: float) -> bool:
        """Learns the pace of reports, and tells whether this one was held up."""
        most = HELD_UP * (self._interval.value or seconds)
        # A pace that has really changed becomes the usual one after a few reports.
        self._interval.add(min(seconds, most))
        return seconds > most

    @property
    def sums(self) -> tuple[float, float, float, float] | None:
        """Means of sequences, seconds, squared sequences and their product; None while no step was seen."""
        means = [
            self._sequences.value,
            self._seconds.value,
            self._squares.value,
            self._products.value,
        ]
        if any(mean is None for mean in means):
            return None
        sequences, seconds, squares, products = (mean or 0.0 for mean in means)
        return sequences, seconds, squares, products

    def learn_first_token(self, prompt_tokens: int, seconds: float) -> None:
        """A prompt that found the worker idle had `prompt_tokens` computed and its first token after `seconds`."""
        if prompt_tokens >= LEAST_PROMPT_TOKENS:
            # What a step takes is known roughly. Where it is most of what was seen, next to nothing would be left, and
            # the rate would have no bounds.
            spent = max(seconds - (self._seconds.value or 0.0), seconds / 2)
            self._learn_prefill(prompt_tokens / max(spent, prompt_tokens / MOST_RATE))

    def _learn_prefill(self, rate: float) -> None:
        self._prefill_trust = 1.0
        self.prefill_rate.add(rate)

    def relative_prefill(self, typical: Typical) -> float:
        """Prefill time of a token over that of a typical worker."""
        if self.prefill_rate.value is None or typical.prefill_rate is None:
            return 1.0
        return _snapped((typical.prefill_rate / self.prefill_rate.value) ** self._prefill_trust)

    def relative_step(self, typical: Typical) -> float:
        """Step time over that of a typical worker with as many sequences."""
        if self._sequences.value is None or self._seconds.value is None or typical.step is None:
            return 1.0
        ratio = self._seconds.value / typical.step.at(self._sequences.value)
        return _snapped(ratio**self._step_trust)


@dataclass(frozen=True, slots=True)
class Line:
    """Step time over the number of sequences."""

    seconds: float
    slope: float
    sequences: float

    def at(self, sequences: float) -> float:
        return max(self.seconds + self.slope * (sequences - self.sequences), 1e-6)


@dataclass(frozen=True, slots=True)
class Typical:
    """What the workers of a model have in common; None is what was not learned yet."""

    prefill_rate: float | None = None
    step: Line | None = None
    new_tokens: float = FALLBACK_NEW_TOKENS
    """Tokens that a sequence generates."""

    @property
    def prefill_seconds(self) -> float:
        """Time to compute one prompt token."""
        return 1.0 / (self.prefill_rate or FALLBACK_PREFILL_RATE)

    def step_seconds(self, sequences: int) -> float:
        return FALLBACK_STEP_SECONDS if self.step is None else self.step.at(sequences)


def typical_of(workers: Sequence[Rates], new_tokens: float | None) -> Typical:
    """What is typical of workers, from what was learned of each."""
    rates = [value for w in workers if (value := w.prefill_rate.value) is not None]
    return Typical(
        median(rates) if rates else None,
        _line([sums for w in workers if (sums := w.sums) is not None]),
        FALLBACK_NEW_TOKENS if new_tokens is None else new_tokens,
    )


def _line(sums: Sequence[tuple[float, float, float, float]]) -> Line | None:
    """Least squares over what was seen of all workers."""
    if not sums:
        return None
    sequences, seconds, squares, products = (fmean(column) for column in zip(*sums, strict=True))
    variance = squares - sequences * sequences
    slope = (products - sequences * seconds) / (variance + HALVING_VARIANCE)
    # A step never gets shorter with more sequences, and never costs more a sequence than all of it.
    return Line(seconds, min(max(slope, 0.0), seconds / max(sequences, 1.0)), sequences)


def _snapped(ratio: float) -> float:
    return 1.0 if 1.0 / SNAP < ratio < SNAP else ratio
