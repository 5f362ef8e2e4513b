"""Rendezvous hashing, or highest random weight (HRW; Thaler and Ravishankar, 1998): assigns keys without a table.

Each worker has a pseudo-random weight for each key, and the highest weight wins. Routers with the same workers agree
without communication, even after a restart. A leaving worker's keys spread evenly; a joining worker moves only its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b

MASK = 2**64 - 1


def highest(addresses: Iterable[str], key: int) -> str:
    """The address with the highest weight for `key`, from a nonempty set in any order.

    A weight is the product of two odd numbers modulo 2**64, compared by its high bits: multiplicative hashing
    (Dietzfelbinger et al., 1997) with a random factor per key. The cost is a multiplication per worker.
    """
    factor = _odd((key & MASK).to_bytes(8, "little"))
    return max(addresses, key=lambda address: (_factor_of(address) * factor & MASK, address))


@lru_cache(4096)
def _factor_of(address: str) -> int:
    return _odd(address.encode())


def _odd(name: bytes) -> int:
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little") | 1
