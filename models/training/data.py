"""Token streams: reading them, and packing them into rows."""

from __future__ import annotations

import lzma
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

END_ID = 0


def load_stream(folder: Path, split: str) -> torch.Tensor:
    """Reads the little-endian uint16 ids of a split's shards as int32, shape [tokens]."""
    paths = sorted(folder.rglob(f"{split}-*.bin.xz"))
    if not paths:
        raise FileNotFoundError(f"no {split}-*.bin.xz in {folder}")
    parts = [np.frombuffer(lzma.decompress(path.read_bytes()), dtype="<u2") for path in paths]
    return torch.from_numpy(np.concatenate(parts).astype(np.int32))


class Packer:
    """Cuts a stream of documents into rows, each token being predicted once an epoch.

    Every epoch puts the documents in a new order, starts at a random point, and cuts rows
    without regard to document borders, so that a row may begin anywhere in a file.
    """

    def __init__(self, stream: torch.Tensor, row: int, seed: int) -> None:
        self._stream = stream
        self._row = row
        self._generator = torch.Generator(device=stream.device).manual_seed(seed)
        ends = (stream == END_ID).nonzero().squeeze(1) + 1
        self._starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        self._lengths = ends - self._starts

    def epoch(self) -> torch.Tensor:
        """Shape [rows, row + 1], in random order; the last column is only a target."""
        device = self._stream.device
        order = torch.randperm(len(self._starts), generator=self._generator, device=device)
        lengths = self._lengths[order]
        begins = lengths.cumsum(0) - lengths
        index = torch.repeat_interleave(self._starts[order] - begins, lengths)
        index += torch.arange(len(index), device=device)
        shift = int(torch.randint(len(index), (1,), generator=self._generator, device=device))
        stream = self._stream[index].roll(shift)
        rows = stream[: (len(stream) - 1) // self._row * self._row + 1].unfold(
            0, self._row + 1, self._row
        )
        return rows[torch.randperm(len(rows), generator=self._generator, device=device)]

    def batches(self, rows: int) -> Iterator[torch.Tensor]:
        """Endless batches of shape [rows, row + 1], int64; an epoch's short last one is dropped."""
        while True:
            epoch = self.epoch()
            for first in range(0, len(epoch) - rows + 1, rows):
                yield epoch[first : first + rows].long()


def consecutive_rows(stream: torch.Tensor, row: int) -> torch.Tensor:
    """Shape [rows, row + 1], in stream order, for evaluation; a short rest is dropped."""
    usable = (len(stream) - 1) // row * row + 1
    return stream[:usable].unfold(0, row + 1, row).long()
