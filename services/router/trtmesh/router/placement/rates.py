"""Learns a worker's speed from load reports and from first tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

SMOOTHING = 0.2
"""Weight of a new sample in an exponentially weighted mean."""

FALLBACK_PREFILL_RATE = 2000.0
"""Prompt tokens per second of an unknown worker."""

FALLBACK_STEP_SECONDS = 0.02

FALLBACK_NEW_TOKENS = 128.0

LEAST_PROMPT_TOKENS = 64
"""Shortest prompt to learn the prefill rate from; shorter prompts mostly measure a step."""

MOST_RATE = 1e7

FADING_SECONDS = 5.0
"""Half-life of a worker's difference from the fleet without new samples. A worker slow for a moment, as at the first
prompt, would otherwise get no items and never correct the impression."""

HALVING_VARIANCE = 1.0
"""Variance of the sequence count at which half of the measured slope counts: ridge regression (Hoerl and Kennard,
1970). At low variance the slope is noise, and one running sequence would outweigh a cached prefix."""

HELD_UP = 5.0
"""Longest usable interval between two reports, and longest counted step, relative to the usual. Reports keep their
pace during long steps, so a longer interval means a frozen process or network."""

SNAP = 1.5
"""Factor below which a worker counts as equal to the fleet. Without it measurement noise would send every item of an
idle fleet to the same worker; different hardware or a noisy neighbour differ by more."""


@dataclass(frozen=True, slots=True)
class Report:
    """The part of a load report for rates and waits; `at` is the arrival in seconds of a clock."""

    at: float
    busy_seconds: float = 0.0
    """Total time with sequences, by the worker's clock; never decreases, like the counts."""
    step_count: int = 0
    running_sequences: int = 0
    waiting_sequences: int = 0
    pending_prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    adapter_slots: tuple[int, int, int] = (0, 0, 0)
    """All slots for adapters, the free ones, and those of adapters neither pinned nor in use."""

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
    """Learned rates of a worker.

    * prefill rate: prompt tokens computed between two reports with a backlog, over the busy time; and, for a prompt on
      an idle worker, the tokens over the time to the first token minus a step.
    * step time, as a line over the number of running sequences: busy time between two reports over the steps made, by
      exponentially weighted least squares. Wall time would count the idle time between short requests.

    Steps are counted from a report at the end of a step or of an idle worker. Other reports may lie in the middle of a
    step, and a step may span many reports.
    """

    def __init__(self) -> None:
        self.prefill_rate = Ewma()
        self._prefill_trust = 1.0
        self._step_trust = 1.0
        """Weight of the difference from the fleet: 1 at a sample, then decaying."""
        self._since: Report | None = None
        """Start of the next count of steps; None if the last report may lie inside a step."""
        self._interval = Ewma()
        self._sequences = Ewma()
        self._seconds = Ewma()
        self._squares = Ewma()
        self._products = Ewma()

    def learn(self, before: Report, after: Report) -> None:
        """Learns from two successive reports of a process."""
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
        """Discards the step in progress, since the end will not be seen."""
        self._since = None

    def _learn_steps(self, before: Report, after: Report) -> None:
        steps, busy = after.step_count - before.step_count, after.busy_seconds - before.busy_seconds
        if busy <= 0:
            return
        computed = after.computed_prompt_tokens - before.computed_prompt_tokens
        if before.pending_prompt_tokens and after.pending_prompt_tokens and computed > 0:
            self._learn_prefill(min(computed / busy, MOST_RATE))
        elif before.running_sequences and after.running_sequences and computed == 0:
            # Only steps without prompts: prompt time belongs to the prefill rate.
            running = (before.running_sequences + after.running_sequences) / 2
            # Capped, because reports do not show a short freeze.
            step = min(busy / steps, HELD_UP * (self._seconds.value or busy / steps))
            self._step_trust = 1.0
            self._sequences.add(running)
            self._seconds.add(step)
            self._squares.add(running * running)
            self._products.add(running * step)

    def _note_interval(self, seconds: float) -> bool:
        """Learns the pace of reports; True for a delayed report."""
        most = HELD_UP * (self._interval.value or seconds)
        # A permanently changed pace becomes usual after a few reports.
        self._interval.add(min(seconds, most))
        return seconds > most

    @property
    def sums(self) -> tuple[float, float, float, float] | None:
        """Means of sequences, seconds, squared sequences and their product; None before the first step."""
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
        """Learns from a prompt on an idle worker with the first token after `seconds`."""
        if prompt_tokens >= LEAST_PROMPT_TOKENS:
            # The step time is a rough estimate; subtracting most of `seconds` would leave an unbounded rate.
            spent = max(seconds - (self._seconds.value or 0.0), seconds / 2)
            self._learn_prefill(prompt_tokens / max(spent, prompt_tokens / MOST_RATE))

    def _learn_prefill(self, rate: float) -> None:
        self._prefill_trust = 1.0
        self.prefill_rate.add(rate)

    def relative_prefill(self, typical: Typical) -> float:
        """Prefill time per token relative to a typical worker."""
        if self.prefill_rate.value is None or typical.prefill_rate is None:
            return 1.0
        return _snapped((typical.prefill_rate / self.prefill_rate.value) ** self._prefill_trust)

    def relative_step(self, typical: Typical) -> float:
        """Step time relative to a typical worker with as many sequences."""
        if self._sequences.value is None or self._seconds.value is None or typical.step is None:
            return 1.0
        ratio = self._seconds.value / typical.step.at(self._sequences.value)
        return _snapped(ratio**self._step_trust)


@dataclass(frozen=True, slots=True)
class Line:
    """Step time as a line over the number of sequences."""

    seconds: float
    slope: float
    sequences: float

    def at(self, sequences: float) -> float:
        return max(self.seconds + self.slope * (sequences - self.sequences), 1e-6)


@dataclass(frozen=True, slots=True)
class Typical:
    """Rates common to the workers of a model; None before they are learned."""

    prefill_rate: float | None = None
    step: Line | None = None
    new_tokens: float = FALLBACK_NEW_TOKENS
    """New tokens of a sequence."""

    @property
    def prefill_seconds(self) -> float:
        """Time per prompt token."""
        return 1.0 / (self.prefill_rate or FALLBACK_PREFILL_RATE)

    def step_seconds(self, sequences: int) -> float:
        return FALLBACK_STEP_SECONDS if self.step is None else self.step.at(sequences)


def typical_of(workers: Sequence[Rates], new_tokens: float | None) -> Typical:
    """Summarizes the rates of workers."""
    rates = [value for w in workers if (value := w.prefill_rate.value) is not None]
    return Typical(
        median(rates) if rates else None,
        _line([sums for w in workers if (sums := w.sums) is not None]),
        FALLBACK_NEW_TOKENS if new_tokens is None else new_tokens,
    )


def _line(sums: Sequence[tuple[float, float, float, float]]) -> Line | None:
    """Least squares over the steps of all workers."""
    if not sums:
        return None
    sequences, seconds, squares, products = (fmean(column) for column in zip(*sums, strict=True))
    variance = squares - sequences * sequences
    slope = (products - sequences * seconds) / (variance + HALVING_VARIANCE)
    # The slope is not negative, and no steeper than proportional to the sequences.
    return Line(seconds, min(max(slope, 0.0), seconds / max(sequences, 1.0)), sequences)


def _snapped(ratio: float) -> float:
    return 1.0 if 1.0 / SNAP < ratio < SNAP else ratio
