"""The seam to a device. Only `loading` knows the kinds of devices, and picks a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel
from trtmesh.engine.backends.torch.compute.memory_probe import StepSize
from trtmesh.engine.backends.torch.memory.kvcache import (
    BlockTables,
    CopiesBlocks,
    KvCache,
    copy_blocks,
)
from trtmesh.engine.backends.torch.model.lora_layers import Products, SlotMemory, UpdateTable
from trtmesh.engine.backends.torch.model.model import Fitted, Model
from trtmesh.engine.backends.torch.sampling.choice import Ranking, TokenChoice
from trtmesh.engine.backends.torch.sampling.continuation import Continuation
from trtmesh.engine.backends.torch.sampling.filters import indexes
from trtmesh.engine.backends.torch.sequence import Chunk, Sequence
from trtmesh.engine.scheduling.blocks import Move


@dataclass(frozen=True, slots=True)
class Drafted:
    chunk: Chunk
    logits: Tensor
    """After each draft, [drafts, vocabulary]."""
    chosen: tuple[TokenChoice, int] | None = None
    """A choice with the tokens after the drafts, if these hold, and its row for the first; None where they are still to
    be chosen."""


@dataclass(frozen=True, slots=True)
class Forward:
    """The logits of a batch, on the device."""

    completing: list[Chunk]
    logits: Tensor
    """[completing chunks, vocabulary], float32."""
    given: list[tuple[Chunk, Tensor]]
    """Chunks with the logits [tokens, vocabulary] for their readers."""
    drafted: SequenceOf[Drafted] = ()

    def rows_of(self, chunks: SequenceOf[Chunk]) -> Tensor:
        """The logits of completing chunks, given in order."""
        if len(chunks) == len(self.completing):
            return self.logits
        wanted = {chunk.sequence.key for chunk in chunks}
        rows = [row for row, chunk in enumerate(self.completing) if chunk.sequence.key in wanted]
        return self.logits[indexes(rows, self.logits)]


class Compute(Protocol):
    """A model on a device. Calls take effect on the device in order and need not wait for results. Collecting a step
    reads the results."""

    def move(self, moves: SequenceOf[Move]) -> None:
        """Copies and clears blocks."""

    def forward(
        self, chunks: SequenceOf[Chunk], written: Callable[[int], None] | None = None
    ) -> Forward:
        """Writes the KV of chunks and computes the logits. A device without delay calls `written` after writing the KV
        of each layer."""

    @property
    def captured_steps(self) -> int:
        """Steps replayed as graphs alone; only grows."""

    @property
    def most_run_tokens(self) -> int | None:
        """Tokens of the largest step with drafts that is fast; None for any."""

    @property
    def may_follow(self) -> bool:
        """Whether `follow` can compute a step before the tokens of the last step were read."""

    def follow(self, chunks: SequenceOf[Chunk], rows: SequenceOf[int]) -> Forward:
        """Computes a token for each chunk: those picked by the last call of `choose` for `rows`, then known ones of
        the other chunks."""

    def can_follow(self, chunk: Chunk) -> bool:
        """Whether `follow` can compute a chunk of a known token."""

    def awaits(self, sequences: SequenceOf[Sequence]) -> bool:
        """Whether all tokens before must be known when `choose` is called after `follow`."""

    def synchronize(self) -> None:
        """Waits until everything is computed."""

    def choose(self, sequences: SequenceOf[Continuation], logits: Tensor) -> TokenChoice:
        """Picks or draws the next token of each row."""

    def verify(self, drafted: SequenceOf[Drafted], position: int) -> TokenChoice:
        """Picks or draws the tokens after the drafts at `position`, which hold and are tokens by now."""

    def rank(self, lanes: SequenceOf[Continuation], logits: Tensor) -> Ranking:
        """Computes the log-probabilities for ranking beams."""

    def check(self) -> None:
        """Computes a token outside of all sequences. Raises where the model cannot compute at all."""

    def release_memory(self) -> None:
        """Returns cached memory to the device after an allocation failed."""


class Device(ABC):
    """The differences between devices while a model is loaded."""

    pins_memory: ClassVar[bool]
    """Whether the device copies from and to pinned host memory without the CPU."""
    shares_memory: ClassVar[bool]
    """Whether other processes can map the device's memory as a file."""
    default_dtype: ClassVar[torch.dtype | None]
    """Type of weights and KV under `dtype: auto`; None for the model's own."""

    def __init__(self, name: torch.device) -> None:
        self.name = name

    @abstractmethod
    def fit(self, module: PreTrainedModel, dtype: torch.dtype) -> Fitted:
        """Replaces layers by faster ones for this device."""

    @abstractmethod
    def products(self, tables: Collection[UpdateTable], max_tokens: int) -> Products:
        """Computes the updates of adapters in these tables, in steps of up to `max_tokens` tokens."""

    @property
    def slot_memory(self) -> SlotMemory:
        """Holds the tables."""
        return SlotMemory()

    @abstractmethod
    def compute(
        self,
        model: Model,
        cache: KvCache,
        tables: BlockTables,
        most_tokens: int,
        *,
        drafts: bool = False,
    ) -> Compute:
        """For steps of up to `most_tokens` tokens, with `drafts` some of which may be drafts of a source."""

    @property
    def copies_blocks(self) -> CopiesBlocks:
        return copy_blocks

    @abstractmethod
    def spare_memory(self, model: Model, largest: StepSize) -> int:
        """Bytes for the KV cache: all still available, without the needs of the largest steps."""

    @abstractmethod
    def default_cache_bytes(self, model: Model, largest: StepSize) -> int:
        """Size of the KV cache without a limit by settings."""

    @abstractmethod
    def allocated_bytes(self) -> int:
        """Device memory held by tensors; 0 where the device computes in host memory."""
