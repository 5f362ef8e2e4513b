"""The tokens of a step: those chosen by graphs, and for other rows the choice of all devices."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
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

_NONE = np.zeros((0, 0))


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
        self._log_probs = _NONE if log_probs is None else _copy(log_probs).numpy()
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
        wanted = 1 + 2 * sequence.token_rules.output.top_log_probs
        own, *pairs = self._log_probs[self._places[row], :wanted].tolist()
        details = TokenDetails(sequence.key, log_probs=[own])
        if pairs:
            most_likely = list(zip(map(int, pairs[::2]), pairs[1::2], strict=True))
            if pairs[-1] == -torch.inf:
                most_likely = [pair for pair in most_likely if pair[1] > -torch.inf]
            details.top_log_probs.append(most_likely)
        return details


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
