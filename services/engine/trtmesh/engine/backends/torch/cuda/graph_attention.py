"""What captured steps need of attention."""

from __future__ import annotations

from abc import abstractmethod

from trtmesh.engine.backends.torch.compute.paged_attention import CachedAttention
from trtmesh.engine.backends.torch.cuda.chunk_inputs import ChunkInputs
from trtmesh.engine.backends.torch.cuda.step_inputs import StepInputs


class GraphAttention(CachedAttention):
    """Attention of a step of any chunks, and of the static inputs of graphs."""

    @abstractmethod
    def begin_rows(self, inputs: StepInputs, rows: int) -> None:
        """Prepares for forwards over the first `rows` of a graph's inputs, one new token each."""

    @abstractmethod
    def begin_chunks(self, inputs: ChunkInputs, size: int) -> None:
        """Prepares for forwards over the first `size` tokens of a graph's inputs."""

    def _forget_groups(self) -> None:
        """There are none."""
