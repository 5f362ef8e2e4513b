"""Learns a worker's speed from load reports and from first tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple, Self

from trtmesh.router.placement.residency import FALLBACK_COPY_SECONDS, FALLBACK_DELIVERY_SECONDS

SMOOTHING = 0.2
"""Weight of a new sample in an exponentially weighted mean."""

FALLBACK_PREFILL_RATE = 2000.0
"""Prompt tokens per second of an unknown worker."""

FALLBACK_STEP_SECONDS = 0.02

FALLBACK_RANK_STEP_SECONDS = 0.00005
"""Step time per unit of the batch's largest rank."""

FALLBACK_NEW_TOKENS = 128.0

LEAST_PROMPT_TOKENS = 64
"""Shortest prompt to learn the prefill rate from; shorter prompts mostly measure a step."""

MOST_RATE = 1e7

FALLBACK_TRANSFER_RATE = 1e9
"""Bytes of KV per second of an unknown worker, as in messages of one connection."""

FALLING = 0.05
"""Weight of a new sample below the learned transfer rate; a higher one counts at once. A transfer also waits for the
computation of its parts, so a sample is a lower bound of what the link can do."""

FALLBACK_HANDOFF_SECONDS, MOST_HANDOFF_SECONDS = 0.010, 0.5
"""Time of a handoff beside the transfer: reservation, commit, confirmation and second submit; before any was seen, and
the most that is learned, since a late transfer counts elsewhere."""

FADING_SECONDS = 5.0
"""Half-life of a worker's difference from the fleet without new samples. A worker slow for a moment, as at the first
prompt, would otherwise get no items and never correct the impression."""

HALVING_VARIANCE = 1.0
"""Variance of the sequence count at which half of the measured slope counts: ridge regression (Hoerl and Kennard,
1970). At low variance the slope is noise, and one running sequence would outweigh a cached prefix."""

HALVING_RANK_VARIANCE = 64.0
"""The same for the largest rank."""

HELD_UP = 5.0
"""Longest usable interval between two reports, and longest counted step, relative to the usual. Reports keep their
pace during long steps, so a longer interval means a frozen process or network."""

SNAP = 1.5
"""Factor below which a worker counts as equal to the fleet. Without it measurement noise would send every item of an
idle fleet to the same worker; different hardware or a noisy neighbour differ by more."""


