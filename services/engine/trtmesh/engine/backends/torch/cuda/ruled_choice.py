"""The choice by rules as graphs of their own, launched after a step's graph where a row has rules.

So rows without rules pay nothing, and the tokens are known to the device before the next step begins.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from functools import partial

import numpy as np
import torch
from torch import Tensor
from trtmesh.engine.backends.torch.cuda.capturing import Record, Replay
from trtmesh.engine.backends.torch.cuda.kernels.row_fields import LOG_PROB_WORDS, Field, Flag
from trtmesh.engine.backends.torch.cuda.kernels.ruled_choice import Workspace, choose_by_rules
from trtmesh.engine.backends.torch.cuda.pinned import StagedWords
from trtmesh.engine.backends.torch.cuda.ruled_rows import Numbers, RuledRows, SlotRows
from trtmesh.engine.backends.torch.sequence import Sequence


class RuledChoice:
    """Replaces tokens that a step's graph chose without rules."""

    def __init__(
        self, rows: RuledRows, work: Workspace, record: Record, most: int, tokens: Tensor
    ) -> None:
        """`tokens` are those of the step's graphs, of up to `most` rows."""
        self._rows = rows
        self._work = work
        self._record = record
        self._tokens = tokens
        self._staged = StagedWords(len(Field) * most, tokens.device)
        self._masks = StagedWords(work.masks.numel(), tokens.device, work.masks.view(-1))
        self._fields = self._staged.buffer.view(len(Field), most)
        self._log_probs = torch.zeros(
            most, LOG_PROB_WORDS, dtype=torch.float64, device=tokens.device
        )
        self._replays: dict[int, Replay] = {}
        self._flags = Flag(0)
        # Of the step's graph of the same size.
        self._logits: Tensor

    def capture(self, size: int, logits: Tensor) -> None:
        """For a graph with the result `logits` [size, vocabulary]."""
        self._logits = logits
        self._replays[size] = self._record(partial(self._choose, size))

    def fill(self, found: SlotRows, unknown: int | Numbers = 0) -> None:
        """Takes the rules of the rows of the next launch, after `unknown` tokens known to the device alone, or after
        drafts, by row."""
        words = self._staged.begin().reshape(self._fields.shape)
        self._flags = self._rows.fill(words, found, unknown)
        if self._flags:
            self._staged.send(words.size)

    def fill_guided(self, rows: SequenceOf[int], sequences: list[Sequence]) -> None:
        """Takes the masks and the rules of guided rows for one more launch."""
        words = self._staged.begin().reshape(self._fields.shape)
        masks = self._masks.begin().reshape(self._work.masks.shape)
        self._flags = self._rows.fill_guided(words, masks.view(np.uint8), rows, sequences)
        self._masks.send(len(rows) * masks.shape[1])
        self._staged.send(words.size)

    def launch(self, size: int, logits: Tensor) -> Tensor | None:
        """Chooses where rows have rules. Returns the log-probabilities, see `choose_by_rules`, or None where no row
        asks for them; the next launch overwrites them."""
        if not self._flags:
            return None
        self._logits = logits
        self._replays[size]()
        return self._log_probs if self._flags & Flag.LOG_PROBS else None

    def _choose(self, size: int) -> Tensor:
        tokens = self._tokens[:size]
        choose_by_rules(self._logits, self._fields, self._work, tokens, self._log_probs)
        return tokens
