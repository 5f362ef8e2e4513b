"""The choice of tokens as on a GPU, on the CPU: everything but the kernel itself, which triton must compile.

Like the engine's own, the kernel's stand-in knows of a row its place, temperature and lowest logit, and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from trtmesh.engine.backends.torch.accelerator import ORDERING
from trtmesh.engine.backends.torch.sampling import draws
from trtmesh.engine.backends.torch.sampling.choice import Ranking, TokenChoice
from trtmesh.engine.backends.torch.sampling.continuation import Continuation
from trtmesh.engine.backends.torch.sampling.ordering import Ordering

CUDA = "trtmesh.engine.backends.torch.cuda"
NO_TOKEN = -1


def choose_tokens(
    logits: Tensor, places: Tensor, temperatures: Tensor, lowest: Tensor, tokens: Tensor
) -> None:
    """In place of the kernel of kernels/gumbel_choice.py."""
    peaks, ids = ORDERING.highest(logits)
    drawing = temperatures > 0
    if bool(drawing.any()):
        race = draws._Race(
            draws._blocks(logits[drawing]),
            temperatures[drawing, None],
            lowest[drawing, None],
            places[drawing, None],
        )
        ids[drawing] = race.among_all()
    tokens.copy_(ids.masked_fill(~torch.isfinite(peaks), NO_TOKEN))


def _kernels() -> Any:
    module: Any = ModuleType(f"{CUDA}.kernels.gumbel_choice")
    module.NO_TOKEN, module.choose_tokens = NO_TOKEN, choose_tokens
    return module


def gpus_choice() -> Any:
    """The module cuda/choice.py over the stand-in of its kernel; no other test sees it."""
    kernels = _kernels()
    with patch.dict(sys.modules, {kernels.__name__: kernels}):
        sys.modules.pop(f"{CUDA}.choice", None)
        choice: Any = import_module(f"{CUDA}.choice")
        return choice


class GpuChooser:
    """Chooses as GraphRunner does after a step that graphs computed whole."""

    def __init__(self, _ordering: Ordering) -> None:
        self._choice = gpus_choice()
        self._chooser = self._choice.KernelChooser(ORDERING)

    def choose(self, sequences: Sequence[Continuation], logits: Tensor) -> TokenChoice:
        tokens = torch.empty(len(sequences), dtype=torch.int64)
        places, temperatures = map(torch.from_numpy, self._choice.draws_of(sequences))
        everything = torch.full_like(temperatures, -torch.inf)
        with torch.inference_mode():
            choose_tokens(logits, places, temperatures, everything, tokens)
        if self._choice.are_plain(sequences):
            # The step after is launched with them.
            return self._choice.KernelChoice(tokens)  # type: ignore[no-any-return]
        choice: TokenChoice = self._chooser.choose(sequences, logits, tokens)
        return choice

    def rank(self, lanes: Sequence[Continuation], logits: Tensor) -> Ranking:
        ranking: Ranking = self._chooser.rank(lanes, logits)
        return ranking
