"""What the choice of a token must know of the tokens before it, kept up to date instead of counted anew each step.

Everything here is a function of the tokens: it catches up with them, whoever generated them and in whatever runs.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray
from trtmesh.chassis.vocabulary import Sampling
from trtmesh.engine.backends.torch.sampling.token_rules import Ids, TokenRules

TOP_P_MIN = 1e-6
"""Lower bound of a decaying top_p where none is given, as TensorRT-LLM has it."""

HASH_MODULUS = 2**61 - 1
HASH_BASE = 0x1B873593CC9E2D51
"""Any number below the modulus that is far above all ids."""


class History:
    """The memory of one sequence, as far as its rules need one."""

    def __init__(self, rules: TokenRules, prompt_tokens: int) -> None:
        sampling = rules.sampling
        self.occurrences = Occurrences(sampling, prompt_tokens) if rules.penalises else None
        self.ngrams = Ngrams(sampling.no_repeat_ngram_size) if rules.bars_ngrams else None
        self.top_p = DecayingTopP(sampling, prompt_tokens) if rules.decays_top_p else None

    def catch_up(self, tokens: SequenceOf[int]) -> None:
        """Takes in what `tokens` has more than at the last call; what was there must not have changed."""
        if self.occurrences:
            self.occurrences.catch_up(tokens)
        if self.ngrams:
            self.ngrams.catch_up(tokens)
        if self.top_p:
            self.top_p.catch_up(tokens)


class Occurrences:
    """Distinct ids that the penalties see, in the order of their first occurrence, and how often each was generated."""

    def __init__(self, sampling: Sampling, prompt_tokens: int) -> None:
        self._next = min(sampling.prompt_ignore_length, prompt_tokens)
        self._prompt_tokens = prompt_tokens
        self._places: dict[int, int] = {}
        self._ids = array("q")
        self._counts = array("q")

    @property
    def ids(self) -> Ids:
        """A copy, because an array that is viewed cannot grow."""
        return np.array(self._ids, dtype=np.int64)

    @property
    def counts(self) -> NDArray[np.int64]:
        return np.array(self._counts, dtype=np.int64)

    def catch_up(self, tokens: SequenceOf[int]) -> None:
        for position in range(self._next, len(tokens)):
            token = tokens[position]
            place = self._places.setdefault(token, len(self._ids))
            if place == len(self._ids):
                self._ids.append(token)
                self._counts.append(0)
            if position >= self._prompt_tokens:
                self._counts[place] += 1
        self._next = max(self._next, len(tokens))


class Ngrams:
    """Which ids have followed each run of `size - 1` tokens, prompt included.

    A run is known by a hash that rolls along with the tokens (Karp and Rabin, https://doi.org/10.1147/rd.312.0249), so
    it takes the same room and time whatever its size. Two runs share a hash by chance once in 2**61; whoever makes such
    tokens on purpose bans some ids too many for himself.
    """

    def __init__(self, size: int) -> None:
        self._before = size - 1
        self._next = size - 1
        self._followers: dict[int, dict[int, None]] = {}
        # Of the run that ends before the token at `_end`.
        self._hash = self._end = 0
        self._leaving = pow(HASH_BASE, size - 1, HASH_MODULUS)

    def catch_up(self, tokens: SequenceOf[int]) -> None:
        for position in range(self._next, len(tokens)):
            run = self._run_before(position, tokens)
            self._followers.setdefault(run, {})[tokens[position]] = None
        self._next = max(self._next, len(tokens))

    def repeating(self, tokens: SequenceOf[int]) -> SequenceOf[int]:
        """Ids that would complete an n-gram that occurred before."""
        if len(tokens) < self._before:
            return ()
        return list(self._followers.get(self._run_before(len(tokens), tokens), ()))

    def _run_before(self, end: int, tokens: SequenceOf[int]) -> int:
        """The hash of the run that ends before the token at `end`, which is no earlier one than at the last call."""
        value = self._hash
        for position in range(self._end, end):
            value = value * HASH_BASE + tokens[position] + 1
            if position >= self._before:
                value -= (tokens[position - self._before] + 1) * self._leaving
            value %= HASH_MODULUS
        self._hash, self._end = value, max(self._end, end)
        return value


class DecayingTopP:
    """top_p = max(top_p * decay, min) after each generated token, or its first value after the reset id.

    The rule of TensorRT-LLM, after https://arxiv.org/abs/2206.04624.
    """

    def __init__(self, sampling: Sampling, prompt_tokens: int) -> None:
        self._first = 1.0 if sampling.top_p is None else sampling.top_p
        self._decay = 1.0 if sampling.top_p_decay is None else sampling.top_p_decay
        self._min = TOP_P_MIN if sampling.top_p_min is None else sampling.top_p_min
        self._reset_id = sampling.top_p_reset_id
        self._next = prompt_tokens
        self.value = self._first

    def catch_up(self, tokens: SequenceOf[int]) -> None:
        for position in range(self._next, len(tokens)):
            if tokens[position] == self._reset_id:
                self.value = self._first
            else:
                self.value = max(self.value * self._decay, self._min)
        self._next = max(self._next, len(tokens))
