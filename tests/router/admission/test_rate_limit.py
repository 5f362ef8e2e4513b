"""Token buckets of API keys, and the secrecy of keys."""

from __future__ import annotations

import pytest
from trtmesh.chassis.errors import RateLimited
from trtmesh.router.admission import Bucket, RateLimit, RateLimiter, key_name
from trtmesh.router.admission.rate_limit import ANONYMOUS, MOST_KEYS
from trtmesh.router.streams.sequence import Charge


def bucket_of(limiter: RateLimiter, key: str = "k") -> Bucket:
    bucket = limiter.bucket_of(key, 0.0)
    assert bucket is not None
    return bucket


def test_exhausted_key_waits_for_the_refill() -> None:
    limiter = RateLimiter(RateLimit(tokens_per_second=100.0, burst_tokens=1000))
    bucket = bucket_of(limiter)
    bucket.check(0.0)
    bucket.spend(1500, 0.0)
    with pytest.raises(RateLimited) as refused:
        bucket_of(limiter).check(1.0)
    assert refused.value.retry_after_ms
    seconds = refused.value.retry_after_ms / 1000
    assert 4.0 <= seconds <= 4.1
    bucket_of(limiter, "other").check(1.0)
    bucket.check(1.0 + seconds)


def test_bucket_holds_at_most_a_burst() -> None:
    bucket = bucket_of(RateLimiter(RateLimit(tokens_per_second=100.0, burst_tokens=1000)))
    bucket.spend(1, 0.0)
    bucket.spend(1000, 3600.0)
    with pytest.raises(RateLimited):
        bucket.check(3600.0)


def test_resumed_request_may_be_a_burst_in_debt() -> None:
    bucket = bucket_of(RateLimiter(RateLimit(tokens_per_second=1.0, burst_tokens=10)))
    bucket.spend(19, 0.0)
    bucket.check(0.0, in_debt=True)
    bucket.spend(3, 0.0)
    with pytest.raises(RateLimited) as refused:
        bucket.check(0.0, in_debt=True)
    assert refused.value.retry_after_ms == 3001
    bucket.check(3.001, in_debt=True)


@pytest.mark.parametrize(
    ("received", "lengths", "taken"),
    [(0, [1, 2, 5], 5), (3, [3, 4, 6], 3), (0, [4, 1, 2, 4, 6], 6), (0, [4, 3, 3], 4)],
    ids=["grows", "goes on", "rewritten", "cut at a stop text"],
)
def test_each_token_of_a_sequence_is_taken_once(
    received: int, lengths: list[int], taken: int
) -> None:
    bucket = bucket_of(RateLimiter(RateLimit(tokens_per_second=1.0, burst_tokens=100)))
    charge = Charge(bucket.spend, received)
    for length in lengths:
        charge.up_to(length, 0.0)
    bucket.spend(100 - taken - 1, 0.0)
    bucket.check(0.0)
    bucket.spend(1, 0.0)
    with pytest.raises(RateLimited):
        bucket.check(0.0)


def test_no_rate_limits_nothing_and_keys_are_bounded() -> None:
    assert RateLimiter(RateLimit()).bucket_of("k", 0.0) is None
    limiter = RateLimiter(RateLimit(tokens_per_second=1.0, burst_tokens=10))
    for number in range(MOST_KEYS + 100):
        limiter.bucket_of(str(number), 0.0)
    assert len(limiter._buckets) == MOST_KEYS


def test_key_is_named_by_a_hash() -> None:
    secret = "sk-very-secret"
    name = key_name({"x-api-key": secret})
    assert key_name({"authorization": f"Bearer {secret}"}) == name
    assert key_name({"authorization": f"bearer {secret}"}) == name
    assert key_name({"x-api-key": "another"}) != name
    assert secret not in name
    assert len(name) == 12
    for nothing in ({}, {"authorization": "Basic abc"}, {"x-api-key": ""}):
        assert key_name(nothing) == ANONYMOUS
