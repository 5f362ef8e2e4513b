"""The first rank's commands for the others: the same calls of Compute, as numbers. The others have no scheduler and no
sequences. Their sequence is a row of the block table and the tokens of the step: a device reads nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from enum import IntEnum

import numpy as np
from torch import Tensor
from trtmesh.chassis.stopping import EndRule
from trtmesh.chassis.vocabulary import GenerationConfig, Stopping
from trtmesh.engine.backend import PromptDetails
from trtmesh.engine.backends.torch.compute.device import Compute
from trtmesh.engine.backends.torch.memory.kvcache import BlockTables, Rows
from trtmesh.engine.backends.torch.sampling.token_rules import TokenRules
from trtmesh.engine.backends.torch.sequence import Chunk, Sequence
from trtmesh.engine.scheduling import sequence as scheduled
from trtmesh.engine.scheduling.blocks import NULL_BLOCK, Move


class Kind(IntEnum):
    """The method of Compute repeated by a command."""

    MOVE = 1
    FORWARD = 2
    FOLLOW = 3
    CHECK = 4


HEADER = 3
"""The kind, the number of chunks or moves, and the blocks of a row."""
FIELDS = 7
"""Of a chunk: row of the block table, its version, start, count, whether the chunk completes, and the positions with
logits to read, from and to."""
NOT_READ = (-1, -1)


def move(moves: SequenceOf[Move]) -> bytes:
    pairs = [(each.source, each.target) for each in moves]
    return _packed((Kind.MOVE, len(pairs), 0), np.array(pairs, dtype=np.int64))


def forward(chunks: SequenceOf[Chunk], tables: BlockTables, tokens_per_block: int) -> bytes:
    """Of chunks with known tokens."""
    tokens: list[int] = []
    for chunk in chunks:
        tokens += chunk.sequence.tokens[chunk.start : chunk.start + chunk.count]
    return _of_chunks(Kind.FORWARD, chunks, tokens, tables, tokens_per_block)


def follow(
    chunks: SequenceOf[Chunk], rows: SequenceOf[int], tables: BlockTables, tokens_per_block: int
) -> bytes:
    return _of_chunks(Kind.FOLLOW, chunks, rows, tables, tokens_per_block)


def check() -> bytes:
    return _packed((Kind.CHECK, 0, 0))


def _of_chunks(
    kind: Kind,
    chunks: SequenceOf[Chunk],
    numbers: SequenceOf[int],
    tables: BlockTables,
    tokens_per_block: int,
) -> bytes:
    """`numbers` are the tokens, or the rows of the device's choice."""
    slots = [chunk.sequence.slot for chunk in chunks]
    fields = [
        (slot, version, chunk.start, chunk.count, chunk.completes, *_read(chunk.sequence))
        for slot, version, chunk in zip(slots, tables.versions[slots], chunks, strict=True)
    ]
    last = max(chunk.start + chunk.count for chunk in chunks) - 1
    width = last // tokens_per_block + 1
    return _packed(
        (kind, len(chunks), width),
        np.array(fields, dtype=np.int64),
        tables.rows[slots, :width],
        np.array(numbers, dtype=np.int64),
    )


def _read(sequence: Sequence) -> tuple[int, int]:
    reader = sequence.reader
    return (reader.next, reader.end) if reader else NOT_READ


def _packed(header: tuple[int, int, int], *arrays: Rows) -> bytes:
    words = [np.array(header, dtype=np.int64), *(array.reshape(-1) for array in arrays)]
    return np.concatenate(words).tobytes()


class Follower:
    """Repeats the first rank's calls on another rank."""

    def __init__(self, compute: Compute, tables: BlockTables) -> None:
        """`tables` belong to `compute`."""
        self._compute = compute
        self._tables = tables
        self._sequences = [_sequence(slot) for slot in range(len(tables.rows))]
        self._carry_out: dict[Kind, Callable[[int, int, Rows], object]] = {
            Kind.MOVE: self._move,
            Kind.FORWARD: self._forward,
            Kind.FOLLOW: self._follow,
            Kind.CHECK: lambda *_: compute.check(),
        }

    def obey(self, command: bytes) -> None:
        """Raises all errors of the device; the ranks are out of step then."""
        words = np.frombuffer(command, dtype=np.int64)
        kind, count, width = words[:HEADER].tolist()
        self._carry_out[Kind(kind)](count, width, words[HEADER:])

    def _move(self, count: int, _width: int, words: Rows) -> None:
        pairs = words.reshape(count, 2).tolist()
        self._compute.move([Move(source, target) for source, target in pairs])

    def _forward(self, count: int, width: int, words: Rows) -> None:
        chunks, tokens = self._chunks(count, width, words)
        first = 0
        for chunk, completes in chunks:
            last = first + chunk.count
            _give(chunk, tokens[first:last], completes=completes)
            first = last
        self._compute.forward([chunk for chunk, _ in chunks])

    def _follow(self, count: int, width: int, words: Rows) -> None:
        chunks, rows = self._chunks(count, width, words)
        self._compute.follow([chunk for chunk, _ in chunks], rows)

    def _chunks(
        self, count: int, width: int, words: Rows
    ) -> tuple[list[tuple[Chunk, bool]], list[int]]:
        """The chunks of a command, each with whether the chunk completes, and the numbers at the command's end."""
        fields, rest = words[: count * FIELDS].reshape(count, FIELDS), words[count * FIELDS :]
        self._take_blocks(fields[:, 0], fields[:, 1], rest[: count * width].reshape(count, width))
        chunks = []
        for slot, _, start, size, completes, first, last in fields.tolist():
            sequence = self._sequences[slot]
            sequence.reader = Wanted(first, last) if (first, last) != NOT_READ else None
            chunks.append((scheduled.Chunk(sequence, start, size), bool(completes)))
        return chunks, rest[count * width :].tolist()

    def _take_blocks(self, slots: Rows, versions: Rows, blocks: Rows) -> None:
        tables = self._tables
        tables.rows[slots[tables.versions[slots] != versions]] = NULL_BLOCK
        tables.versions[slots] = versions
        tables.rows[slots, : blocks.shape[1]] = blocks


class Wanted:
    """Implements Reader where nothing is read: the device only needs to know the positions."""

    def __init__(self, first: int, end: int) -> None:
        self.next = first
        self.end = end

    def read(self, logits: Tensor) -> Iterator[PromptDetails]:
        yield from ()


def _give(chunk: Chunk, tokens: list[int], *, completes: bool) -> None:
    """Gives a sequence the tokens of a chunk, and a further token where others follow. Nobody reads earlier tokens."""
    known = chunk.sequence.tokens
    del known[chunk.start :]
    known += [0] * (chunk.start - len(known))
    known += tokens
    if not completes:
        known.append(0)


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
