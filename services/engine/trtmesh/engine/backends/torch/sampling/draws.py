"""Draws one token per row.

The cumulative distribution is added up in the order of ids, independently of the batch. Rows with a small top_k draw
among their candidates alone: the same token for a fraction of the work, because filtered tokens have no weight.

A draw depends on (seed, batch_index, sequence_index, position) alone, and not on the rest of the batch, earlier draws
or the worker. A sampled stream is therefore reproducible and can continue elsewhere.

The formula, on 64-bit words with wrapping arithmetic, is SplitMix64's output function applied in a chain:

    mix(x):  x ^= x >> 30;  x *= 0xBF58476D1CE4E5B9
             x ^= x >> 27;  x *= 0x94D049BB133111EB
             x ^= x >> 31
    state = mix(seed + G),  then for each word w of (batch_index, sequence_index, position):
    state = mix((state ^ w) + G),  with G = 0x9E3779B97F4A7C15
    uniform = (state >> 11) * 2**-53

`mix` is a bijection, so two places with one different coordinate never share a state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from trtmesh.chassis.vocabulary import Sampling
from trtmesh.engine.backends.torch.sampling.continuation import Continuation

MOST_CANDIDATES = 1024
"""Highest top_k for which sorting candidates costs less than the whole vocabulary."""
PEAKS = 256
"""Most likely tokens that top_p tries before it sorts the whole vocabulary."""

Descending = Callable[[Tensor], Tensor]
"""Sorts each row, highest first."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)

Words = SequenceOf[int] | NDArray[np.uint64]


def draw(sequences: SequenceOf[Continuation], logits: Tensor, filters: Filters) -> Tensor:
    """The tokens [rows] of `logits` [rows, vocabulary]; the token of a row without a finite peak means nothing."""
    numbers = uniforms(
        [sequence.token_rules.sampling.seed or 0 for sequence in sequences],
        [sequence.batch_index for sequence in sequences],
        [sequence.sequence_index for sequence in sequences],
        [len(sequence.tokens) for sequence in sequences],
    )
    few = [row for row, sequence in enumerate(sequences) if _has_few(sequence, logits.shape[1])]
    if not few:
        return _draw_many(*_part(range(len(sequences)), sequences, logits, numbers), filters)
    tokens = torch.full((len(sequences),), -1, device=logits.device)
    tokens[few] = _draw_few(*_part(few, sequences, logits, numbers))
    # Waits for the device: a tie at the k-th place is known only now.
    many = (tokens < 0).nonzero()[:, 0].tolist()
    if many:
        tokens[many] = _draw_many(*_part(many, sequences, logits, numbers), filters)
    return tokens


def _has_few(sequence: Continuation, vocabulary_size: int) -> bool:
    top_k = sequence.token_rules.sampling.top_k or vocabulary_size
    return top_k <= MOST_CANDIDATES and top_k < vocabulary_size


_Part = tuple[list[Sampling], list[float], Tensor, Tensor]


def _part(
    rows: SequenceOf[int],
    sequences: SequenceOf[Continuation],
    logits: Tensor,
    numbers: NDArray[np.float64],
) -> _Part:
    """Configs, top_p, logits and numbers [rows, 1] of `rows`."""
    configs = [sequences[row].token_rules.sampling for row in rows]
    top_p = [sequences[row].top_p for row in rows]
    chosen = torch.from_numpy(numbers[rows]).to(logits.device)[:, None]
    return configs, top_p, logits if len(rows) == len(sequences) else logits[rows], chosen


def _draw_many(
    configs: list[Sampling], top_p: list[float], logits: Tensor, numbers: Tensor, filters: Filters
) -> Tensor:
    weights = filters.weights(configs, logits, top_p)
    return _inverted(weights.cumsum_(dim=1), numbers)[:, 0]


def _draw_few(
    configs: list[Sampling], top_p: list[float], logits: Tensor, numbers: Tensor
) -> Tensor:
    """-1 for a row with more ties at the k-th place than candidates."""
    top_k = [c.top_k or 1 for c in configs]
    values, ids = logits.topk(max(top_k) + 1, dim=1)
    scaled = values.double().div_(_temperatures(configs, logits))
    scaled.sub_(scaled[:, :1].clone())
    lowest = scaled.gather(1, torch.tensor(top_k, device=logits.device)[:, None] - 1)
    complete = scaled[:, -1] < lowest[:, 0]
    weights = scaled.exp().masked_fill_(scaled < lowest, 0.0)
    if min(top_p) < 1:
        # cumsum, not sum: trailing zeros must not change the result.
        reached = weights.cumsum(dim=1)
        share = _column(top_p, logits)
        bounds = _share_bound(scaled, reached, share * reached[:, -1:])
        weights.masked_fill_((scaled < bounds) & (share < 1), 0.0)
    min_p = [c.min_p or 0.0 for c in configs]
    if max(min_p) > 0:
        weights.masked_fill_(scaled < _column(min_p, logits).log(), 0.0)
    by_id = ids.argsort(dim=1)
    places = _inverted(weights.gather(1, by_id).cumsum_(dim=1), numbers)
    tokens = ids.gather(1, by_id.gather(1, places))[:, 0]
    return tokens.masked_fill_(~complete, -1)


