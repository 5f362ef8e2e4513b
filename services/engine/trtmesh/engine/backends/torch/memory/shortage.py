"""Recognises a lack of memory by an allocator's words."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from trtmesh.chassis.errors import ModelUnusable

SIGNS = ("out of memory", "can't allocate memory")
"""In the words of CUDA, and of PyTorch on a CPU. Neither has a type for this error."""
END = " is free."
"""The first part of PyTorch's words: the requested and the free memory. The rest is about the allocator."""

LESS_STEP = "engine.torch.batching.max_step_tokens or engine.torch.limits.max_batch_size"


def shortage(error: BaseException) -> str | None:
    """Returns the requested and the free memory, where an error is a lack of memory, else None."""
    text = str(error)
    if not _is_shortage(error, text):
        return None
    first, end, _ = text.partition(END)
    return first + end.rstrip(".") if end else text.partition("\n")[0]


def _is_shortage(error: BaseException, text: str) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in text for sign in SIGNS)


@contextmanager
def fitting(what: str, lower: str) -> Iterator[None]:
    """Raises ModelUnusable where `what` does not fit into memory; `lower` names settings."""
    try:
        yield
    except Exception as error:
        if (lack := shortage(error)) is None:
            raise
        raise ModelUnusable(f"{what} does not fit into memory: {lack}; lower {lower}") from error
