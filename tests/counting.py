"""Counts the lines of Python that this thread executes: a measure of work that no machine changes.

A loop counts each time round, in a comprehension too; only what runs in C is not seen, such as a copy.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass(slots=True)
class Lines:
    """Lines executed in files whose path contains a word."""

    word: str
    count: int = 0

    def see(self, frame: FrameType, event: str, _: Any) -> Any:
        """The trace function of a thread."""
        if self.word not in frame.f_code.co_filename:
            return None
        self.count += event == "line"
        return self.see


@contextmanager
def counted_lines(word: str = "/services/") -> Iterator[Lines]:
    """The lines executed in the block."""
    lines, before = Lines(word), sys.gettrace()
    sys.settrace(lines.see)
    try:
        yield lines
    finally:
        sys.settrace(before)
