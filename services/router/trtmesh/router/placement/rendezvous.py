"""Rendezvous hashing, also highest random weight (HRW; Thaler and Ravishankar, 1998): who gets a key, without a table.

Every worker has a pseudo-random weight for every key, and the highest gets it. So routers that know the same workers
agree without a word, also after a restart; when a worker leaves, only its own keys move, evenly to all others; and
one that joins takes only what it gets itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b

MASK = 2**64 - 1


def highest(addresses: Iterable[str], key: int) -> str:
    """The address that gets `key`, a number taken modulo 2**64. At least one address, in any order.

    A weight is the product of two odd numbers modulo 2**64, whose high bits decide: multiplicative hashing
    (Dietzfelbinger et al., 1997) with a factor that is random for each key. It costs one multiplication a worker.
    """
    factor = _odd((key & MASK).to_bytes(8, "little"))
    return max(addresses, key=lambda address: (_factor_of(address) * factor & MASK, address))


@lru_cache(4096)
def _factor_of(address: str) -> int:
    return _odd(address.encode())


def _odd(name: bytes) -> int:
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little") | 1
