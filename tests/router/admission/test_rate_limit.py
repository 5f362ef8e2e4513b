"""API keys have tokens, and no key is ever shown."""

from __future__ import annotations

import pytest
from trtmesh.chassis.errors import RateLimited
from trtmesh.router.admission import RateLimiter, key_name
from trtmesh.router.admission.rate_limit import ANONYMOUS, MOST_KEYS


def test_a_key_that_used_up_its_tokens_waits_until_they_came_again() -> None:
    limiter = RateLimiter(100.0, 1000)
    limiter.check("k", 0.0)
    limiter.spend("k", 1500, 0.0)
    with pytest.raises(RateLimited) as refused:
        limiter.check("k", 1.0)
    assert refused.value.retry_after_ms
    seconds = refused.value.retry_after_ms / 1000
    assert 4.0 <= seconds <= 4.1
    limiter.check("other", 1.0)
    limiter.check("k", 1.0 + seconds)


def test_a_bucket_holds_no_more_than_a_burst() -> None:
    limiter = RateLimiter(100.0, 1000)
    limiter.spend("k", 1, 0.0)
    limiter.spend("k", 1000, 3600.0)
    with pytest.raises(RateLimited):
        limiter.check("k", 3600.0)


def test_no_rate_limits_nothing_and_keys_are_bounded() -> None:
    free = RateLimiter(None, 1)
    free.spend("k", 10**9, 0.0)
    free.check("k", 0.0)
    limiter = RateLimiter(1.0, 10)
    for number in range(MOST_KEYS + 100):
        limiter.spend(str(number), 100, 0.0)
    assert len(limiter._buckets) == MOST_KEYS


def test_a_key_is_named_by_its_hash() -> None:
    secret = "sk-very-secret"
    name = key_name({"x-api-key": secret})
    assert key_name({"authorization": f"Bearer {secret}"}) == name
    assert key_name({"authorization": f"bearer {secret}"}) == name
    assert key_name({"x-api-key": "another"}) != name
    assert secret not in name
    assert len(name) == 12
    for nothing in ({}, {"authorization": "Basic abc"}, {"x-api-key": ""}):
        assert key_name(nothing) == ANONYMOUS
