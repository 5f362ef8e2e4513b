"""Rendezvous hashing, or highest random weight (HRW; Thaler and Ravishankar, 1998): assigns keys without a table.

Each worker has a pseudo-random weight for each key, and the highest weight wins. Routers with the same workers agree
without communication, even after a restart. A leaving worker's keys spread evenly; a joining worker moves only its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from math import log

MASK = 2**64 - 1


def highest(addresses: Iterable[str], key: int) -> str:
    """The address with the highest weight for `key`, from a nonempty set in any order.

    A weight is the product of two odd numbers modulo 2**64, compared by its high bits: multiplicative hashing
    (Dietzfelbinger et al., 1997) with a random factor per key. The cost is a multiplication per worker.
    """
    factor = _odd((key & MASK).to_bytes(8, "little"))
    return max(addresses, key=lambda address: (_factor_of(address) * factor & MASK, address))


def ranked(workers: Sequence[tuple[str, float]], key: int) -> list[int]:
    """Positions of workers, given as address and weight, from the highest weight for `key` down.

    Weighted rendezvous hashing (Schindelhauer and Schomaker, 2005): a worker is first for a part of the keys in
    proportion to its weight.
    """
    factor = _odd((key & MASK).to_bytes(8, "little"))

    def weight(n: int) -> tuple[float, str]:
        address, share = workers[n]
        return share / -log(((_factor_of(address) * factor & MASK) + 0.5) / 2**64), address

    return sorted(range(len(workers)), key=weight, reverse=True)


@lru_cache(4096)
def _factor_of(address: str) -> int:
    return _odd(address.encode())


def _odd(name: bytes) -> int:
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little") | 1
