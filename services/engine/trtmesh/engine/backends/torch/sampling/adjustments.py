"""Bias, penalties and bans, applied to logits before the filters. Rows without a wish cost nothing.

Each kind is one operation over the entries of all rows, numbered in the flat view of the logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from trtmesh.engine.backends.torch.sampling.continuation import Continuation
from trtmesh.engine.backends.torch.sampling.token_rules import Ids

Row = tuple[int, Continuation]


def adjusted(sequences: SequenceOf[Continuation], logits: Tensor) -> Tensor:
    """`logits` [sequences, vocabulary] as changed by the rules of the sequences; a copy unless unchanged."""
    rows = [
        (row, sequence)
        for row, sequence in enumerate(sequences)
        if sequence.token_rules.adjusts or sequence.rule.bans_end_ids(len(sequence.tokens))
    ]
    if not rows:
        return logits
    logits = logits.clone()
    flat = logits.view(-1)
    size = logits.shape[1]
    _add_bias([row for row in rows if row[1].token_rules.biases], flat, size)
    _penalise([row for row in rows if row[1].token_rules.penalises], flat, size)
    _ban(rows, flat, size)
    return logits


def _add_bias(rows: SequenceOf[Row], flat: Tensor, size: int) -> None:
    if not rows:
        return
    biases = [(row, sequence.token_rules.bias) for row, sequence in rows]
    places = np.concatenate([ids + row * size for row, (ids, _) in biases])
    weights = np.concatenate([weights for _, (_, weights) in biases])
    # No place occurs twice, so the order of the sum does not matter.
    flat.index_add_(0, _tensor(places, flat), _tensor(weights, flat))


def _penalise(rows: SequenceOf[Row], flat: Tensor, size: int) -> None:
    """Divides positive logits by the repetition penalty and multiplies negative logits; subtracts presence +
    frequency * count for generated tokens."""
    places, factors, minus = [], [], []
    for row, sequence in rows:
        sampling = sequence.token_rules.sampling
        occurrences = sequence.history and sequence.history.occurrences
        assert occurrences
        ids, counts = occurrences.ids, occurrences.counts
        # Ids of a prompt table have no logits.
        own = ids < size
        ids, counts = ids[own], counts[own]
        places.append(ids + row * size)
        factors.append(np.full(len(ids), sampling.repetition_penalty, dtype=np.float32))
        penalty = (counts > 0) * sampling.presence_penalty + counts * sampling.frequency_penalty
        minus.append(penalty.astype(np.float32))
    if not rows:
        return
    where = _tensor(np.concatenate(places), flat)
    factor = _tensor(np.concatenate(factors), flat)
    values = flat[where]
    values = torch.where(values > 0, values / factor, values * factor)
    flat[where] = values - _tensor(np.concatenate(minus), flat)


def _ban(rows: SequenceOf[Row], flat: Tensor, size: int) -> None:
    places = [
        ids[ids < size] + row * size
        for row, sequence in rows
        for ids in _banned(sequence)
        if len(ids)
    ]
    if places:
        flat.index_fill_(0, _tensor(np.concatenate(places), flat), -math.inf)


def _banned(sequence: Continuation) -> Iterator[Ids]:
    """Ids banned as the next token."""
    rules, tokens = sequence.token_rules, sequence.tokens
    if rules.bars_ngrams and sequence.history and sequence.history.ngrams:
        yield np.array(sequence.history.ngrams.repeating(tokens), dtype=np.int64)
    if rules.bars_words:
        yield rules.bad_ids
        yield np.array(rules.completing_ids(tokens), dtype=np.int64)
    if sequence.rule.bans_end_ids(len(tokens)):
        yield np.array(list(sequence.rule.end_ids), dtype=np.int64)


def _tensor(values: NDArray[np.int64] | NDArray[np.float32], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)
