"""What is said when memory runs out."""

from __future__ import annotations

import errno

import pytest
import torch
from trtmesh.chassis.errors import ModelUnusable
from trtmesh.engine.backends.torch.memory.shortage import fitting, shortage

OF_CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 4.31 MiB is free."
    " Process 7 has 78.9 GiB memory in use. Of the allocated memory 70 GiB is allocated by PyTorch, and 1.5 GiB is"
    " reserved by PyTorch but unallocated. See documentation for Memory Management"
)


def test_what_was_asked_for_and_what_is_free_are_kept() -> None:
    assert shortage(torch.OutOfMemoryError(OF_CUDA)) == (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 4.31 MiB is"
        " free"
    )


def test_an_allocation_on_the_host_says_how_much_was_asked_for() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**61, dtype=torch.uint8)
    assert "2305843009213693952 bytes" in (shortage(caught.value) or "")


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (
            RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
            True,
        ),
        (MemoryError("no more"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOENT, "No such file"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_other_errors_are_no_shortage(error: Exception, lacks: bool) -> None:
    said = shortage(error)
    assert (said is not None) == lacks
    assert said is None or "\n" not in said


def test_what_does_not_fit_is_one_error_with_the_settings_to_lower() -> None:
    with (
        pytest.raises(ModelUnusable) as caught,
        fitting("a KV cache of 9 blocks", "engine.a or engine.b"),
    ):
        raise torch.OutOfMemoryError(OF_CUDA)
    text = str(caught.value)
    assert text.startswith(
        "a KV cache of 9 blocks does not fit into memory: CUDA out of memory. Tried"
    )
    assert text.endswith("4.31 MiB is free; lower engine.a or engine.b")
    with pytest.raises(ZeroDivisionError), fitting("it", "nothing"):
        raise ZeroDivisionError
