"""Parts of a handoff: their bytes in the sender's blocks, and the places of these bytes in the receiver's.

A part is some layers of a run of blocks. A message has a part as a single run of bytes: for each of the sender's shards
in order, for each wanted block in order, the part's layers.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from trtmesh.engine.handoff.block_plan import copies
from trtmesh.engine.handoff.checksums import checksum_of
from trtmesh.engine.handoff.transports.transport import ShardCopy
from trtmesh.engine.kv_memory import KvMemory, Shard, Span, TakeMemory

NOT_WANTED = -1
"""Stands for the number of a block left out."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some layers of a run of blocks, by position."""

    first_block: int
    blocks: int
    first_layer: int
    layers: int

    @property
    def layer_range(self) -> range:
        return range(self.first_layer, self.first_layer + self.layers)

    def wanted(self, blocks: Sequence[int], positions: Container[int]) -> dict[int, int]:
        """The blocks to send at `positions`: their numbers in the pool by position, without null blocks."""
        last = self.first_block + self.blocks
        own = enumerate(blocks[self.first_block : last], self.first_block)
        return {at: number for at, number in own if number and at in positions}


def span_of(shard: Shard, layers: range) -> Span:
    """Returns the bytes of a shard's block with `layers`, or an empty span for a shard without them."""
    first, last = max(layers.start, shard.layers.start), min(layers.stop, shard.layers.stop)
    if first >= last:
        return 0, 0
    layer_bytes = shard.block_bytes // len(shard.layers)
    return shard.offset(first, 0, shard.kv_heads.start, 0), (
        last - shard.layers.start
    ) * layer_bytes


def sizes_of(part: Part, shards: Sequence[Shard], blocks: int) -> list[int]:
    """Bytes of each shard in a part with `blocks` wanted blocks."""
    spans = [span_of(shard, part.layer_range) for shard in shards]
    return [blocks * (last - first) for first, last in spans]


def chunks_of(
    memory: KvMemory, part: Part, blocks: Sequence[int], max_bytes: int, take: TakeMemory
) -> Iterator[list[memoryview]]:
    """The bytes of a part in `blocks`, numbers of the pool, in pieces. A chunk has blocks of a shard or some bytes of a
    block, `max_bytes` at most. Copies are in memory from `take`."""
    for number, shard in enumerate(memory.shards):
        first, last = span_of(shard, part.layer_range)
        if first == last:
            continue
        step = max(1, max_bytes // (last - first))
        for at in range(0, len(blocks), step):
            for begin in range(first, last, max_bytes):
                span = begin, min(last, begin + max_bytes)
                yield memory.pieces(number, blocks[at : at + step], span, take)


def checksum_after(
    memory: KvMemory,
    part: Part,
    sources: Sequence[Shard],
    blocks: Sequence[int],
    copies: Sequence[ShardCopy],
) -> int | None:
    """Returns the checksum of a part as `copies` wrote it, or None if they wrote less than the part. `blocks` are the
    numbers of the wanted blocks in the sender's pool."""
    spans = [span_of(shard, part.layer_range) for shard in sources]
    size = len(blocks) * sum(last - first for first, last in spans)
    if sum(copy.size for copy in copies) != size:
        return None
    pieces = [np.empty((len(blocks), last - first), dtype=np.uint8) for first, last in spans]
    rows = {number: row for row, number in enumerate(blocks)}
    for copy in copies:
        at = [rows[number] for number in copy.source_blocks]
        for run in copy.runs:
            first = run.source - spans[copy.source_shard][0]
            span = (run.target, run.target + run.size)
            data = np.empty((len(at), run.size), dtype=np.uint8)
            memory.read(copy.target_shard, copy.target_blocks, span, data)
            pieces[copy.source_shard][at, first : first + run.size] = data
    return checksum_of(pieces)


def copies_of(
    part: Part,
    sources: Sequence[Shard],
    targets: Sequence[Shard],
    tokens: range,
    source_numbers: Mapping[int, int],
    target_blocks: Sequence[int],
) -> list[ShardCopy]:
    """The copies of a part's `tokens`, grouped by equal shape. `source_numbers` has the numbers of the wanted blocks by
    position."""
    positions, given = source_numbers.keys(), source_numbers.values()
    numbers = np.full(part.first_block + part.blocks, NOT_WANTED, dtype=np.int64)
    numbers[np.fromiter(positions, np.int64)] = np.fromiter(given, np.int64)
    own = np.asarray(target_blocks, dtype=np.int64)
    found: list[ShardCopy] = []
    for source_shard, source in enumerate(sources):
        size = source.tokens_per_block
        first = max(tokens.start, part.first_block * size)
        last = min(tokens.stop, (part.first_block + part.blocks) * size)
        for target_shard, target in enumerate(targets):
            for each in copies(source, target, range(first, last), part.layer_range):
                at = numbers[each.source_blocks]
                wanted = at != NOT_WANTED
                blocks = at[wanted].tolist(), own[each.target_blocks[wanted]].tolist()
                if blocks[0]:
                    found.append(ShardCopy(source_shard, target_shard, *blocks, each.runs))
    return found
