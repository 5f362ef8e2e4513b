"""From logits to tokens.

Greedy takes the highest logit, the lowest id among equals. Sampling filters, renormalises and inverts the cumulative
distribution in the order of ids at the uniform number of (seed, batch_index, sequence_index, position). Every filter
is a lowest logit that stays, so tokens of equal logits stay or go together.

What is guaranteed: the choice is a pure function of a row of logits and those four numbers. What is not: kernels may
round the last bits of the logits differently for another shape of the batch, so a token may differ where two logits
are equal to about 1e-6, or where the uniform number lies that close to a border between two tokens. Everything after
the logits is computed in float64 so that nothing is added to that. With half-precision weights such ties are common.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from trtmesh.chassis.vocabulary import Sampling
from trtmesh.engine.backends.torch.sequence import Sequence
from trtmesh.engine.draws import uniforms

CANDIDATES = 256
"""Most likely tokens that top_p looks at before it sorts the whole vocabulary."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The tokens chosen for the rows of a step. A row that was not finite has `finite` False and no usable token."""

    token_ids: list[int]
    finite: list[bool]
    log_probs: list[float | None]
    top_log_probs: list[list[tuple[int, float]]]


@torch.inference_mode()
def choose(sequences: SequenceOf[Sequence], logits: Tensor) -> Choice:
    """The next token of each sequence; `logits` are [sequences, vocabulary] float32."""
    wanting = [row for row, sequence in enumerate(sequences) if _wants_log_probs(sequence)]
    plain = logits[wanting].double().log_softmax(dim=1) if wanting else None
    logits = _adjusted(sequences, logits)
    peaks, ids = logits.max(dim=1)
    finite = torch.isfinite(peaks).tolist()
    token_ids = ids.tolist()
    drawing = [
        row
        for row, sequence in enumerate(sequences)
        if finite[row] and not sequence.config.sampling.greedy
    ]
    if drawing:
        rows = logits if len(drawing) == len(sequences) else logits[drawing]
        drawn = _draw([sequences[row] for row in drawing], rows)
        for row, token in zip(drawing, drawn, strict=True):
            token_ids[row] = token
    log_probs: list[float | None] = [None] * len(sequences)
    tops: list[list[tuple[int, float]]] = [[] for _ in sequences]
    if plain is not None:
        for index, row in enumerate(wanting):
            log_probs[row] = float(plain[index, token_ids[row]])
            tops[row] = _top(plain[index], sequences[row].config.output.top_log_probs)
    return Choice(token_ids, finite, log_probs, tops)


def _wants_log_probs(sequence: Sequence) -> bool:
    return sequence.config.output.log_probs or sequence.config.output.top_log_probs > 0


def _top(log_probs: Tensor, count: int) -> list[tuple[int, float]]:
    if not count:
        return []
    values, ids = log_probs.topk(min(count, len(log_probs)))
    return list(zip(ids.tolist(), values.tolist(), strict=True))


def _adjusted(sequences: SequenceOf[Sequence], logits: Tensor) -> Tensor:
    """With penalties, and without end ids where a sequence must not end yet; a copy where anything changes."""
    penalised = [row for row, sequence in enumerate(sequences) if sequence.counts is not None]
    endless = [
        row
        for row, sequence in enumerate(sequences)
        if sequence.rule.bans_end_ids(len(sequence.tokens))
    ]
    if penalised or endless:
        logits = logits.clone()
    for row in penalised:
        _penalise(sequences[row], logits[row])
    for row in endless:
        logits[row, list(sequences[row].rule.end_ids)] = -math.inf
    return logits


