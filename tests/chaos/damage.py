"""Damaged memory of a running process: KV whose bytes change between the sender's checksum and the receiver's read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POOL = "/memfd:trtmesh-kv"
EVERY_BYTES = 4096
"""Every block has damaged bytes in each of its layers."""
FIRST = 3000
"""Not at the end of a row, where a token may be missing."""
FLIPPED = 0x10

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw")


@contextmanager
def damaged_pools(pid: int) -> Iterator[None]:
    """Flips a bit of every few kilobytes of a worker's KV, and flips it back after the block where nothing has been
    written since."""
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        file = memory.fileno()
        flipped = {at: _flip(file, at) for at in _places(pid)}
        yield
        for at, byte in flipped.items():
            if os.pread(file, 1, at) == bytes([byte]):
                os.pwrite(file, bytes([byte ^ FLIPPED]), at)


def _places(pid: int) -> Iterator[int]:
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if POOL in line and (match := _MAPPING.match(line)):
            first, last = (int(each, 16) for each in match.groups())
            yield from range(first + FIRST, last, EVERY_BYTES)


def _flip(file: int, at: int) -> int:
    """Flips a bit; returns the new byte."""
    (byte,) = os.pread(file, 1, at)
    os.pwrite(file, bytes([byte ^ FLIPPED]), at)
    return byte ^ FLIPPED
