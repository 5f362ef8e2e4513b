"""Copies between a device and pinned memory, and their end. Imports no Triton, since `choice.py` reads tokens on a CPU
too."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from trtmesh.engine.backends.torch.memory.kvcache import Rows

ALIGNED = 16
"""Fields beginning at a multiple are read at once by kernels."""
IN_FLIGHT = 2
"""Pinned buffers: a step is filled while the copy of the step before may still run."""


class StagedWords:
    """The inputs of a captured step."""

    def __init__(self, words: int, device: torch.device, buffer: Tensor | None = None) -> None:
        """`buffer` is memory on the device for the words; None for memory of its own."""
        if buffer is None:
            buffer = torch.zeros(words, dtype=torch.int64, device=device)
        self.buffer = buffer
        self._stages = [_Stage(words, device) for _ in range(IN_FLIGHT)]
        self._next = 0

    def begin(self) -> Rows:
        """The words to fill, after the end of their last copy."""
        self._next = (self._next + 1) % IN_FLIGHT
        stage = self._stages[self._next]
        stage.wait()
        return stage.words

    def send(self, count: int) -> None:
        """Copies the first `count` of the filled words."""
        self._stages[self._next].send(self.buffer, count)


class Copied:
    """The end of a copy between a device and pinned memory; elsewhere copies end at once."""

    def __init__(self, device: torch.device) -> None:
        untyped: Any = torch.cuda
        self._event = untyped.Event() if device.type == "cuda" else None
        self._device = device

    def record(self) -> None:
        if self._event:
            self._event.record(_stream_of(self._device))

    def wait(self) -> None:
        if self._event:
            self._event.synchronize()


@cache
def _stream_of(device: torch.device) -> Any:
    """The stream of all steps. PyTorch takes longer to tell it than to record an event."""
    return torch.cuda.current_stream(device)


class _Stage:
    """Pinned memory, and the end of the last copy from there."""

    def __init__(self, words: int, device: torch.device) -> None:
        self._memory = torch.zeros(words, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._copied = Copied(device)
        self.wait = self._copied.wait
        self.words = self._memory.numpy()

    def send(self, buffer: torch.Tensor, count: int) -> None:
        buffer[:count].copy_(self._memory[:count], non_blocking=True)
        self._copied.record()


def aligned(words: int) -> int:
    """The next multiple of ALIGNED."""
    return -(-words // ALIGNED) * ALIGNED
