"""top_k, top_p and min_p, each a lowest logit to keep: equal logits pass or fail together.

* `top_k`: the highest logit that at least k tokens reach.
* `top_p`, among the tokens within `top_k`: the highest logit reached by tokens with at least `top_p` of all weight. The
  weight of a token is exp((logit - highest logit) * (1 / temperature)) in float64, rounded down to a multiple of
  2**-40. These are added up as integers, so no order changes a sum; between kinds of hardware, whose exponentials may
  differ in the last bit, a weight in some 10**4 may be one such multiple larger or smaller.
* `min_p`: highest logit + temperature * ln(min_p).

A bound is the highest of the three, and -inf for a filter that no token limits. Errors of the logits move a bound by a
token where two logits nearly agree at the k-th place, or a sum of weights and `top_p`. Such a move changes the draw
only if this token wins. With probabilities known to an error e, `top_p` changes about 2e of all draws; `top_k` and
`min_p` change fewer, because tokens at these bounds rarely win.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from trtmesh.chassis.vocabulary import Sampling
from trtmesh.engine.backends.torch.sampling.ordering import Ordering

FEW = 1024
"""Up to this top_k, top_p is computed among the candidates alone."""
LIKELY = 256
"""Most likely tokens tried by top_p before sorting the whole vocabulary."""
HIGHEST = float(np.finfo(np.float64).max)
WHOLE = 2**40
"""The weight of the highest logit, as an integer: sums of up to 2**22 tokens fit."""


class Filters:
    """Finds the lowest kept logit of each row."""

    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering

    def weights(
        self, configs: SequenceOf[Sampling], logits: Tensor, top_p: SequenceOf[float]
    ) -> Tensor:
        """The weights [rows, vocabulary] float64; 0 for filtered tokens."""
        peaks = logits.amax(dim=1, keepdim=True)
        weights = _weights(configs, logits, peaks)
        return weights.masked_fill_(logits < self.lowest(configs, logits, peaks, top_p), 0.0)

    def probabilities(self, config: Sampling, row: Tensor, top_p: float) -> Tensor:
        """[vocabulary] float64, by a row of logits [1, vocabulary]; all 0 where no token is left."""
        if bool(row.amax() == -math.inf):
            return torch.zeros_like(row[0], dtype=torch.float64)
        weights = self.weights([config], row, [top_p])[0]
        return weights / weights.sum()

    def lowest(
        self, configs: SequenceOf[Sampling], logits: Tensor, peaks: Tensor, top_p: SequenceOf[float]
    ) -> Tensor:
        """The lowest logit to keep in each row, [rows, 1] float64.

        `peaks` [rows, 1] are the highest of `logits` [rows, vocabulary]. `top_p` replaces the configs' values, which
        may have decayed.
        """
        size = logits.shape[1]
        top_k = [min(c.top_k or size, size) for c in configs]
        few = {row for row, k in enumerate(top_k) if k < size and k <= FEW}
        many = [
            row
            for row, (k, share) in enumerate(zip(top_k, top_p, strict=True))
            if row not in few and (k < size or share < 1)
        ]
        part = _Part(configs, logits, peaks, top_p)
        lowest = column([-math.inf] * len(configs), logits)
        for rows, bounds in ((sorted(few), self._among_few), (many, self._among_all)):
            if len(rows) == len(configs):
                lowest = bounds(part)
            elif rows:
                lowest.index_copy_(0, indexes(rows, logits), bounds(part.of(rows)))
        depths = [depth_of(config) for config in configs]
        if max(depths) > -math.inf:
            lowest = torch.maximum(lowest, column(depths, logits) + peaks)
        return lowest

    def _among_few(self, part: _Part) -> Tensor:
        """The bounds of top_k, and of top_p among the tokens within top_k."""
        top_k = [c.top_k or 1 for c in part.configs]
        values = self._ordering.top(part.logits, max(top_k) + 1)
        last = indexes([k - 1 for k in top_k], values)[:, None]
        kth = values.gather(1, last)
        if min(part.top_p) == 1:
            return kth.double()
        reached = part.weights_of(values).masked_fill_(values < kth, 0).cumsum_(dim=1)
        total = reached[:, -1:]
        # Tokens that tie with the k-th pass too, though `values` may lack them.
        if not self._ordering.looks_ahead or bool((values.gather(1, last + 1) == kth).any()):
            ties = (part.logits == kth).sum(dim=1) - (values == kth).sum(dim=1)
            total = total + ties[:, None] * part.weights_of(kth)
        bounds = _first_reaching(values, reached, part.share * total)
        return torch.where(part.share < 1, torch.maximum(bounds, kth), kth).double()

    def _among_all(self, part: _Part) -> Tensor:
        """The same with a high top_k, or none."""
        size = part.logits.shape[1]
        logits, kth = part.logits, None
        top_k = [min(c.top_k or size, size) for c in part.configs]
        if min(top_k) < size:
            values = self._ordering.top(logits, max(k for k in top_k if k < size))
            last = indexes([min(k, values.shape[1]) - 1 for k in top_k], values)[:, None]
            unlimited = column(top_k, values) == size
            kth = values.gather(1, last).masked_fill_(unlimited, -math.inf)
            if min(part.top_p) == 1:
                return kth.double()
            logits = logits.masked_fill(logits < kth, -math.inf)
        total = part.weights_of(logits).sum(dim=1, keepdim=True)
        bounds = self._reaching(part, logits, part.share * total)
        bounds = bounds.masked_fill_(part.share >= 1, -math.inf)
        return (bounds if kth is None else torch.maximum(bounds, kth)).double()

    def _reaching(self, part: _Part, logits: Tensor, needed: Tensor) -> Tensor:
        """The first of the falling `logits` with a sum of weights of at least `needed`, [rows, 1]."""
        if not self._ordering.looks_ahead:
            return self._bounds(part, self._ordering.descending(logits), needed)[0]
        likely = self._ordering.top(logits, min(LIKELY, logits.shape[1]))
        bounds, reached = self._bounds(part, likely, needed)
        flat = (reached < needed)[:, 0].nonzero()[:, 0]
        if len(flat):
            rest, values = part.of(flat.tolist()), self._ordering.descending(logits[flat])
            bounds[flat] = self._bounds(rest, values, needed[flat])[0]
        return bounds

    def _bounds(self, part: _Part, values: Tensor, needed: Tensor) -> tuple[Tensor, Tensor]:
        """The first of the falling `values` with a sum of weights of at least `needed`, and the sum of all weights."""
        reached = part.weights_of(values).cumsum_(dim=1)
        return _first_reaching(values, reached, needed), reached[:, -1:]


@dataclass(frozen=True, slots=True)
class _Part:
    """Some rows of a step."""

    configs: SequenceOf[Sampling]
    logits: Tensor
    peaks: Tensor
    top_p: SequenceOf[float]

    def of(self, rows: list[int]) -> _Part:
        where = indexes(rows, self.logits)
        configs = [self.configs[row] for row in rows]
        top_p = [self.top_p[row] for row in rows]
        return _Part(configs, self.logits[where], self.peaks[where], top_p)

    @property
    def share(self) -> Tensor:
        return column(self.top_p, self.logits)

    def weights_of(self, values: Tensor) -> Tensor:
        """The weights of some logits [rows, any number] as integers."""
        return _weights(self.configs, values, self.peaks).mul_(WHOLE).long()


def _weights(configs: SequenceOf[Sampling], values: Tensor, peaks: Tensor) -> Tensor:
    factors = temperatures(configs, values).reciprocal_().clamp_(max=HIGHEST)
    return values.double().sub_(peaks).mul_(factors).exp_()


def _first_reaching(values: Tensor, reached: Tensor, needed: Tensor) -> Tensor:
    places = (reached < needed).sum(dim=1, keepdim=True).clamp_(max=values.shape[1] - 1)
    return values.gather(1, places)


def temperatures(configs: SequenceOf[Sampling], like: Tensor) -> Tensor:
    return column([temperature_of(config) for config in configs], like)


def temperature_of(config: Sampling) -> float:
    return 1.0 if config.temperature is None else config.temperature


def depth_of(config: Sampling) -> float:
    """The difference between the lowest logit within `min_p` and the highest of all."""
    return math.log(config.min_p) * temperature_of(config) if config.min_p else -math.inf


def column(values: SequenceOf[float], like: Tensor) -> Tensor:
    """[rows, 1] float64 on the device of `like`, without waiting."""
    return given(np.array(values, dtype=np.float64), like)[:, None]


def indexes(values: SequenceOf[int], like: Tensor) -> Tensor:
    """[rows] int64 on the device of `like`, without waiting."""
    return given(np.array(values, dtype=np.int64), like)


def given(
    values: NDArray[np.float64] | NDArray[np.float32] | NDArray[np.int64] | NDArray[np.bool_],
    like: Tensor,
) -> Tensor:
    """A copy on the device of `like`, without waiting."""
    return torch.from_numpy(values).to(like.device, non_blocking=True)
