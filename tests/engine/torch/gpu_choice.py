"""The choice of tokens as on a GPU, on the CPU: everything but the kernels themselves, which triton must compile.

Like the engine's own, the kernels' stand-in knows the words of a row and the tables of its slot, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from trtmesh.chassis.vocabulary import Sampling
from trtmesh.engine.backends.torch.accelerator import ORDERING
from trtmesh.engine.backends.torch.cuda.choice import GraphChoice
from trtmesh.engine.backends.torch.cuda.kernels.row_fields import (
    BIAS_SHIFT,
    BIASES,
    COUNT_SHIFT,
    LOG_PROB_WORDS,
    NO_TOKEN,
    NOTHING_LEFT,
    Field,
    Flag,
    Word,
)
from trtmesh.engine.backends.torch.cuda.ruled_rows import RuledRows
from trtmesh.engine.backends.torch.sampling import draws
from trtmesh.engine.backends.torch.sampling.choice import Chooser, Ranking, TokenChoice
from trtmesh.engine.backends.torch.sampling.continuation import Continuation
from trtmesh.engine.backends.torch.sampling.filters import Filters
from trtmesh.engine.backends.torch.sampling.ordering import Ordering
from trtmesh.engine.backends.torch.sequence import Sequence as Running

SLOTS = 512
EVERYTHING = -torch.inf


@dataclass
class Tables:
    """Of each slot, as `Workspace` has them."""

    words: Tensor
    biases: Tensor = field(default_factory=lambda: torch.zeros(SLOTS, BIASES))

    def changed(self, words: NDArray[np.int64], logits: Tensor) -> Tensor:
        """The logits [vocabulary] to choose from."""
        numbers, slot = words.view(np.float64), int(words[Field.SLOT])
        known = self.words[slot].numpy()
        found = logits.float() + self.biases[slot, (known >> BIAS_SHIFT) & (BIASES - 1)]
        counts = known >> COUNT_SHIFT
        factor = torch.tensor(numbers[Field.REPETITION], dtype=torch.float32)
        minus = (counts > 0) * numbers[Field.PRESENCE] + counts * numbers[Field.FREQUENCY]
        penalised = torch.where(found > 0, found / factor, found * factor)
        penalised -= torch.from_numpy(minus.astype(np.float32))
        found = torch.where(torch.from_numpy(known & Word.SEEN > 0), penalised, found)
        banned = Word.BANNED | (Word.ENDS if words[Field.FLAGS] & Flag.BANS_ENDS else 0)
        return found.masked_fill(torch.from_numpy(known & banned > 0), -torch.inf)


def raced(logits: Tensor, place: int, temperature: float, lowest: float) -> int:
    """The winner among the logits [vocabulary] from `lowest` on."""

    def one(value: float) -> Tensor:
        return torch.full((1, 1), value, dtype=torch.float64)

    places = torch.tensor([[place]])
    race = draws._Race(draws._blocks(logits[None]), one(temperature), one(lowest), places)
    return int(race.among_all())


def chosen(words: NDArray[np.int64], logits: Tensor, tables: Tables) -> tuple[int, list[float]]:
    """In place of the kernels of kernels/ruled_choice.py: a row's token, and its log-probabilities."""
    numbers, flags = words.view(np.float64), Flag(int(words[Field.FLAGS]))
    own = logits.double()
    if not torch.isfinite(own.amax()):
        return NO_TOKEN, []
    changed = tables.changed(words, logits) if flags & Flag.CHANGES else logits.float()
    if not torch.isfinite(changed.amax()):
        return NOTHING_LEFT, []
    token = int(changed.argmax())
    if flags & Flag.DRAWS:
        temperature, top_p = float(numbers[Field.TEMPERATURE]), float(numbers[Field.TOP_P])
        asked = Sampling(temperature=temperature, top_k=int(words[Field.TOP_K]), top_p=top_p)
        peaks = changed[None].amax(dim=1, keepdim=True)
        lowest = float(Filters(ORDERING).lowest([asked], changed[None], peaks, [top_p]))
        lowest = max(lowest, float(numbers[Field.DEPTH]) + float(peaks))
        token = raced(changed, int(words[Field.PLACE]), temperature, lowest)
    if flags & Flag.COUNTS:
        known = tables.words[int(words[Field.SLOT])]
        known[token] = (known[token] | Word.SEEN) + (1 << COUNT_SHIFT)
    if not flags & Flag.LOG_PROBS:
        return token, []
    log_probs = own.log_softmax(dim=0)
    best, ids = log_probs.topk(int(words[Field.TOPS]))
    pairs = [value for pair in zip(ids.tolist(), best.tolist(), strict=True) for value in pair]
    return token, [float(log_probs[token]), *pairs]


class GpuChooser:
    """Chooses as GraphRunner does after a step that graphs computed whole."""

    def __init__(self, _ordering: Ordering) -> None:
        self._chooser = Chooser(ORDERING)
        self._rules: RuledRows | None = None
        self._tables: Tables

    def choose(self, sequences: Sequence[Continuation], logits: Tensor) -> TokenChoice:
        own = [each for each in sequences if isinstance(each, Running)]
        if len(own) < len(sequences):
            return self._chooser.choose(sequences, logits)
        if self._rules is None:
            self._tables = Tables(torch.zeros(SLOTS, logits.shape[1], dtype=torch.int32))
            self._rules = RuledRows(SLOTS, self._tables.words, self._tables.biases)
        words = np.zeros((len(Field), len(own)), dtype=np.int64)
        found = self._rules.find(own)
        flags = self._rules.fill(words, found)
        places, temperatures = self._rules.draws(found)
        tokens = logits.argmax(dim=1)
        log_probs = torch.zeros(len(own), LOG_PROB_WORDS, dtype=torch.float64)
        for row in range(len(own)):
            if words[Field.FLAGS, row]:
                token, values = chosen(words[:, row].copy(), logits[row], self._tables)
                tokens[row] = token
                log_probs[row, : len(values)] = torch.tensor(values, dtype=torch.float64)
            elif temperatures[row]:
                tokens[row] = raced(
                    logits[row].float(), int(places[row]), float(temperatures[row]), EVERYTHING
                )
        rest = sorted({*found.by_host, *found.guided})
        part = [sequences[row] for row in rest]
        choice = self._chooser.choose(part, logits[rest]) if rest else None
        numbers = log_probs if flags & Flag.LOG_PROBS else None
        return GraphChoice(own, range(len(own)), tokens, numbers, rest, choice)

    def rank(self, lanes: Sequence[Continuation], logits: Tensor) -> Ranking:
        return self._chooser.rank(lanes, logits)
