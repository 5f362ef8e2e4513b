"""Token rates of API keys: a bucket for each key that prompt and generated tokens are taken from.

What an item will generate is not known when it comes, so tokens are taken when they are counted and a bucket may fall
below zero; until it is filled again its key is refused. Keys themselves are kept nowhere, only their hashes.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

from trtmesh.chassis.errors import RateLimited

MOST_KEYS = 10_000
"""Buckets that are remembered; one that is forgotten begins full again."""

ANONYMOUS = "anonymous"


def key_name(metadata: dict[str, str]) -> str:
    """What a caller's API key is called in logs and metrics: a hash of it. The key is `x-api-key`, or the bearer token
    of `authorization`; callers without one share a name."""
    key = metadata.get("x-api-key", "")
    scheme, _, token = metadata.get("authorization", "").partition(" ")
    if not key and scheme.lower() == "bearer":
        key = token.strip()
    return blake2b(key.encode(), digest_size=6).hexdigest() if key else ANONYMOUS


class RateLimiter:
    """The buckets. Times are seconds of one clock; a rate of None limits nothing."""

    def __init__(self, tokens_per_second: float | None, burst_tokens: int) -> None:
        self._rate = tokens_per_second
        self._burst = float(burst_tokens)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def check(self, key: str, now: float) -> None:
        """Raises RateLimited, with the time until the bucket is above zero, when the key used up its tokens."""
        if self._rate is None:
            return
        level = self._level(key, now)
        if level <= 0:
            seconds = (1 - level) / self._rate
            raise RateLimited(
                f"API key {key} used up its {self._rate:g} tokens a second (key_tokens_per_second);"
                f" try again in {seconds:.1f} s",
                retry_after_ms=int(seconds * 1000) + 1,
            )

    def spend(self, key: str, tokens: int, now: float) -> None:
        """Takes tokens that were counted."""
        if self._rate is None or not tokens:
            return
        self._buckets[key] = (self._level(key, now) - tokens, now)
        self._buckets.move_to_end(key)
        if len(self._buckets) > MOST_KEYS:
            self._buckets.popitem(last=False)

    def _level(self, key: str, now: float) -> float:
        level, at = self._buckets.get(key, (self._burst, now))
        return min(self._burst, level + (now - at) * (self._rate or 0.0))
