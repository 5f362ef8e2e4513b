"""Weights of tokens in a draw. Each filter is a lower bound for logits, so equal logits pass or fail together."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor
from trtmesh.chassis.vocabulary import Sampling

Descending = Callable[[Tensor], Tensor]
"""Sorts each row, highest first."""
CANDIDATES = 256
"""Most likely tokens that top_p tries before it sorts the whole vocabulary."""


class Filters:
    """temperature, then top_k, top_p and min_p."""

    def __init__(self, descending: Descending) -> None:
        self._descending = descending

    def weights(
        self, configs: SequenceOf[Sampling], logits: Tensor, top_p: SequenceOf[float]
    ) -> Tensor:
        """The weights [rows, vocabulary] float64; 0 for filtered tokens.

        `top_p` replaces the value of each config: it may have decayed.
        """
        temperatures = [1.0 if c.temperature is None else c.temperature for c in configs]
        scaled = logits.double().div_(column(temperatures, logits))
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
            share = column(top_p, scaled)
            bounds.append(self._top_p_bound(scaled, weights, top_k_bound, share))
        min_p = [c.min_p or 0.0 for c in configs]
        if max(min_p) > 0:
            bounds.append(column(min_p, scaled).log())
        return torch.cat(bounds, dim=1).amax(dim=1, keepdim=True) if bounds else None

    def _top_p_bound(
        self, scaled: Tensor, weights: Tensor, lowest: Tensor | None, top_p: Tensor
    ) -> Tensor:
        """The lowest logit of the smallest set of most likely tokens with a share of `top_p` in all kept tokens."""
        kept = weights if lowest is None else weights.masked_fill(scaled < lowest, 0.0)
        needed = top_p * kept.sum(dim=1, keepdim=True)
        limited = top_p[:, 0] < 1
        values = scaled.topk(min(CANDIDATES, scaled.shape[1]), dim=1).values
        reached = values.exp().cumsum_(dim=1)
        bounds = share_bound(values, reached, needed)
        flat = (limited & (reached[:, -1] < needed[:, 0])).nonzero()[:, 0]
        if len(flat):
            values = self._descending(scaled[flat])
            bounds[flat] = share_bound(values, values.exp().cumsum_(dim=1), needed[flat])
        return bounds.masked_fill_(~limited[:, None], -math.inf)


def column(values: SequenceOf[float], like: Tensor) -> Tensor:
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


def share_bound(values: Tensor, reached: Tensor, needed: Tensor) -> Tensor:
    """The first of the falling `values` at which `reached`, their cumulative sum, is at least `needed`: [rows, 1]."""
    places = (reached < needed).sum(dim=1, keepdim=True).clamp_(max=values.shape[1] - 1)
    return values.gather(1, places)