class Report(NamedTuple):
    """The part of a load report for rates and waits; `at` is the arrival in seconds of a clock. A tuple, as a snapshot
    is."""

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
    """All slots for adapters, the free slots, and the slots of adapters neither pinned nor in use."""
    received_bytes: int = 0
    """Bytes of KV of all finished handoffs to the worker."""
    receiving_seconds: float = 0.0
    """Their time together."""
    receiving_sequences: int = 0
    """Sequences whose KV is to come from other workers: neither running nor waiting."""
    receiving_tokens: int = 0
    """Their tokens."""
    generated_tokens: int = 0
    accepted_draft_tokens: int = 0
    """Part of the generated."""

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
    * step time, linear in the number of running sequences and in the largest rank of their adapters: busy time between
      two reports over the steps made, by exponentially weighted least squares. Wall time would count the idle time
      between short requests.
    * load times of adapters, from the first booking until the worker reports the adapter.
    * handoff time: from the end of the prefill to the next token, minus a step; it fades to the fallback.
    * tokens of a sequence in a step: those generated between two reports, over those that were no accepted drafts.
    * transfer rate: bytes of KV received between two reports, over the time of their transfers.

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
        self.sums: Moments | None = None
        """Means over the steps; None before the first."""
        self._rank = 0
        self.delivery = Ewma()
        """Time from an adapter's content to the worker's memory."""
        self.copy = Ewma()
        """Time from host memory to the device."""
        self.transfer_rate: float | None = None
        """Bytes of KV received per second of a transfer."""
        self._tokens = Ewma()
        self._handoff = Ewma()
        self._handoff_trust = 1.0

    def learn(self, before: Report, after: Report, rank: int = 0) -> None:
        """Learns from two successive reports of a process, the later at a largest rank in use of `rank`."""
        ranks, self._rank = self._rank + rank, rank
        self._learn_transfers(before, after)
        self._learn_drafts(before, after)
        seconds = after.at - before.at
        if seconds <= 0:
            return
        fading = 0.5 ** (seconds / FADING_SECONDS)
        self._handoff_trust *= fading
        self._prefill_trust *= fading
        self._step_trust *= fading
        if self._note_interval(seconds):
            self._since = None
        elif after.step_count != before.step_count or not after.sequences:
            if self._since is not None:
                self._learn_steps(self._since, after, ranks / 2)
            self._since = after

    def break_off(self) -> None:
        """Discards the step in progress, since the end will not be seen."""
        self._since = None

    def _learn_steps(self, before: Report, after: Report, rank: float) -> None:
        steps, busy = after.step_count - before.step_count, after.busy_seconds - before.busy_seconds
        if busy <= 0:
            return
        computed = after.computed_prompt_tokens - before.computed_prompt_tokens
        if before.pending_prompt_tokens and after.pending_prompt_tokens and computed > 0:
            # A received prompt has its last token computed, in the time of a step.
            if computed >= LEAST_PROMPT_TOKENS:
                self._learn_prefill(min(computed / busy, MOST_RATE))
        elif before.running_sequences and after.running_sequences and computed == 0:
            # Only steps without prompts: prompt time belongs to the prefill rate.
            running = (before.running_sequences + after.running_sequences) / 2
            # Capped, because reports do not show a short freeze.
            step = min(busy / steps, HELD_UP * (self.sums.seconds if self.sums else busy / steps))
            self._step_trust = 1.0
            sample = Moments.of(running, step, rank)
            self.sums = self.sums.towards(sample) if self.sums else sample

    def _learn_transfers(self, before: Report, after: Report) -> None:
        moved = after.received_bytes - before.received_bytes
        seconds = after.receiving_seconds - before.receiving_seconds
        if moved > 0 and seconds > 0:
            rate, known = moved / seconds, self.transfer_rate
            fallen = rate if known is None else known + FALLING * (rate - known)
            self.transfer_rate = max(rate, fallen)

    def _learn_drafts(self, before: Report, after: Report) -> None:
        tokens = after.generated_tokens - before.generated_tokens
        steps = tokens - (after.accepted_draft_tokens - before.accepted_draft_tokens)
        if steps > 0:
            self._tokens.add(tokens / steps)

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a sequence in a step; 1 without drafts."""
        return self._tokens.value or 1.0

    def _note_interval(self, seconds: float) -> bool:
        """Learns the pace of reports; True for a delayed report."""
        most = HELD_UP * (self._interval.value or seconds)
        # A permanently changed pace becomes usual after a few reports.
        self._interval.add(min(seconds, most))
        return seconds > most

    @property
    def handoff_seconds(self) -> float | None:
        """Time of a handoff to the worker; None before the first."""
        known, usual = self._handoff.value, FALLBACK_HANDOFF_SECONDS
        return None if known is None else usual + self._handoff_trust * (known - usual)

    def learn_handoff(self, seconds: float) -> None:
        """Learns from a handoff whose next token came `seconds` after the end of the prefill."""
        step = self.sums.seconds if self.sums else 0.0
        self._handoff.add(min(max(seconds - step, 0.0), MOST_HANDOFF_SECONDS))
        self._handoff_trust = 1.0

    def learn_load(self, seconds: float, *, delivered: bool) -> None:
        """Learns the time of an adapter's load, from its content if `delivered`."""
        (self.delivery if delivered else self.copy).add(seconds)

    def learn_first_token(self, prompt_tokens: int, seconds: float) -> None:
        """Learns from a prompt on an idle worker with the first token after `seconds`."""
        if prompt_tokens >= LEAST_PROMPT_TOKENS:
            # The step time is a rough estimate; subtracting most of `seconds` would leave an unbounded rate.
            spent = max(seconds - (self.sums.seconds if self.sums else 0.0), seconds / 2)
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
        if self.sums is None or typical.step is None:
            return 1.0
        ratio = self.sums.seconds / typical.step.at(self.sums.sequences, self.sums.rank)
        return _snapped(ratio**self._step_trust)


