"""Host memory for the KV pool in an anonymous file, which other processes of the host may map."""

from __future__ import annotations

import mmap
import os
import weakref

import numpy as np
from trtmesh.engine.kv_memory import Bytes, map_anonymous


class AnonymousFile:
    """Zeroed memory of a fixed size, with `file` as long as this object lives."""

    def __init__(self, size: int) -> None:
        """Where the system has no anonymous files, the memory is private. Who offers the file seals it."""
        memory, self.file = map_anonymous(size)
        if self.file is not None:
            weakref.finalize(self, os.close, self.file)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes: Bytes = np.frombuffer(memory, dtype=np.uint8)