def _temperatures(configs: SequenceOf[Sampling], like: Tensor) -> Tensor:
    return _column([1.0 if c.temperature is None else c.temperature for c in configs], like)


def _inverted(cumulative: Tensor, numbers: Tensor) -> Tensor:
    """The first place [rows, 1] at which each row of `cumulative` exceeds the share `numbers` [rows, 1] of its end."""
    totals = cumulative[:, -1:].contiguous()
    places = torch.searchsorted(cumulative, numbers * totals, right=True)
    # Rounding may lift a target to the total, which means the last token with weight. NaN is found beyond the end.
    places = torch.minimum(places, torch.searchsorted(cumulative, totals))
    return places.clamp_(max=cumulative.shape[1] - 1)


def uniforms(
    seeds: Words, batch_indexes: Words, sequence_indexes: Words, positions: Words
) -> NDArray[np.float64]:
    """Numbers in [0, 1), one per index of the equally long arguments.

    `positions` are indexes of the drawn tokens in their sequences, prompt included.
    """
    state = _mix(_words(seeds) + _GOLDEN)
    for words in (batch_indexes, sequence_indexes, positions):
        state = _mix((state ^ _words(words)) + _GOLDEN)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _words(values: Words) -> NDArray[np.uint64]:
    return np.asarray(values, dtype=np.uint64)


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))


class Filters:
    """temperature, then top_k, top_p and min_p, each a lower bound for logits: equal logits pass or fail together."""

    def __init__(self, descending: Descending) -> None:
        self._descending = descending

    def weights(
        self, configs: SequenceOf[Sampling], logits: Tensor, top_p: SequenceOf[float]
    ) -> Tensor:
        """The weights [rows, vocabulary] float64; 0 for filtered tokens.

        `top_p` replaces the value of each config: it may have decayed.
        """
        scaled = logits.double().div_(_temperatures(configs, logits))
        scaled.sub_(scaled.amax(dim=1, keepdim=True))
        weights = scaled.exp()
        lowest = self._lowest(configs, top_p, scaled, weights)
        if lowest is not None:
            weights.masked_fill_(scaled < lowest, 0.0)
        return weights

    def _lowest(
        self,
        configs: SequenceOf[Sampling],
        top_p: SequenceOf[float],
        scaled: Tensor,
        weights: Tensor,
    ) -> Tensor | None:
        """The lowest logit to keep in each row, [rows, 1]; None without a filter.

        `scaled` are logits below a peak of 0, `weights` their exponentials.
        """
        size = scaled.shape[1]
        bounds = []
        top_k = [min(c.top_k or size, size) for c in configs]
        if min(top_k) < size:
            bounds.append(_top_k_bound(scaled, top_k))
        if min(top_p) < 1:
            top_k_bound = bounds[0] if bounds else None
            share = _column(top_p, scaled)
            bounds.append(self._top_p_bound(scaled, weights, top_k_bound, share))
        min_p = [c.min_p or 0.0 for c in configs]
        if max(min_p) > 0:
            bounds.append(_column(min_p, scaled).log())
        return torch.cat(bounds, dim=1).amax(dim=1, keepdim=True) if bounds else None

    def _top_p_bound(
        self, scaled: Tensor, weights: Tensor, lowest: Tensor | None, top_p: Tensor
    ) -> Tensor:
        """The lowest logit of the smallest set of most likely tokens with a share of `top_p` in all kept tokens."""
        kept = weights if lowest is None else weights.masked_fill(scaled < lowest, 0.0)
        needed = top_p * kept.sum(dim=1, keepdim=True)
        limited = top_p[:, 0] < 1
        values = scaled.topk(min(PEAKS, scaled.shape[1]), dim=1).values
        reached = values.exp().cumsum_(dim=1)
        bounds = _share_bound(values, reached, needed)
        flat = (limited & (reached[:, -1] < needed[:, 0])).nonzero()[:, 0]
        if len(flat):
            values = self._descending(scaled[flat])
            bounds[flat] = _share_bound(values, values.exp().cumsum_(dim=1), needed[flat])
        return bounds.masked_fill_(~limited[:, None], -math.inf)


def _column(values: SequenceOf[float], like: Tensor) -> Tensor:
    """[rows, 1] float64 on the device of `like`."""
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def _top_k_bound(scaled: Tensor, top_k: list[int]) -> Tensor:
    """The k-th highest value of each row; -inf where k covers the vocabulary."""
    size = scaled.shape[1]
    most = max(k for k in top_k if k < size)
    values = scaled.topk(most, dim=1).values
    places = torch.tensor([[min(k, most) - 1] for k in top_k], device=scaled.device)
    unlimited = torch.tensor([[k >= size] for k in top_k], device=scaled.device)
    return values.gather(1, places).masked_fill_(unlimited, -math.inf)


def _share_bound(values: Tensor, reached: Tensor, needed: Tensor) -> Tensor:
    """The first of the falling `values` at which `reached`, their cumulative sum, is at least `needed`: [rows, 1]."""
    places = (reached < needed).sum(dim=1, keepdim=True).clamp_(max=values.shape[1] - 1)
    return values.gather(1, places)
