"""Words on the device, filled by one copy from pinned memory."""

from __future__ import annotations

from typing import Any

import torch
from trtmesh.engine.backends.torch.memory.kvcache import Rows

ALIGNED = 16
"""Fields that begin at a multiple begin where kernels read them at once."""
IN_FLIGHT = 2
"""Pinned buffers: a step is filled while the copy of the step before may still run."""


class StagedWords:
    """The inputs of a captured step."""

    def __init__(self, words: int, device: torch.device) -> None:
        self.buffer = torch.zeros(words, dtype=torch.int64, device=device)
        self._stages = [_Stage(words, device) for _ in range(IN_FLIGHT)]
        self._next = 0

    def begin(self) -> Rows:
        """The words to fill, when their last copy has ended."""
        self._next = (self._next + 1) % IN_FLIGHT
        stage = self._stages[self._next]
        stage.wait()
        return stage.words

    def send(self, count: int) -> None:
        """Copies the first `count` of the words that were filled."""
        self._stages[self._next].send(self.buffer, count)


class _Stage:
    """Pinned memory, and the end of the last copy from there."""

    def __init__(self, words: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._memory = torch.zeros(words, dtype=torch.int64, pin_memory=pinned)
        untyped: Any = torch.cuda
        self._copied = untyped.Event() if pinned else None
        self.words = self._memory.numpy()

    def wait(self) -> None:
        if self._copied:
            self._copied.synchronize()

    def send(self, buffer: torch.Tensor, count: int) -> None:
        buffer[:count].copy_(self._memory[:count], non_blocking=True)
        if self._copied:
            self._copied.record()


def aligned(words: int) -> int:
    """The next multiple of ALIGNED."""
    return -(-words // ALIGNED) * ALIGNED
