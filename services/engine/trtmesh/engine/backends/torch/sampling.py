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

import torch
from torch import Tensor
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


def choose(sequences: SequenceOf[Sequence], logits: Tensor) -> Choice:
    """The next token of each sequence; `logits` [sequences, vocabulary] float32 may be changed."""
    peaks = logits.max(dim=1).values
    finite = torch.isfinite(peaks).tolist()
    wanting = [row for row, sequence in enumerate(sequences) if _wants_log_probs(sequence)]
    plain = logits[wanting].double().log_softmax(dim=1) if wanting else None
    _adjust(sequences, logits)
    token_ids = logits.argmax(dim=1).tolist()
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


def _adjust(sequences: SequenceOf[Sequence], logits: Tensor) -> None:
    """Applies penalties, and takes end ids away from sequences that must not end yet."""
    for row, sequence in enumerate(sequences):
        if sequence.counts is not None:
            _penalise(sequence, logits[row])
        if sequence.rule.bans_end_ids(len(sequence.tokens)):
            logits[row, list(sequence.rule.end_ids)] = -math.inf


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

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    temperatures = column([1.0 if c.temperature is None else c.temperature for c in configs])
    scaled = logits.double() / temperatures
    scaled -= scaled.amax(dim=1, keepdim=True)
    lowest = torch.full_like(temperatures, -math.inf)
    top_k = [min(c.top_k or scaled.shape[1], scaled.shape[1]) for c in configs]
    if min(top_k) < scaled.shape[1]:
        lowest = torch.maximum(lowest, _top_k_bound(scaled, top_k))
    top_p = [1.0 if c.top_p is None else c.top_p for c in configs]
    if min(top_p) < 1:
        lowest = torch.maximum(lowest, _top_p_bound(scaled, lowest, column(top_p)))
    min_p = column([c.min_p or 0.0 for c in configs])
    lowest = torch.maximum(lowest, min_p.log())
    weights = torch.where(scaled >= lowest, scaled.exp(), 0.0)
    # [rows, vocabulary]; added up in the order of ids, whatever the batch.
    cumulative = weights.cumsum(dim=1)
    draws = uniforms(
        [c.seed or 0 for c in configs],
        [sequence.batch_index for sequence in sequences],
        [sequence.sequence_index for sequence in sequences],
        [len(sequence.tokens) for sequence in sequences],
    )
    targets = torch.from_numpy(draws).to(logits.device)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets, right=True)
    # Rounding may lift a target to the total; the last token that stayed is meant then.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    chosen: list[int] = torch.minimum(tokens, last)[:, 0].tolist()
    return chosen


def _top_k_bound(scaled: Tensor, top_k: list[int]) -> Tensor:
    """The k-th highest value of each row; -inf where k is the vocabulary."""
    size = scaled.shape[1]
    most = max((k for k in top_k if k < size), default=1)
    values = scaled.topk(most, dim=1).values
    places = torch.tensor([[min(k, most) - 1] for k in top_k], device=scaled.device)
    unlimited = torch.tensor([[k >= size] for k in top_k], device=scaled.device)
    return values.gather(1, places).masked_fill(unlimited, -math.inf)


def _top_p_bound(scaled: Tensor, lowest: Tensor, top_p: Tensor) -> Tensor:
    """The lowest value of the smallest set of most likely tokens whose share of what stays reaches `top_p`."""
    totals = torch.where(scaled >= lowest, scaled.exp(), 0.0).sum(dim=1, keepdim=True)
    needed = top_p * totals
    size = scaled.shape[1]
    candidates = min(CANDIDATES, size)
    while True:
        values = scaled.topk(candidates, dim=1).values
        reached = values.exp().masked_fill(values < lowest, 0.0).cumsum(dim=1)
        if candidates == size or bool((reached[:, -1:] >= needed).all()):
            break
        candidates = size
    places = (reached < needed).sum(dim=1, keepdim=True).clamp(max=candidates - 1)
    bound = values.gather(1, places)
    return bound.masked_fill(top_p >= 1, -math.inf)
