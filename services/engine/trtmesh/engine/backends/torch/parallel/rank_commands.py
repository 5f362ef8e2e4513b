"""The first rank's commands for the others: the same calls of Compute. The others have no scheduler and no sequences.
Their sequence is a row of the block table and the tokens of the step: a device reads nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from trtmesh.chassis.stopping import EndRule
from trtmesh.chassis.vocabulary import GenerationConfig, Stopping
from trtmesh.engine.backend import PromptDetails
from trtmesh.engine.backends.torch.compute.device import Compute
from trtmesh.engine.backends.torch.memory.kvcache import BlockTables, Rows
from trtmesh.engine.backends.torch.sampling.token_rules import TokenRules
from trtmesh.engine.backends.torch.sequence import Chunk, Sequence
from trtmesh.engine.scheduling import sequence as scheduled
from trtmesh.engine.scheduling.blocks import NULL_BLOCK

Command = tuple[Any, ...]
"""The name of a method of Compute, and its arguments. Chunks are told as ToldChunks, and those of `forward` with their
tokens and the next token, if known: after it, the chunk is complete."""


@dataclass(frozen=True, slots=True)
class ToldChunks:
    """Chunks as numbers."""

    starts: list[int]
    counts: list[int]
    read: list[tuple[int, int] | None]
    """The positions with logits to read, from and to."""
    slots: list[int]
    """Rows of the block table, with their versions and their first blocks."""
    versions: Rows
    blocks: Rows


def told(chunks: SequenceOf[Chunk], tables: BlockTables, tokens_per_block: int) -> ToldChunks:
    slots = [chunk.sequence.slot for chunk in chunks]
    readers = [chunk.sequence.reader for chunk in chunks]
    last = max(chunk.start + chunk.count for chunk in chunks) - 1
    return ToldChunks(
        [chunk.start for chunk in chunks],
        [chunk.count for chunk in chunks],
        [(reader.next, reader.end) if reader else None for reader in readers],
        slots,
        tables.versions[slots],
        tables.rows[slots, : last // tokens_per_block + 1],
    )


class Follower:
    """Repeats the first rank's calls on another rank."""

    def __init__(self, compute: Compute, tables: BlockTables) -> None:
        """`tables` belong to `compute`."""
        self._compute = compute
        self._tables = tables
        self._sequences = [_sequence(slot) for slot in range(len(tables.rows))]
        self._methods: dict[str, Callable[..., object]] = {
            "move": compute.move,
            "forward": self._forward,
            "follow": self._follow,
            "check": compute.check,
        }

    def obey(self, command: Command) -> None:
        """Raises all errors of the device; the ranks are out of step then."""
        name, *arguments = command
        self._methods[name](*arguments)

    def _forward(self, given: ToldChunks, tokens: list[list[int]]) -> None:
        chunks = self._chunks(given)
        for chunk, own in zip(chunks, tokens, strict=True):
            # Nobody reads earlier tokens.
            known = chunk.sequence.tokens
            del known[chunk.start :]
            known += [0] * (chunk.start - len(known)) + own
        self._compute.forward(chunks)

    def _follow(self, given: ToldChunks, rows: SequenceOf[int]) -> None:
        self._compute.follow(self._chunks(given), rows)

    def _chunks(self, given: ToldChunks) -> list[Chunk]:
        tables, slots = self._tables, given.slots
        for slot, version in zip(slots, given.versions, strict=True):
            if tables.versions[slot] != version:
                tables.rows[slot] = NULL_BLOCK
        tables.versions[slots] = given.versions
        tables.rows[slots, : given.blocks.shape[1]] = given.blocks
        chunks = []
        for slot, start, count, read in zip(
            slots, given.starts, given.counts, given.read, strict=True
        ):
            sequence = self._sequences[slot]
            sequence.reader = Wanted(*read) if read else None
            chunks.append(scheduled.Chunk(sequence, start, count))
        return chunks


class Wanted:
    """Implements Reader where nothing is read: the device only needs to know the positions."""

    def __init__(self, first: int, end: int) -> None:
        self.next = first
        self.end = end

    def read(self, logits: Tensor) -> Iterator[PromptDetails]:
        yield from ()


def _sequence(slot: int) -> Sequence:
    """The content of a row of the block table, of any sequence. Chooses greedily: the first rank shares tokens where
    needed."""
    config = GenerationConfig()
    return Sequence(
        key=slot,
        batch_index=0,
        sequence_index=0,
        tokens=[],
        rule=EndRule(Stopping(), (), 0, 0),
        token_rules=TokenRules(config),
        config=config,
        submitted_tokens=0,
        slot=slot,
    )
