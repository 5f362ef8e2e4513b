"""Token rates of API keys: a bucket for each key that prompt and generated tokens are taken from.

What an item will generate is not known when it comes, so tokens are taken when they are counted, those of a prompt when
it is encoded and the others with each step, and a bucket may fall below zero; until it is filled again its key is
refused. Keys themselves are kept nowhere, only their hashes.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

from trtmesh.chassis.errors import RateLimited

MOST_KEYS = 10_000
"""Buckets that are remembered, those of the latest requests; one that is forgotten begins full again."""

ANONYMOUS = "anonymous"


def key_name(metadata: dict[str, str]) -> str:
    """What a caller's API key is called in logs and metrics: a hash of it. The key is `x-api-key`, or the bearer token
    of `authorization`; callers without one share a name."""
    key = metadata.get("x-api-key", "")
    scheme, _, token = metadata.get("authorization", "").partition(" ")
    if not key and scheme.lower() == "bearer":
        key = token.strip()
    return blake2b(key.encode(), digest_size=6).hexdigest() if key else ANONYMOUS


class Bucket:
    """The tokens that one API key may use. Times are seconds of one clock."""

    __slots__ = ("_at", "_burst", "_key", "_level", "_rate")

    def __init__(self, key: str, rate: float, burst: float, now: float) -> None:
        self._key = key
        self._rate = rate
        self._burst = self._level = burst
        self._at = now

    def check(self, now: float, *, in_debt: bool = False) -> None:
        """Raises RateLimited, with the time until that is over, when the bucket is not above zero; `in_debt` asks only
        whether it is less than a whole burst below."""
        self._fill(now)
        lowest = -self._burst if in_debt else 0.0
        missing = lowest - self._level
        if missing >= 0:
            seconds = (1 + missing) / self._rate
            raise RateLimited(
                f"API key {self._key} used up its {self._rate:g} tokens a second (key_tokens_per_second);"
                f" try again in {seconds:.1f} s",
                retry_after_ms=int(seconds * 1000) + 1,
            )

    def spend(self, tokens: int, now: float) -> None:
        """Takes tokens that were counted."""
        if now != self._at:
            # Not so for all but the first sequence of a step.
            self._fill(now)
        self._level -= tokens

    def _fill(self, now: float) -> None:
        self._level = min(self._burst, self._level + (now - self._at) * self._rate)
        self._at = now


class RateLimiter:
    """The buckets of this router; a rate of None limits nothing."""

    def __init__(self, tokens_per_second: float | None, burst_tokens: int) -> None:
        self._rate = tokens_per_second
        self._burst = float(burst_tokens)
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def bucket_of(self, key: str, now: float) -> Bucket | None:
        """The bucket of a key, which is full where none is remembered; None where nothing is limited."""
        if self._rate is None:
            return None
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = Bucket(key, self._rate, self._burst, now)
            if len(self._buckets) > MOST_KEYS:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(key)
        return bucket
