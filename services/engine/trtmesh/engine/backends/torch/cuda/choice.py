"""The next token of each row, by kernels where a row needs no more than a temperature and filters."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from trtmesh.chassis.errors import TrtmeshError
from trtmesh.engine.backend import TokenDetails
from trtmesh.engine.backends.torch.cuda.kernels.gumbel_choice import NO_TOKEN, choose_tokens
from trtmesh.engine.backends.torch.sampling.choice import Chooser, Ranking, TokenChoice, not_finite
from trtmesh.engine.backends.torch.sampling.continuation import Continuation
from trtmesh.engine.backends.torch.sampling.draws import places_of
from trtmesh.engine.backends.torch.sampling.filters import (
    Filters,
    given,
    indexes,
    temperature_of,
)
from trtmesh.engine.backends.torch.sampling.ordering import Ordering


class KernelChooser:
    """Chooses tokens. Rows with penalties, bans, log-probabilities or logits take the way of all devices."""

    def __init__(self, ordering: Ordering) -> None:
        self._chooser = Chooser(ordering)
        self._filters = Filters(ordering)

    @torch.inference_mode()
    def choose(
        self, sequences: SequenceOf[Continuation], logits: Tensor, tokens: Tensor | None = None
    ) -> TokenChoice:
        """`tokens` [rows] are the known tokens of rows without filters and rules, and are changed; None if unknown."""
        ruled = [row for row, sequence in enumerate(sequences) if _has_rules(sequence)]
        if len(ruled) == len(sequences):
            # A copy of a graph's logits: the next step overwrites the graph's.
            return self._chooser.choose(sequences, logits.clone() if tokens is not None else logits)
        filtered = [
            row
            for row, sequence in enumerate(sequences)
            if sequence.token_rules.filters and not _has_rules(sequence)
        ]
        if tokens is None:
            tokens = _raced(sequences, logits)
        if filtered:
            rows = indexes(filtered, logits)
            part = [sequences[row] for row in filtered]
            tokens.index_copy_(0, rows, self._filtered(part, logits[rows]))
        if not ruled:
            return KernelChoice(tokens)
        part = [sequences[row] for row in ruled]
        return KernelChoice(
            tokens, ruled, self._chooser.choose(part, logits[indexes(ruled, logits)])
        )

    def rank(self, lanes: SequenceOf[Continuation], logits: Tensor) -> Ranking:
        return self._chooser.rank(lanes, logits)

    def _filtered(self, sequences: SequenceOf[Continuation], logits: Tensor) -> Tensor:
        configs = [sequence.token_rules.sampling for sequence in sequences]
        top_p = [sequence.top_p for sequence in sequences]
        peaks = logits.amax(dim=1, keepdim=True)
        lowest = self._filters.lowest(configs, logits, peaks, top_p)
        return _raced(sequences, logits, lowest[:, 0])


def draws_of(
    sequences: SequenceOf[Continuation], unknown: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The places and temperatures of the draws by `choose_tokens`, [rows], after `unknown` tokens known to the device
    alone; 0 for a row with its highest logit as the choice."""
    places = np.zeros(len(sequences), dtype=np.int64)
    temperatures = np.zeros(len(sequences))
    drawing = [row for row, each in enumerate(sequences) if not each.token_rules.greedy]
    if drawing:
        part = [sequences[row] for row in drawing]
        places[drawing] = places_of(part, unknown)
        temperatures[drawing] = [temperature_of(each.token_rules.sampling) for each in part]
    return places, temperatures


def _raced(
    sequences: SequenceOf[Continuation], logits: Tensor, lowest: Tensor | None = None
) -> Tensor:
    """The tokens [rows] from `choose_tokens`."""
    places, temperatures = draws_of(sequences)
    temperature = given(temperatures, logits)
    if lowest is None:
        lowest = torch.full_like(temperature, -torch.inf)
    tokens = torch.empty(len(sequences), dtype=torch.int64, device=logits.device)
    choose_tokens(logits, given(places, logits), temperature, lowest, tokens)
    return tokens


def are_plain(sequences: SequenceOf[Continuation]) -> bool:
    """Whether a graph chooses the tokens of all rows, and of the steps after."""
    return not any(each.token_rules.filters or _has_rules(each) for each in sequences)


def _has_rules(sequence: Continuation) -> bool:
    rules = sequence.token_rules
    return (
        rules.adjusts
        or rules.remembers
        or rules.wants_details
        or sequence.rule.bans_end_ids(len(sequence.tokens))
    )


class KernelChoice:
    """Implements TokenChoice: tokens being copied to the host, and the rows handled by the general chooser."""

    def __init__(
        self, tokens: Tensor, ruled: SequenceOf[int] = (), rest: TokenChoice | None = None
    ) -> None:
        """`rest` are the rows `ruled`."""
        self.token_ids: list[int] = []
        on_device = tokens.is_cuda
        self._host = torch.empty(len(tokens), dtype=torch.int64, pin_memory=on_device)
        self._host.copy_(tokens, non_blocking=True)
        untyped: Any = torch.cuda
        self._copied = untyped.Event() if on_device else None
        if self._copied:
            self._copied.record()
        self._rest = rest
        self._places = {row: place for place, row in enumerate(ruled)}

    def read(self) -> dict[int, TrtmeshError]:
        if self._copied:
            self._copied.synchronize()
        self.token_ids = self._host.tolist()
        failures: dict[int, TrtmeshError] = {
            row: not_finite()
            for row, token in enumerate(self.token_ids)
            if token == NO_TOKEN and row not in self._places
        }
        if self._rest:
            failed = self._rest.read()
            for row, place in self._places.items():
                self.token_ids[row] = self._rest.token_ids[place]
                if place in failed:
                    failures[row] = failed[place]
        return failures

    def log_prob(self, row: int, token: int) -> float:
        assert self._rest
        return self._rest.log_prob(self._places[row], token)

    def details(self, row: int) -> TokenDetails:
        assert self._rest
        return self._rest.details(self._places[row])
