"""Optional data of a chosen token: log-probabilities, alternatives, logits.

Log-probabilities come from the model's own logits. Normalised ones count only the tokens that could be chosen, after
bias, penalties, bans, temperature and filters; a greedy token has 0. As with TensorRT-LLM's `normalize_log_probs`, the
sum stays that of the model's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor
from torch.nn.functional import pad
from trtmesh.engine.backend import TokenDetails, TopLogProbs
from trtmesh.engine.backends.torch.memory.tensors import to_message
from trtmesh.engine.backends.torch.sampling.continuation import Continuation
from trtmesh.engine.backends.torch.sampling.filters import Filters


def details_of(
    sequence: Continuation,
    token: int,
    log_probs: Tensor | None,
    normalized: Tensor | None,
    logits: Tensor,
) -> TokenDetails:
    """The details that its item asks for, from log-probabilities [vocabulary] and `logits` [1, vocabulary]."""
    details, output = TokenDetails(sequence.key), sequence.token_rules.output
    if log_probs is not None:
        if normalized is not None:
            details.model_log_probs.append(float(log_probs[token]))
            log_probs = normalized
        details.log_probs.append(float(log_probs[token]))
        if output.top_log_probs:
            details.top_log_probs.append(most_likely(log_probs, output.top_log_probs))
    if output.generation_logits:
        details.generation_logits = to_message(logits, output.logits_data_type)
    return details


def most_likely(log_probs: Tensor, count: int) -> TopLogProbs:
    """The `count` most likely ids of a row, without impossible ids."""
    values, ids = log_probs.topk(min(count, len(log_probs)))
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    return [(token, value) for token, value in pairs if value > -torch.inf]


def log_probs_of(sequences: SequenceOf[Continuation], logits: Tensor) -> dict[int, Tensor]:
    """The model's own, [vocabulary] float64, of each row that needs them."""
    asking = [row for row, each in enumerate(sequences) if each.token_rules.wants_log_probs]
    if not asking:
        return {}
    rows = logits if len(asking) == len(sequences) else logits[asking]
    return dict(zip(asking, log_softmax(rows), strict=True))


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities [rows, vocabulary] float64."""
    size = logits.shape[1]
    wide = logits.double()
    if size % 2:
        # Every row begins at an even number: elsewhere a GPU adds it up in another order.
        wide = pad(wide, (0, 1), value=-torch.inf)
    return wide.log_softmax(dim=1)[:, :size]


def normalized_of(
    rows: Iterable[int], sequences: SequenceOf[Continuation], changed: Tensor, filters: Filters
) -> dict[int, Tensor]:
    """[vocabulary] float64 of each of the `rows` that asks for them, from the adjusted logits [rows, vocabulary]."""
    return {
        row: _among_choosable(sequences[row], changed[row : row + 1], filters)
        for row in rows
        if sequences[row].token_rules.normalizes
    }


def _among_choosable(sequence: Continuation, row: Tensor, filters: Filters) -> Tensor:
    """Log-probabilities [vocabulary] of the draw from `row` [1, vocabulary]; -inf for impossible ids."""
    rules = sequence.token_rules
    if rules.greedy:
        only = torch.full_like(row[0], -torch.inf, dtype=torch.float64)
        only[row[0].argmax()] = 0.0
        return only
    weights = filters.weights([rules.sampling], row, [sequence.top_p])[0]
    return (weights / weights.sum()).log()
