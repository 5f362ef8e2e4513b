"""A transport offers a worker's KV memory, and reads another worker's.

Only the receiver moves data into the receiver's memory. `read` returns, or raises ReadFailed, once no write of the read
can follow; cancelling does not end the read earlier. So a lease leaves quarantine when all reads have returned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from trtmesh.engine.handoff.block_plan import Run
from trtmesh.v1 import kv_transfer_pb2 as pb

T = TypeVar("T")


class TransportUnusable(Exception):
    """The sender cannot be reached this way; the next transport may."""


class ReadFailed(Exception):
    """The bytes did not arrive. Nothing writes to the blocks any more."""


@dataclass(frozen=True, slots=True)
class ShardCopy:
    """Equal runs between blocks of two pools: `runs` of source_blocks[i] go to target_blocks[i], as pool numbers."""

    source_shard: int
    target_shard: int
    source_blocks: Sequence[int]
    target_blocks: Sequence[int]
    runs: tuple[Run, ...]

    @property
    def size(self) -> int:
        """Bytes to copy."""
        return len(self.source_blocks) * sum(run.size for run in self.runs)


@dataclass(frozen=True, slots=True)
class PoolSize:
    blocks: int
    block_bytes: int


def check_bounds(
    copies: Sequence[ShardCopy], sources: Sequence[PoolSize], targets: Sequence[PoolSize]
) -> None:
    """Raises ReadFailed for shards, blocks or bytes outside of the pools."""
    for copy in copies:
        if not (0 <= copy.source_shard < len(sources) and 0 <= copy.target_shard < len(targets)):
            raise ReadFailed(f"shard {copy.source_shard} or {copy.target_shard} does not exist")
        source, target = sources[copy.source_shard], targets[copy.target_shard]
        for pool, blocks in ((source, copy.source_blocks), (target, copy.target_blocks)):
            if not 0 <= min(blocks, default=0) <= max(blocks, default=0) < pool.blocks:
                raise ReadFailed(f"a pool has {pool.blocks} blocks, but not all that are copied")
        for run in copy.runs:
            if not (
                0 <= run.source < run.source + run.size <= source.block_bytes
                and 0 <= run.target < run.target + run.size <= target.block_bytes
            ):
                raise ReadFailed(f"{run} is outside of blocks of {source} or {target}")


class Source(Protocol):
    """A sender's memory, opened by the receiver of a handoff."""

    async def read(self, copies: Sequence[ShardCopy]) -> None:
        """Copies into the receiver's blocks. Raises ReadFailed."""

    async def close(self) -> None:
        """Ends the reads, and returns once nothing can write any more."""


class Transport(Protocol):
    """Reads the memory of senders on behalf of a receiver, and offers the receiver's own."""

    @property
    def kind(self) -> pb.KvTransport.ValueType: ...

    def offer(self) -> bytes:
        """Connection data for receivers (KvTransportOffer.state)."""

    async def open(self, offer: bytes) -> Source:
        """Opens the sender's memory. Raises TransportUnusable."""

    async def close(self) -> None:
        """Releases the memory. Reads end first."""


async def to_the_end(future: asyncio.Future[T]) -> T:
    """Awaits a future to the end, even when the reader is cancelled, because the writes continue; then raises the
    cancellation."""
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        future.exception()
        raise asyncio.CancelledError
    return future.result()
