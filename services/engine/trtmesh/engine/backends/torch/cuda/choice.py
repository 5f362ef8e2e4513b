"""The tokens of a step: those chosen by graphs, and for other rows the choice of all devices."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from trtmesh.chassis.errors import TrtmeshError
from trtmesh.engine.backend import TokenDetails, TopLogProbs
from trtmesh.engine.backends.torch.cuda.kernels.row_fields import NOTHING_LEFT
from trtmesh.engine.backends.torch.cuda.pinned import Copied
from trtmesh.engine.backends.torch.sampling.choice import (
    LogitsChoice,
    TokenChoice,
    forbidden,
    not_finite,
)
from trtmesh.engine.backends.torch.sampling.continuation import Continuation


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
        self._details: dict[int, TokenDetails] = {}
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
            self._details = self._read_details(self._log_probs.numpy())
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
        return self._details[row]

    def _read_details(self, log_probs: NDArray[np.float64]) -> dict[int, TokenDetails]:
        """Reads all rows that ask for log-probabilities at once: the host has a few microseconds a row."""
        asking = [
            row
            for row, each in enumerate(self._sequences)
            if each.token_rules.wants_log_probs and row not in self._rest
        ]
        wanted = [self._sequences[row].token_rules.output.top_log_probs for row in asking]
        width = max(wanted, default=0)
        found = log_probs[[self._places[row] for row in asking], : 1 + 2 * width]
        ids, values = found[:, 1::2].astype(np.int64), found[:, 2::2]
        tops: list[TopLogProbs] = list(zip(ids.tolist(), values.tolist(), strict=True))
        # Impossible ids come last.
        counts = np.minimum(wanted, (values > -np.inf).sum(axis=1))
        for place in np.flatnonzero(counts < width).tolist():
            tops[place] = tops[place][0][: counts[place]], tops[place][1][: counts[place]]
        return {
            row: TokenDetails(self._sequences[row].key, [own], None, [top] if most else [])
            for row, own, top, most in zip(asking, found[:, 0].tolist(), tops, wanted, strict=True)
        }


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
