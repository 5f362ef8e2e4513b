"""How fast a worker is, learned from its load reports and from the first tokens of what was sent to it."""

from __future__ import annotations

from dataclasses import dataclass

SMOOTHING = 0.2
"""Weight of a new sample in an exponentially weighted mean."""

FALLBACK_PREFILL_RATE = 2000.0
"""Prompt tokens a second of a worker of which nothing is known."""

FALLBACK_STEP_SECONDS = 0.02

LEAST_PROMPT_TOKENS = 64
"""Shorter prompts say more about the length of a step than about the prefill."""

MOST_RATE = 1e7


@dataclass(frozen=True, slots=True)
class Report:
    """What a load report says that rates and waits are made from, and when it arrived, in seconds of a clock."""

    at: float
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

    * prefill rate: prompt tokens computed between two reports that both had some waiting; and, for a prompt that found
      the worker idle, its tokens over the time to its first token less one step.
    * step time, as a line over the number of running sequences: time between two busy reports over the steps made, by
      exponentially weighted least squares.
    """

    def __init__(self) -> None:
        self.prefill_rate = Ewma()
        self._sequences = Ewma()
        self._seconds = Ewma()
        self._squares = Ewma()
        self._products = Ewma()

    def learn(self, before: Report, after: Report) -> None:
        """Two successive reports of one process."""
        seconds, steps = after.at - before.at, after.step_count - before.step_count
        if seconds <= 0 or steps <= 0:
            return
        computed = after.computed_prompt_tokens - before.computed_prompt_tokens
        if before.pending_prompt_tokens and after.pending_prompt_tokens and computed > 0:
            self.prefill_rate.add(min(computed / seconds, MOST_RATE))
        elif before.running_sequences and after.running_sequences and computed == 0:
            # A step that also computes prompts takes longer, and that is the prefill's time.
            running = (before.running_sequences + after.running_sequences) / 2
            self._sequences.add(running)
            self._seconds.add(seconds / steps)
            self._squares.add(running * running)
            self._products.add(running * seconds / steps)

    def learn_first_token(self, prompt_tokens: int, seconds: float) -> None:
        """A prompt that found the worker idle had `prompt_tokens` computed and its first token after `seconds`."""
        if prompt_tokens >= LEAST_PROMPT_TOKENS:
            spent = max(seconds - (self._seconds.value or 0.0), prompt_tokens / MOST_RATE)
            self.prefill_rate.add(prompt_tokens / spent)

    def step_seconds(self, sequences: int) -> float | None:
        """Predicted time of a step with so many sequences; None while nothing is known."""
        mean, seconds = self._sequences.value, self._seconds.value
        squares, products = self._squares.value, self._products.value
        if mean is None or seconds is None or squares is None or products is None:
            return None
        variance = squares - mean * mean
        slope = (products - mean * seconds) / variance if variance > 1e-6 * squares else 0.0
        # A step never gets shorter with more sequences, and never costs more a sequence than all of it.
        slope = min(max(slope, 0.0), seconds / max(mean, 1.0))
        return seconds + slope * (sequences - mean)