class Moments(NamedTuple):
    """Means over steps: of sequences, seconds and largest rank, of their squares and of their products."""

    sequences: float
    seconds: float
    squares: float
    products: float
    rank: float
    rank_squares: float
    rank_sequences: float
    rank_products: float

    @classmethod
    def of(cls, sequences: float, seconds: float, rank: float) -> Self:
        """A single step."""
        return cls(
            sequences,
            seconds,
            sequences * sequences,
            sequences * seconds,
            rank,
            rank * rank,
            rank * sequences,
            rank * seconds,
        )

    def towards(self, sample: Self) -> Self:
        """The exponentially weighted means after a further step."""
        pairs = zip(self, sample, strict=True)
        return type(self)(*[old + SMOOTHING * (new - old) for old, new in pairs])


@dataclass(frozen=True, slots=True)
class Line:
    """Step time, linear in the number of sequences and in the largest rank of their adapters."""

    seconds: float
    slope: float
    sequences: float
    rank_slope: float = 0.0
    rank: float = 0.0

    @property
    def base(self) -> float:
        """Time of a step without sequences, however far from those seen."""
        return self.at(0)

    def at(self, sequences: float, rank: float = 0.0) -> float:
        more = self.slope * (sequences - self.sequences) + self.rank_slope * (rank - self.rank)
        return max(self.seconds + more, 1e-6)


@dataclass(frozen=True, slots=True)
class Typical:
    """Rates common to the workers of a model; None before they are learned."""

    prefill_rate: float | None = None
    step: Line | None = None
    new_tokens: float = FALLBACK_NEW_TOKENS
    """New tokens of a sequence."""
    delivery_seconds: float = FALLBACK_DELIVERY_SECONDS
    """Time from an adapter's content to a worker's memory."""
    copy_seconds: float = FALLBACK_COPY_SECONDS
    """Time of an adapter from host memory to the device."""
    transfer_rate: float = FALLBACK_TRANSFER_RATE
    """Bytes of KV received per second."""
    handoff_seconds: float = FALLBACK_HANDOFF_SECONDS
    """Time of a handoff beside the transfer."""

    @property
    def prefill_seconds(self) -> float:
        """Time per prompt token."""
        return 1.0 / (self.prefill_rate or FALLBACK_PREFILL_RATE)

    def step_seconds(self, sequences: int, rank: int = 0) -> float:
        return FALLBACK_STEP_SECONDS if self.step is None else self.step.at(sequences, rank)

    @property
    def mean_step_seconds(self) -> float:
        return self.step.seconds if self.step else FALLBACK_STEP_SECONDS

    @property
    def rank_step_seconds(self) -> float:
        """Time per step and unit of the batch's largest rank."""
        return self.step.rank_slope if self.step else FALLBACK_RANK_STEP_SECONDS


def typical_of(workers: Sequence[Rates], new_tokens: float | None) -> Typical:
    return Typical(
        _median(w.prefill_rate.value for w in workers),
        _line([sums for w in workers if (sums := w.sums) is not None]),
        FALLBACK_NEW_TOKENS if new_tokens is None else new_tokens,
        _median(w.delivery.value for w in workers) or FALLBACK_DELIVERY_SECONDS,
        _median(w.copy.value for w in workers) or FALLBACK_COPY_SECONDS,
        _median(w.transfer_rate for w in workers) or FALLBACK_TRANSFER_RATE,
        _median(w.handoff_seconds for w in workers) or FALLBACK_HANDOFF_SECONDS,
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _line(sums: Sequence[Moments]) -> Line | None:
    """Least squares over the steps of all workers."""
    if not sums:
        return None
    mean = Moments(*(fmean(column) for column in zip(*sums, strict=True)))
    sequences, rank, seconds = mean.sequences, mean.rank, mean.seconds
    spread = mean.squares - sequences * sequences + HALVING_VARIANCE
    rank_spread = mean.rank_squares - rank * rank + HALVING_RANK_VARIANCE
    common = mean.rank_sequences - rank * sequences
    by_sequences = mean.products - sequences * seconds
    by_rank = mean.rank_products - rank * seconds
    determinant = spread * rank_spread - common * common
    slope = (by_sequences * rank_spread - by_rank * common) / determinant
    rank_slope = (by_rank * spread - by_sequences * common) / determinant
    # A slope is not negative, and no steeper than proportional.
    return Line(
        seconds,
        min(max(slope, 0.0), seconds / max(sequences, 1.0)),
        sequences,
        min(max(rank_slope, 0.0), seconds / max(rank, 1.0)),
        rank,
    )


def _snapped(ratio: float) -> float:
    return 1.0 if 1.0 / SNAP < ratio < SNAP else ratio
