"""The rules of an item for the choice of tokens, compiled once for all sequences and steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as SequenceOf
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from trtmesh.chassis.vocabulary import GenerationConfig, IdSequence, Output, Sampling
from trtmesh.v1.generation_fields import FILTERS

Ids = NDArray[np.int64]
HIGHEST_BIAS = 1e30
"""A higher bias has no further effect, and sums must stay finite."""
NO_BIAS = (1.0, 0.0, 0.0)
BANS = (
    "stopping.bad_token_ids",
    "sampling.no_repeat_ngram_size",
    "sampling.embedding_bias",
    "stopping.min_tokens",
)
"""Fields for forbidding tokens."""
GUIDES = ("guided_decoding.guide", "stopping.ignore_end_id")
"""Fields for allowing tokens."""


class TokenRules:
    """Precomputed answers to the questions of every step."""

    def __init__(self, config: GenerationConfig, *, normalize_log_probs: bool = False) -> None:
        """`normalize_log_probs` is the worker's default."""
        sampling, output = config.sampling, config.output
        self.sampling: Sampling = sampling
        self.output: Output = output
        self.greedy = sampling.greedy
        self.filters = not self.greedy and any(
            getattr(sampling, name) not in harmless for name, harmless in FILTERS.items()
        )
        penalties = (
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        self.penalises = penalties != NO_BIAS
        self.bars_ngrams = sampling.no_repeat_ngram_size > 0
        self.decays_top_p = not self.greedy and (
            sampling.top_p_decay is not None or sampling.top_p_min is not None
        )
        self.guided = config.guided_decoding is not None
        self.remembers = self.penalises or self.bars_ngrams or self.decays_top_p or self.guided
        self.biases = bool(sampling.embedding_bias or sampling.embedding_bias_token_ids)
        self._bad_words = config.stopping.bad_token_ids
        self.bars_words = bool(self._bad_words)
        self.bars_longer_words = any(len(word) > 1 for word in self._bad_words)
        self.adjusts = (
            self.penalises or self.bars_ngrams or self.biases or self.bars_words or self.guided
        )
        self.wants_log_probs = output.log_probs or output.top_log_probs > 0
        self.wants_details = self.wants_log_probs or output.generation_logits
        asked = output.normalize_log_probs
        self.normalizes = normalize_log_probs if asked is None else asked

    @cached_property
    def bias(self) -> tuple[Ids, NDArray[np.float32]]:
        """Distinct ids and the bias of their logits."""
        sampling = self.sampling
        weights: defaultdict[int, float] = defaultdict(float)
        # Texts were replaced by ids before.
        for ids, weight in zip(
            sampling.embedding_bias_token_ids, sampling.embedding_bias_weights, strict=True
        ):
            for token in ids:
                weights[token] += weight
        if not sampling.embedding_bias:
            ids_only = np.fromiter(weights, np.int64, len(weights))
            return ids_only, _finite_above(np.fromiter(weights.values(), float, len(weights)))
        dense = np.array(sampling.embedding_bias)
        for token, weight in weights.items():
            dense[token] += weight
        changed = np.flatnonzero(dense)
        return changed, _finite_above(dense[changed])

    @cached_property
    def bad_ids(self) -> Ids:
        """Bad words of a single id."""
        return np.array([word[0] for word in self._bad_words if len(word) == 1], dtype=np.int64)

    @cached_property
    def _longer_bad_words(self) -> dict[int, list[IdSequence]]:
        """Bad words of several ids, by the last id but one."""
        words: dict[int, list[IdSequence]] = {}
        for word in self._bad_words:
            if len(word) > 1:
                words.setdefault(word[-2], []).append(word)
        return words

    def completing_ids(self, tokens: SequenceOf[int]) -> list[int]:
        """Ids that would complete a bad word of several ids; `tokens` include the prompt."""
        words = self._longer_bad_words.get(tokens[-1], ())
        return [word[-1] for word in words if tuple(tokens[1 - len(word) :]) == word[:-1]]


def _finite_above(weights: NDArray[np.float64]) -> NDArray[np.float32]:
    return np.minimum(weights, HIGHEST_BIAS).astype(np.float32)
