"""Sums over the GPUs of a host, each of which reads the memory of the others.

For the few kilobytes of a decode step NCCL takes 17 us on two H100s, a kernel that reads the others' memory 8 us.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch import Tensor

RANKS = (2, 4, 8)
"""Numbers of ranks for which PyTorch's kernel adds in the order of the ranks, so with the same bits on each."""
DTYPES = (torch.float32, torch.bfloat16)
"""Types that the kernel adds."""
MOST_BYTES = 2**20
"""Of a sum. For more, NCCL sends less."""
ALIGNMENT = 16
RELEASE_SECONDS = 5.0
RELEASE_EVERY = 0.0005


class PeerSums:
    """Computes sums in memory that all ranks share. Every rank calls the same methods in the same order."""

    def __init__(self, name: str, store: Any, rank: int, ranks: int, device: torch.device) -> None:
        """`name` is that of the group, once in a process, and the same on all ranks. Raises RuntimeError where the GPUs
        cannot read each other's memory."""
        # Not every build has it. Private: the public names take a default process group, which is global.
        from torch._C import _distributed_c10d

        untyped: Any = _distributed_c10d
        # Found by its name, for its store alone.
        self._group = untyped.ProcessGroup(store, rank, ranks)
        self._group._set_group_name(name)
        untyped._register_process_group(name, self._group)
        memory = untyped._SymmetricMemory
        self._name = name
        self._rank = rank
        self._ranks = ranks
        self._device = device
        memory.set_group_info(name, rank, ranks, store)
        self._buffer: Tensor = memory.empty_strided_p2p((MOST_BYTES,), (1,), torch.uint8, device)
        self._shared = memory.rendezvous(self._buffer, name)

    def takes(self, tensor: Tensor) -> bool:
        return (
            tensor.dtype in DTYPES
            and tensor.nbytes <= MOST_BYTES
            and tensor.nbytes % ALIGNMENT == 0
            and tensor.is_contiguous()
        )

    def add(self, tensor: Tensor) -> None:
        """Replaces a tensor by the sum over all ranks."""
        own = tensor.view(-1)
        part = self._buffer[: tensor.nbytes].view(tensor.dtype)
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(part, own, "sum", self._name, own)

    def release(self) -> None:
        """Lets sums end that wait for a rank that has ended; their results mean nothing."""
        threading.Thread(target=self._release, daemon=True).start()

    def _release(self) -> None:
        """Gives the signals of the other ranks, and takes away those that this one has given them."""
        pads = [self._shared.get_signal_pad(rank).view(torch.int32) for rank in range(self._ranks)]
        ends_at = time.monotonic() + RELEASE_SECONDS
        untyped: Any = torch.cuda
        with torch.cuda.device(self._device), torch.cuda.stream(untyped.Stream(self._device)):
            while time.monotonic() < ends_at:
                for rank, pad in enumerate(pads):
                    pad.fill_(int(rank == self._rank))
                torch.cuda.current_stream().synchronize()
                time.sleep(RELEASE_EVERY)
