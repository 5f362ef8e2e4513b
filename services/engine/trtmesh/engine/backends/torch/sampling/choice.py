"""The next token of each row, and the data about it that was asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from trtmesh.chassis.errors import BackendFailed, InvalidRequest, TrtmeshError
from trtmesh.engine.backend import TokenDetails
from trtmesh.engine.backends.torch.sampling.adjustments import adjusted
from trtmesh.engine.backends.torch.sampling.details import token_details
from trtmesh.engine.backends.torch.sampling.draws import draw
from trtmesh.engine.backends.torch.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Choice:
    """The tokens chosen for the rows of a step; the token of a row in `failures` means nothing.

    `details` holds what rows asked for, without the cumulative log-probability.
    """

    token_ids: list[int]
    failures: dict[int, TrtmeshError] = field(default_factory=dict)
    details: dict[int, TokenDetails] = field(default_factory=dict)


@torch.inference_mode()
def choose(sequences: SequenceOf[Sequence], logits: Tensor) -> Choice:
    """The next token of each sequence; `logits` are [sequences, vocabulary] float32 and stay as they are."""
    for sequence in sequences:
        if sequence.token_rules.remembers:
            sequence.remember()
    changed = adjusted(sequences, logits)
    peaks, ids = _highest(changed)
    choice = Choice(ids)
    for row, peak in enumerate(peaks):
        if not math.isfinite(peak):
            choice.failures[row] = _failure(logits[row])
    drawing = [
        row
        for row, sequence in enumerate(sequences)
        if not sequence.token_rules.greedy and row not in choice.failures
    ]
    if drawing:
        rows = changed if len(drawing) == len(sequences) else changed[drawing]
        drawn = draw([sequences[row] for row in drawing], rows)
        for row, token in zip(drawing, drawn, strict=True):
            choice.token_ids[row] = token
    asking = [
        row
        for row, sequence in enumerate(sequences)
        if sequence.token_rules.wants_details and row not in choice.failures
    ]
    if asking:
        details = token_details(
            [sequences[row] for row in asking],
            [choice.token_ids[row] for row in asking],
            logits[asking],
            changed[asking],
        )
        choice.details.update(zip(asking, details, strict=True))
    return choice


@torch.inference_mode()
def search_log_probs(
    sequences: SequenceOf[Sequence], logits: Tensor
) -> tuple[Tensor, dict[int, TrtmeshError]]:
    """What a beam search adds up, [sequences, vocabulary] float64: log-probabilities after bias, penalties, bans and
    temperature, -inf for what must not come. Rows that are no numbers are named with their error."""
    for sequence in sequences:
        if sequence.token_rules.remembers:
            sequence.remember()
    changed = adjusted(sequences, logits).double()
    temperatures = [sequence.token_rules.sampling.temperature or 1.0 for sequence in sequences]
    changed = (
        changed / torch.tensor(temperatures, dtype=changed.dtype, device=changed.device)[:, None]
    )
    peaks = changed.amax(dim=1)
    failures = {
        row: _failure(logits[row])
        for row, peak in enumerate(peaks.tolist())
        if not math.isfinite(peak) and peak != -math.inf
    }
    forbidden = peaks == -math.inf
    return changed.log_softmax(dim=1).masked_fill_(forbidden[:, None], -math.inf), failures


def _highest(logits: Tensor) -> tuple[list[float], list[int]]:
    """The highest logit of each row and its id, the lowest of equals; on a CPU by numpy, which is several times faster
    at it than PyTorch."""
    if logits.is_cuda:
        peaks, ids = logits.max(dim=1)
        return peaks.tolist(), ids.tolist()
    values = logits.numpy()
    places = values.argmax(axis=1)
    return values[np.arange(len(values)), places].tolist(), places.tolist()


def _failure(row: Tensor) -> TrtmeshError:
    """Why no token of a row can be chosen; `row` are the model's own logits."""
    if bool(torch.isfinite(row.amax())):
        return InvalidRequest(
            "no token is left to choose: bad_token_ids, no_repeat_ngram_size, embedding_bias and min_tokens together"
            " forbid the whole vocabulary; forbid less"
        )
    return BackendFailed("the model's logits are not finite numbers")
