"""Histograms of what a core model took and gave, with the buckets of TensorRT-LLM's backend."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

BOUNDS = (10, 50, 100, 500, 1000)


class TokenLengths:
    """Tokens of prompts and of outputs, those of all sequences of an output together."""

    def __init__(self) -> None:
        self.prompts = Lengths()
        self.outputs = Lengths()

    def observe(self, prompt_tokens: int, generated_tokens: int) -> None:
        """One item ended."""
        self.prompts.observe(prompt_tokens)
        self.outputs.observe(generated_tokens)


class Lengths:
    """One histogram of whole numbers."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self.total = 0

    def observe(self, value: int) -> None:
        self._counts[bisect_left(BOUNDS, value)] += 1
        self.total += value

    def buckets(self) -> Iterator[tuple[str, int]]:
        """Upper bounds, and how many values were not above each."""
        bounds = (*map(str, BOUNDS), "+Inf")
        return zip(bounds, accumulate(self._counts), strict=True)