def _penalise(sequence: Sequence, row: Tensor) -> None:
    sampling = sequence.config.sampling
    if sampling.repetition_penalty != 1 and sequence.seen:
        ids = torch.tensor(sorted(sequence.seen), device=row.device)
        values = row[ids]
        penalty = sampling.repetition_penalty
        row[ids] = torch.where(values > 0, values / penalty, values * penalty)
    if sequence.counts and (sampling.presence_penalty or sampling.frequency_penalty):
        ids = torch.tensor(list(sequence.counts), device=row.device)
        counts = torch.tensor(list(sequence.counts.values()), device=row.device)
        row[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts


def _draw(sequences: SequenceOf[Sequence], logits: Tensor) -> list[int]:
    """One token for each row of `logits` [rows, vocabulary]."""
    configs = [sequence.config.sampling for sequence in sequences]
    # Added up in the order of ids, whatever the batch.
    cumulative = filtered_weights(configs, logits).cumsum_(dim=1)
    draws = uniforms(
        [c.seed or 0 for c in configs],
        [sequence.batch_index for sequence in sequences],
        [sequence.sequence_index for sequence in sequences],
        [len(sequence.tokens) for sequence in sequences],
    )
    totals = cumulative[:, -1:].contiguous()
    targets = torch.from_numpy(draws).to(logits.device)[:, None] * totals
    tokens = torch.searchsorted(cumulative, targets, right=True)
    # Rounding may lift a target to the total; the last token that stayed is meant then.
    last = torch.searchsorted(cumulative, totals)
    chosen: list[int] = torch.minimum(tokens, last)[:, 0].tolist()
    return chosen


def filtered_weights(configs: SequenceOf[Sampling], logits: Tensor) -> Tensor:
    """What each token weighs in the draw, [rows, vocabulary] float64: temperature, then top_k, top_p and min_p."""
    temperatures = [1.0 if c.temperature is None else c.temperature for c in configs]
    scaled = logits.double().div_(_column(temperatures, logits))
    scaled.sub_(scaled.amax(dim=1, keepdim=True))
    weights = scaled.exp()
    lowest = _lowest(configs, scaled, weights)
    if lowest is not None:
        weights.masked_fill_(scaled < lowest, 0.0)
    return weights


def _column(values: list[float], like: Tensor) -> Tensor:
    """[rows, 1] float64 on the device of `like`."""
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def _lowest(configs: SequenceOf[Sampling], scaled: Tensor, weights: Tensor) -> Tensor | None:
    """The lowest logit that stays in each row, [rows, 1]; None where nothing is filtered.

    `scaled` are logits below a peak of 0, `weights` their exponentials.
    """
    size = scaled.shape[1]
    bounds = []
    top_k = [min(c.top_k or size, size) for c in configs]
    if min(top_k) < size:
        bounds.append(_top_k_bound(scaled, top_k))
    top_p = [1.0 if c.top_p is None else c.top_p for c in configs]
    if min(top_p) < 1:
        top_k_bound = bounds[0] if bounds else None
        bounds.append(_top_p_bound(scaled, weights, top_k_bound, _column(top_p, scaled)))
    min_p = [c.min_p or 0.0 for c in configs]
    if max(min_p) > 0:
        bounds.append(_column(min_p, scaled).log())
    return torch.cat(bounds, dim=1).amax(dim=1, keepdim=True) if bounds else None


def _top_k_bound(scaled: Tensor, top_k: list[int]) -> Tensor:
    """The k-th highest value of each row; -inf where k is the vocabulary."""
    size = scaled.shape[1]
    most = max(k for k in top_k if k < size)
    values = scaled.topk(most, dim=1).values
    places = torch.tensor([[min(k, most) - 1] for k in top_k], device=scaled.device)
    unlimited = torch.tensor([[k >= size] for k in top_k], device=scaled.device)
    return values.gather(1, places).masked_fill_(unlimited, -math.inf)


def _top_p_bound(scaled: Tensor, weights: Tensor, lowest: Tensor | None, top_p: Tensor) -> Tensor:
    """The lowest value of the smallest set of most likely tokens whose share of what stays reaches `top_p`."""
    kept = weights if lowest is None else weights.masked_fill(scaled < lowest, 0.0)
    needed = top_p * kept.sum(dim=1, keepdim=True)
    limited = top_p[:, 0] < 1
    values = scaled.topk(min(CANDIDATES, scaled.shape[1]), dim=1).values
    reached = values.exp().cumsum_(dim=1)
    if bool((reached[:, -1:] < needed)[limited].any()):
        values = _descending(scaled)
        reached = values.exp().cumsum_(dim=1)
    places = (reached < needed).sum(dim=1, keepdim=True).clamp_(max=values.shape[1] - 1)
    return values.gather(1, places).masked_fill_(~limited[:, None], -math.inf)


def _descending(rows: Tensor) -> Tensor:
    """Each row sorted; on a CPU by numpy, whose sort is an order of magnitude faster than PyTorch's."""
    if rows.is_cuda:
        return rows.sort(dim=1, descending=True).values
    return -torch.from_numpy(np.sort(-rows.numpy(), axis=1))
