"""The tokens of a running sequence, as seen by the choice of the next token: no KV, no blocks, no schedule."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from trtmesh.chassis.log_prob_sums import next_sum
from trtmesh.chassis.stopping import EndRule
from trtmesh.chassis.vocabulary import Sampling
from trtmesh.engine.backends.torch.guided.grammars import Grammar, Guide
from trtmesh.engine.backends.torch.sampling.token_rules import Ids, TokenRules

if TYPE_CHECKING:
    # An engine reads its files before it takes the time to import torch.
    from torch import Tensor

TOP_P_MIN = 1e-6
"""Default lower bound of a decaying top_p, as in TensorRT-LLM."""

HASH_MODULUS = 2**61 - 1
HASH_BASE = 0x1B873593CC9E2D51
"""Any number below the modulus and far above all ids."""


@dataclass(frozen=True, slots=True)
class GivenDrafts:
    """Drafts of a client, with the logits that they were drawn from."""

    token_ids: list[int]
    logits: Tensor
    """[drafts, vocabulary] of the last drafts; those before are compared with the ordinary choice."""
    threshold: float | None
    """Of acceptance."""

    @property
    def first(self) -> int:
        """The first draft with logits."""
        return len(self.token_ids) - len(self.logits)


@dataclass(eq=False)
class Continuation:
    """Tokens, the rules of their item, and the coordinates of their draws."""

    key: int
    batch_index: int
    sequence_index: int
    tokens: list[int]
    """Prompt and generated tokens."""
    rule: EndRule
    token_rules: TokenRules
    grammar: Grammar | None = None
    """Allows tokens, where the item asks for guided decoding."""
    given_drafts: GivenDrafts | None = None
    """Decide about tokens until the first that differs."""
    history: History | None = None
    """Memory of the rules; None until needed, and again when `tokens` is replaced."""
    cumulative_log_prob: float | None = None

    @property
    def prompt_tokens(self) -> int:
        return self.rule.prompt_tokens

    @property
    def generated_tokens(self) -> int:
        return len(self.tokens) - self.rule.prompt_tokens

    def remember(self) -> None:
        """Brings the history up to date with the tokens."""
        self._memory.catch_up(self.tokens)

    @property
    def guide(self) -> Guide | None:
        """Follows the grammar, which must be there if the item asks for guided decoding."""
        return self._memory.guide

    @property
    def _memory(self) -> History:
        if self.history is None:
            self.history = History(self.token_rules, self.prompt_tokens, self.grammar)
        return self.history

    @property
    def deciding_draft(self) -> int | None:
        """The index of the given draft of the next token, where it has logits; None after a token that was no draft."""
        given, count = self.given_drafts, self.generated_tokens
        if given is None or not given.first <= count < len(given.token_ids):
            return None
        return count if self.tokens[self.prompt_tokens :] == given.token_ids[:count] else None

    @property
    def top_p(self) -> float:
        if self.history is not None and self.history.top_p is not None:
            return self.history.top_p.value
        top_p = self.token_rules.sampling.top_p
        return 1.0 if top_p is None else top_p

    def add_log_probs(self, log_probs: list[float]) -> float | None:
        """Adds log-probabilities of new tokens; returns the new sum, or None without any."""
        for log_prob in log_probs:
            self.cumulative_log_prob = next_sum(self.cumulative_log_prob or 0.0, log_prob)
        return self.cumulative_log_prob


class History:
    """Counts over earlier tokens, for the rules of a sequence.

    The counts are pure functions of the tokens, so equal on every worker and after any number of runs.
    """

    def __init__(self, rules: TokenRules, prompt_tokens: int, grammar: Grammar | None) -> None:
        sampling = rules.sampling
        self.guide = Guide(grammar, prompt_tokens) if grammar else None
        self.occurrences = Occurrences(sampling, prompt_tokens) if rules.penalises else None
        self.ngrams = Ngrams(sampling.no_repeat_ngram_size) if rules.bars_ngrams else None
        self.top_p = DecayingTopP(sampling, prompt_tokens) if rules.decays_top_p else None

    def catch_up(self, tokens: SequenceOf[int]) -> None:
        """Takes in the tokens added since the last call; earlier tokens must be unchanged."""
        if self.guide:
            self.guide.catch_up(tokens)
        if self.occurrences:
            self.occurrences.catch_up(tokens)
        if self.ngrams:
            self.ngrams.catch_up(tokens)
        if self.top_p:
            self.top_p.catch_up(tokens)


class Occurrences:
    """Distinct ids, in the order of first occurrence, and how often presence and frequency penalties count each."""

    def __init__(self, sampling: Sampling, prompt_tokens: int) -> None:
        self._next = 0
        self._counted_from = sampling.ignored_prompt(prompt_tokens)
        self._places: dict[int, int] = {}
        self._ids = array("q")
        self._counts = array("q")

    @property
    def ids(self) -> Ids:
        """A copy, because a viewed array cannot grow."""
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
            if position >= self._counted_from:
                self._counts[place] += 1
        self._next = max(self._next, len(tokens))


class Ngrams:
    """The ids after each run of `size - 1` tokens, prompt included.

    Runs are keyed by a rolling hash (Karp and Rabin, https://doi.org/10.1147/rd.312.0249), so time and memory do not
    depend on `size`. Two runs collide by chance once in 2**61; a client who forces collisions only bans more ids in
    that client's sequence.
    """

    def __init__(self, size: int) -> None:
        self._before = size - 1
        self._next = size - 1
        self._followers: dict[int, dict[int, None]] = {}
        # The hash of the run before the token at `_end`.
        self._hash = self._end = 0
        self._leaving = pow(HASH_BASE, size - 1, HASH_MODULUS)

    def catch_up(self, tokens: SequenceOf[int]) -> None:
        for position in range(self._next, len(tokens)):
            run = self._run_before(position, tokens)
            self._followers.setdefault(run, {})[tokens[position]] = None
        self._next = max(self._next, len(tokens))

    def repeating(self, tokens: SequenceOf[int]) -> SequenceOf[int]:
        """Ids whose choice would repeat an n-gram."""
        if len(tokens) < self._before:
            return ()
        return list(self._followers.get(self._run_before(len(tokens), tokens), ()))

    def _run_before(self, end: int, tokens: SequenceOf[int]) -> int:
        """The hash of the run before the token at `end`. `end` never decreases between calls."""
        value = self._hash
        for position in range(self._end, end):
            value = value * HASH_BASE + tokens[position] + 1
            if position >= self._before:
                value -= (tokens[position - self._before] + 1) * self._leaving
            value %= HASH_MODULUS
        self._hash, self._end = value, max(self._end, end)
        return value


class DecayingTopP:
    """top_p = max(top_p * decay, min) after each generated token, or the first value after the reset id.

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
