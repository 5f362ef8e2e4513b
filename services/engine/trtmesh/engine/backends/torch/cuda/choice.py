"""The tokens of a step: those chosen by graphs, and for other rows the choice of all devices."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from trtmesh.chassis.errors import TrtmeshError
from trtmesh.engine.backend import TokenDetails
from trtmesh.engine.backends.torch.cuda.kernels.row_fields import NOTHING_LEFT
from trtmesh.engine.backends.torch.cuda.pinned import Copied
from trtmesh.engine.backends.torch.sampling.choice import (
    LogitsChoice,
    TokenChoice,
    forbidden,
    not_finite,
)
from trtmesh.engine.backends.torch.sampling.continuation import Continuation

_Line = tuple[float, list[int], list[float]]
"""The log-probability of a row's token, and the most likely ids with theirs, at least as many as the row asks for."""


class GraphChoice:
    """Implements TokenChoice: tokens and log-probabilities being copied to the host, and rows chosen otherwise."""

    def __init__(
        self,
        sequences: SequenceOf[Continuation],
        places: SequenceOf[int],
        tokens: Tensor,
        log_probs: Tensor | None = None,
        rest: SequenceOf[int] = (),
        choice: LogitsChoice | None = None,
    ) -> None:
        """`places` are the rows of the sequences in `tokens` and in `log_probs`, those of `choose_by_rules`, which lack
        the rows `rest`. `choice` has these."""
        self._sequences = sequences
        self._places = places
        self._rest = {row: place for place, row in enumerate(rest)}
        self._choice = choice
        if choice:
            # Read later, when the device may compute the next step.
            choice.ids, choice.peaks = _copy(choice.ids), _copy(choice.peaks)
        self._tokens = _copy(tokens)
        self._log_probs = None if log_probs is None else _copy(log_probs)
        self._lines: dict[int, _Line] = {}
        self._copied = Copied(tokens.device)
        self._copied.record()
        self.token_ids: list[int] = []
        self._failures: dict[int, TrtmeshError] | None = None

    def read(self) -> dict[int, TrtmeshError]:
        if self._failures is None:
            self._failures = self._read()
        return self._failures

    def _read(self) -> dict[int, TrtmeshError]:
        self._copied.wait()
        tokens = self._tokens.tolist()
        # Rows beyond are chosen otherwise.
        self.token_ids = [tokens[min(place, len(tokens) - 1)] for place in self._places]
        if self._log_probs is not None:
            self._lines = self._read_lines(self._log_probs.numpy())
        failures: dict[int, TrtmeshError] = {}
        for row, token in enumerate(self.token_ids):
            if token < 0 and row not in self._rest:
                is_forbidden = token == NOTHING_LEFT
                failures[row] = forbidden(self._sequences[row]) if is_forbidden else not_finite()
        if self._choice:
            failed = self._choice.read()
            for row, place in self._rest.items():
                self.token_ids[row] = self._choice.token_ids[place]
                if place in failed:
                    failures[row] = failed[place]
        return failures

    def details(self, row: int) -> TokenDetails:
        if self._choice and row in self._rest:
            return self._choice.details(self._rest[row])
        sequence = self._sequences[row]
        own, ids, log_probs = self._lines[row]
        details = TokenDetails(sequence.key, log_probs=[own])
        if wanted := sequence.token_rules.output.top_log_probs:
            most_likely = list(zip(ids[:wanted], log_probs[:wanted], strict=True))
            if most_likely[-1][1] == -math.inf:
                most_likely = [pair for pair in most_likely if pair[1] > -math.inf]
            details.top_log_probs.append(most_likely)
        return details

    def _read_lines(self, log_probs: NDArray[np.float64]) -> dict[int, _Line]:
        """Reads the lines of all rows that ask for any at once: the host has a few microseconds a row."""
        asked = {
            row: each.token_rules.output.top_log_probs
            for row, each in enumerate(self._sequences)
            if each.token_rules.wants_log_probs and row not in self._rest
        }
        places = [self._places[row] for row in asked]
        found = log_probs[places, : 1 + 2 * max(asked.values(), default=0)]
        own, ids, most = found[:, 0], found[:, 1::2].astype(np.int64), found[:, 2::2]
        lines = zip(own.tolist(), ids.tolist(), most.tolist(), strict=True)
        return dict(zip(asked, lines, strict=True))


class PickedChoice:
    """Implements TokenChoice by rows of others."""

    def __init__(self, rows: SequenceOf[tuple[TokenChoice, int]]) -> None:
        self._rows = rows
        self.token_ids: list[int] = []

    def read(self) -> dict[int, TrtmeshError]:
        failures = {id(choice): choice.read() for choice, _ in self._rows}
        self.token_ids = [choice.token_ids[row] for choice, row in self._rows]
        return {
            place: failures[id(choice)][row]
            for place, (choice, row) in enumerate(self._rows)
            if row in failures[id(choice)]
        }

    def details(self, row: int) -> TokenDetails:
        choice, place = self._rows[row]
        return choice.details(place)


def _copy(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)
