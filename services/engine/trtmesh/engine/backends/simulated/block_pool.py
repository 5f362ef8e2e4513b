"""KV blocks of a simulated worker: private to a sequence, shared by name, or idle and kept for reuse."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence


class BlockPool:
    """Numbers of blocks, from 1 on.

    Private blocks go by their number, shared ones by their name, the hash of their tokens. Shared blocks have a
    reference count; at 0 they are idle, and the longest idle block is evicted first. Sequences hold whole chains and
    release them from the end, so children are evicted before their parents.
    """

    def __init__(self, total_blocks: int, freed: Callable[[list[int]], None]) -> None:
        """`freed` is called with blocks that are without content from now on."""
        self.total_blocks = total_blocks
        self._freed = freed
        self._free: list[int] = []
        self._next = 1
        """Blocks from this one on were never used."""
        self._private = 0
        self._numbers: dict[int, int] = {}
        """Shared blocks by name."""
        self._references: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def free_blocks(self) -> int:
        """Blocks without a holder."""
        return self.total_blocks - self.used_blocks

    @property
    def used_blocks(self) -> int:
        """Blocks held by sequences and leases."""
        return self._private + len(self._references) - len(self._idle)

    def match(self, names: Sequence[int]) -> int:
        """Number of leading names in the pool."""
        for count, name in enumerate(names):
            if name not in self._references:
                return count
        return len(names)

    def numbers(self, names: Sequence[int]) -> list[int]:
        """The numbers of shared blocks."""
        return [self._numbers[name] for name in names]

    def can_acquire(self, shared: Sequence[int], private: int) -> bool:
        """Whether `acquire` has room."""
        woken = sum(1 for name in shared if name in self._idle)
        return private + woken <= self.free_blocks

    def acquire(self, shared: Sequence[int], private: int) -> tuple[list[int], list[int]]:
        """Holds shared blocks of the pool and `private` new blocks; returns the new blocks and the evicted names."""
        for name in shared:
            self._hold(name)
        missing = private - len(self._free) - (self.total_blocks + 1 - self._next)
        evicted = [self._idle.popitem(last=False)[0] for _ in range(missing)]
        if evicted:
            self._put_back([self._numbers.pop(name) for name in evicted])
            for name in evicted:
                del self._references[name]
        self._private += private
        return self._pop(private), evicted

    def share(self, names: Sequence[int], numbers: Sequence[int]) -> list[bool]:
        """Shares private blocks of a sequence under `names`; returns for each whether its name is new to the pool.

        A known block is held instead, and the private copy is freed.
        """
        if self._references.keys().isdisjoint(names):
            self._references.update(dict.fromkeys(names, 1))
            self._numbers.update(zip(names, numbers, strict=True))
            self._private -= len(names)
            return [True] * len(names)
        new, copies = [], []
        for name, number in zip(names, numbers, strict=True):
            is_new = name not in self._references
            if is_new:
                self._publish(name, number)
            else:
                self._hold(name)
                copies.append(number)
            new.append(is_new)
        self.release((), copies)
        return new

    def publish(self, names: Sequence[int], numbers: Sequence[int]) -> list[bool]:
        """Shares private blocks whose name is new to the pool; returns for each whether it is. Others stay private."""
        new = []
        for name, number in zip(names, numbers, strict=True):
            is_new = name not in self._references
            if is_new:
                self._publish(name, number)
            new.append(is_new)
        return new

    def release(self, shared: Sequence[int], private: list[int]) -> None:
        """Releases blocks of a sequence or a lease."""
        if private:
            self._private -= len(private)
            self._put_back(private)
        for name in reversed(shared):
            self._references[name] -= 1
            if not self._references[name]:
                self._idle[name] = None

    def _publish(self, name: int, number: int) -> None:
        self._references[name] = 1
        self._numbers[name] = number
        self._private -= 1

    def _hold(self, name: int) -> None:
        if not self._references[name]:
            del self._idle[name]
        self._references[name] += 1

    def _put_back(self, numbers: list[int]) -> None:
        self._freed(numbers)
        self._free += numbers

    def _pop(self, count: int) -> list[int]:
        """Takes free blocks, the last freed first."""
        reused = min(count, len(self._free))
        numbers = self._free[len(self._free) - reused :]
        del self._free[len(self._free) - reused :]
        fresh = count - reused
        numbers += range(self._next, self._next + fresh)
        self._next += fresh
        return numbers
