"""Copies between blocks of pools in host memory, by few and large calls.

numpy releases the GIL while it copies, and a call takes about a microsecond besides. So a call copies all runs of a
block at regular distances, and neighbouring blocks together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from trtmesh.engine.handoff.transports.transport import PoolSize, ShardCopy, check_bounds
from trtmesh.engine.kv_memory import Bytes

BATCH_BYTES = 16 << 20
"""Bytes copied by a thread without a pause: a few milliseconds."""


@dataclass(frozen=True, slots=True)
class _Axis:
    count: int
    source_stride: int
    target_stride: int


@dataclass(frozen=True, slots=True)
class _Shape:
    """Equal runs at regular distances, along any number of axes."""

    size: int
    axes: tuple[_Axis, ...] = ()


@dataclass(frozen=True, slots=True)
class _Grid:
    """Runs of a block, from the offsets of the first on."""

    source: int
    target: int
    shape: _Shape

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(axis.count for axis in self.shape.axes)

    def source_view(self, rows: Bytes) -> Bytes:
        strides = [axis.source_stride for axis in self.shape.axes]
        return _view(rows[:, self.source :], (*self.counts, self.shape.size), strides)

    def target_view(self, rows: Bytes) -> Bytes:
        strides = [axis.target_stride for axis in self.shape.axes]
        return _view(rows[:, self.target :], (*self.counts, self.shape.size), strides)


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks to copy between views [blocks, ...] of two pools."""

    source: Bytes
    target: Bytes
    source_blocks: NDArray[np.intp]
    target_blocks: NDArray[np.intp]

    @property
    def size(self) -> int:
        """Bytes to copy."""
        return len(self.source_blocks) * int(np.prod(self.source.shape[1:]))

    def copy(self) -> None:
        sources, targets = self.source_blocks, self.target_blocks
        breaks = np.flatnonzero((np.diff(sources) != 1) | (np.diff(targets) != 1)) + 1
        starts = np.concatenate(([0], breaks))
        counts = np.diff(np.concatenate((starts, [len(sources)])))
        neighbours = zip(
            sources[starts].tolist(), targets[starts].tolist(), counts.tolist(), strict=True
        )
        for source, target, count in neighbours:
            np.copyto(self.target[target : target + count], self.source[source : source + count])


def batches(
    copies: Sequence[ShardCopy], sources: Sequence[Bytes], targets: Sequence[Bytes]
) -> Iterator[list[Piece]]:
    """Copies between rows [blocks, bytes], in batches of about BATCH_BYTES. Raises ReadFailed for bytes outside."""
    check_bounds(
        copies, *([PoolSize(*rows.shape) for rows in pools] for pools in (sources, targets))
    )
    batch: list[Piece] = []
    size = 0
    for copy in copies:
        for piece in _pieces(copy, sources[copy.source_shard], targets[copy.target_shard]):
            batch.append(piece)
            size += piece.size
            if size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _pieces(copy: ShardCopy, source: Bytes, target: Bytes) -> Iterator[Piece]:
    source_blocks = np.asarray(copy.source_blocks, dtype=np.intp)
    target_blocks = np.asarray(copy.target_blocks, dtype=np.intp)
    for grid in _grids(copy):
        views = grid.source_view(source), grid.target_view(target)
        step = max(1, BATCH_BYTES // int(np.prod(views[0].shape[1:])))
        for at in range(0, len(source_blocks), step):
            some = slice(at, at + step)
            yield Piece(*views, source_blocks[some], target_blocks[some])


def _view(rows: Bytes, shape: tuple[int, ...], strides: Sequence[int]) -> Bytes:
    view: Bytes = np.lib.stride_tricks.as_strided(
        rows,
        (len(rows), *shape),
        (rows.strides[0], *strides, 1),
        writeable=rows.flags.writeable,
    )
    return view


def _grids(copy: ShardCopy) -> list[_Grid]:
    grids = [_Grid(run.source, run.target, _Shape(run.size)) for run in copy.runs]
    return _folded(_folded(grids))


def _folded(grids: Sequence[_Grid]) -> list[_Grid]:
    """Consecutive equal grids at regular distances, as grids with a further axis."""
    groups: list[list[_Grid]] = []
    for grid in grids:
        group = groups[-1] if groups else []
        if group and _continues(group, grid):
            group.append(grid)
        else:
            groups.append([grid])
    return [group[0] if len(group) == 1 else _fold(group) for group in groups]


def _continues(group: Sequence[_Grid], grid: _Grid) -> bool:
    if grid.shape != group[-1].shape:
        return False
    return len(group) == 1 or _distance(group[-1], grid) == _distance(group[0], group[1])


def _fold(group: Sequence[_Grid]) -> _Grid:
    first = group[0]
    axes = _Axis(len(group), *_distance(first, group[1])), *first.shape.axes
    return replace(first, shape=replace(first.shape, axes=axes))


def _distance(first: _Grid, second: _Grid) -> tuple[int, int]:
    return second.source - first.source, second.target - first.target
