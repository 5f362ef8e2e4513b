"""What captured steps need of attention."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

from torch import Tensor
from trtmesh.engine.backends.torch.compute.cached_attention import CachedAttention
from trtmesh.engine.backends.torch.cuda.step_inputs import StepInputs
from trtmesh.engine.backends.torch.model.attention import StepTokens


class StaticChunks(Protocol):
    """What attention reads in a graph of chunks beside their tokens and blocks."""

    def fill(self, step: StepTokens, size: int) -> None:
        """Takes the chunks of a step, for a graph of `size` tokens."""

    def begin(self, step: StepTokens, size: int) -> None:
        """Prepares attention for forwards over the first `size` tokens, of whose step there are only `token_rows`."""


class GraphAttention(CachedAttention):
    """Attention of a step of any chunks, and of the static inputs of graphs."""

    @abstractmethod
    def begin_rows(self, inputs: StepInputs, rows: int) -> None:
        """Prepares for forwards over the first `rows` of a graph's inputs, one new token each."""

    @abstractmethod
    def static_chunks(self, positions: Tensor, table: Tensor) -> StaticChunks:
        """For graphs of up to as many tokens as `positions` [tokens], of chunks with a row each in `table` [chunks + 1,
        width]. The last row is the null block's, for tokens that only fill up."""

    def _forget_groups(self) -> None:
        """There are none."""
