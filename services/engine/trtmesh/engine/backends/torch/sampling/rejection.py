"""Drafts with the logits that they were drawn from: accepted by rejection sampling (https://arxiv.org/abs/2302.01318),
so that the tokens have the model's distribution, whatever made the drafts.

At a draft d, p are the model's probabilities and q those of the logits with the draft, both after the item's bias,
penalties, bans, grammar, temperature and filters. The token is d where p(d) >= u * q(d), for u uniform in (0, 1), else
it is drawn from p - q where that is above 0. An acceptance threshold of the client takes the place of u, as in
TensorRT-LLM; then the distribution is another.

u and the draw are pure functions of (seed, batch_index, sequence_index, position), and independent of the ordinary
noise, with which a model of this mesh may have drawn d. The token after a rejection is never d: so the token is d if
and only if d is accepted, the tokens say where drafts end, and the choice does not depend on how many are verified in a
step, nor on the worker.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from trtmesh.engine.backends.torch.sampling.draws import draw_by_weights, uniform


def verified(
    draft: int, model: Tensor, source: Tensor, threshold: float | None, place: NDArray[np.int64]
) -> int:
    """The draft, or the token in its stead, by the probabilities [vocabulary] of the model and the draft's source."""
    bound = uniform(place) if threshold is None else threshold
    probability = float(model[draft])
    if 0.0 < probability >= bound * float(source[draft]):
        return draft
    rest = (model - source).clamp_(min=0.0)
    # Only rounding leaves nothing.
    return draw_by_weights(rest if bool(rest.any()) else model, place)
