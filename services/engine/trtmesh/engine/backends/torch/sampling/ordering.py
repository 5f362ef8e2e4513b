"""How a device finds and sorts the numbers of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ordering:
    """The functions of a device."""

    highest: Callable[[Tensor], tuple[Tensor, Tensor]]
    """The highest number of each row [rows] with the index, the lowest among equals."""
    top: Callable[[Tensor, int], Tensor]
    """The highest numbers of each row, highest first, as many as asked for."""
    descending: Callable[[Tensor], Tensor]
    """Sorts each row, highest first."""
    looks_ahead: bool
    """Whether intermediate results decide the next computation. This saves work but waits for the device."""
