"""Limits the token rate of each API key with a token bucket.

Prompt tokens are charged at encoding, generated tokens with each step. Output lengths are unknown in advance, so a
bucket may fall below zero; the key is then refused until the bucket refills. Only hashes of keys are stored.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import Annotated

from pydantic import Field
from trtmesh.chassis.errors import RateLimited
from trtmesh.chassis.settings import Settings

MOST_KEYS = 10_000
"""Most buckets kept, by latest use; a forgotten bucket is full."""

ANONYMOUS = "anonymous"


class RateLimit(Settings):
    """Token bucket of each API key, at this router."""

    tokens_per_second: Annotated[float, Field(gt=0)] | None = None
    """Rate at which a bucket fills; it pays for prompt and generated tokens. Unset limits nothing."""
    burst_tokens: Annotated[int, Field(ge=1)] = 100_000
    """Size of a bucket."""


def key_name(metadata: dict[str, str]) -> str:
    """The name of an API key in logs and metrics: a hash.

    The key is `x-api-key` or the bearer token of `authorization`. Callers without a key share a name.
    """
    key = metadata.get("x-api-key", "")
    scheme, _, token = metadata.get("authorization", "").partition(" ")
    if not key and scheme.lower() == "bearer":
        key = token.strip()
    return blake2b(key.encode(), digest_size=6).hexdigest() if key else ANONYMOUS


class Bucket:
    """Token bucket of an API key. Times are seconds of any one clock."""

    __slots__ = ("_at", "_burst", "_key", "_level", "_rate")

    def __init__(self, key: str, rate: float, burst: float, now: float) -> None:
        self._key = key
        self._rate = rate
        self._burst = self._level = burst
        self._at = now

    def check(self, now: float, *, in_debt: bool = False) -> None:
        """Raises RateLimited with the time to wait, unless the bucket is above zero or, `in_debt`, above -burst."""
        self._fill(now)
        lowest = -self._burst if in_debt else 0.0
        missing = lowest - self._level
        if missing >= 0:
            seconds = (1 + missing) / self._rate
            raise RateLimited(
                f"API key {self._key} used up its {self._rate:g} tokens a second (rate_limit.tokens_per_second);"
                f" try again in {seconds:.1f} s",
                retry_after_ms=int(seconds * 1000) + 1,
            )

    def spend(self, tokens: int, now: float) -> None:
        """Charges tokens."""
        if now != self._at:
            # Equal for all sequences of a step but the first.
            self._fill(now)
        self._level -= tokens

    def _fill(self, now: float) -> None:
        self._level = min(self._burst, self._level + (now - self._at) * self._rate)
        self._at = now


class RateLimiter:
    """The buckets of this router."""

    def __init__(self, limit: RateLimit) -> None:
        self._rate = limit.tokens_per_second
        self._burst = float(limit.burst_tokens)
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def bucket_of(self, key: str, now: float) -> Bucket | None:
        """The bucket of a key; None without a limit."""
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
