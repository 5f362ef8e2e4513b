"""Limits of callers."""

from __future__ import annotations

import pytest
from trtmesh.chassis.errors import InvalidField, RateLimited
from trtmesh.router.admission import Bucket, RateLimiter
from trtmesh.router.admission.rate_limit import MOST_ACCOUNTS
from trtmesh.router.callers.identity import Identity
from trtmesh.router.callers.limits import RateLimit
from trtmesh.router.streams.sequence import Charge


def bucket_of(limiter: RateLimiter, name: str = "k", *, limits: RateLimit) -> Bucket:
    bucket = limiter.account_of(Identity(name, limits), 0.0).tokens
    assert bucket is not None
    return bucket


def test_exhausted_key_waits_for_the_refill() -> None:
    limiter, limits = RateLimiter(), RateLimit(tokens_per_second=100.0, burst_tokens=1000)
    bucket = bucket_of(limiter, limits=limits)
    bucket.check(0.0)
    bucket.spend(1500, 0.0)
    with pytest.raises(RateLimited) as refused:
        bucket_of(limiter, limits=limits).check(1.0)
    assert refused.value.retry_after_ms
    seconds = refused.value.retry_after_ms / 1000
    assert 4.0 <= seconds <= 4.1
    bucket_of(limiter, "other", limits=limits).check(1.0)
    bucket.check(1.0 + seconds)


def test_bucket_holds_at_most_a_burst() -> None:
    bucket = bucket_of(RateLimiter(), limits=RateLimit(tokens_per_second=100.0, burst_tokens=1000))
    bucket.spend(1, 0.0)
    bucket.spend(1000, 3600.0)
    with pytest.raises(RateLimited):
        bucket.check(3600.0)


def test_resumed_request_may_be_a_burst_in_debt() -> None:
    bucket = bucket_of(RateLimiter(), limits=RateLimit(tokens_per_second=1.0, burst_tokens=10))
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
    bucket = bucket_of(RateLimiter(), limits=RateLimit(tokens_per_second=1.0, burst_tokens=100))
    charge = Charge(bucket.spend, received)
    for length in lengths:
        charge.up_to(length, 0.0)
    bucket.spend(100 - taken - 1, 0.0)
    bucket.check(0.0)
    bucket.spend(1, 0.0)
    with pytest.raises(RateLimited):
        bucket.check(0.0)


def test_no_rate_limits_nothing_and_accounts_are_bounded() -> None:
    limiter = RateLimiter()
    account = limiter.account_of(Identity("k"), 0.0)
    account.check_rates(10**6, 0.0)
    account.check_live(10**6, 0)
    assert account.tokens is None
    account.open(1, 0.0)
    for number in range(2 * MOST_ACCOUNTS):
        limiter.account_of(Identity(str(number)), 0.0)
    assert len(limiter._accounts) <= MOST_ACCOUNTS + 1
    assert limiter.account_of(Identity("k"), 0.0) is account, "an account in use is kept"


def test_items_have_a_rate_and_a_number() -> None:
    limits = RateLimit(items_per_second=2.0, burst_items=4, max_items=5)
    account = RateLimiter().account_of(Identity("alice", limits), 0.0)
    account.check_rates(5, 0.0)
    account.check_live(5, 0)
    account.open(5, 0.0)
    with pytest.raises(RateLimited, match="alice used up its 2 items a second") as refused:
        account.check_rates(1, 0.0)
    assert refused.value.retry_after_ms == 1001
    account.check_item_debt(0.0)
    account.check_rates(1, 1.001)
    with pytest.raises(RateLimited, match="alice has 5 items live, 1 asked, 5 allowed"):
        account.check_live(1, 0)
    with pytest.raises(InvalidField, match="has 6 prompts but alice may have at most 5"):
        account.check_live(6, freed=5)
    account.check_live(1, freed=1)
    account.item_ended()
    account.check_live(1, 0)


def test_changed_limits_keep_what_was_spent() -> None:
    limiter = RateLimiter()
    bucket = bucket_of(limiter, limits=RateLimit(tokens_per_second=1.0, burst_tokens=10))
    bucket.spend(8, 0.0)
    assert bucket_of(limiter, limits=RateLimit(tokens_per_second=1.0, burst_tokens=9)) is bucket
    bucket.check(0.0)
    bucket.spend(1, 0.0)
    with pytest.raises(RateLimited):
        bucket.check(0.0)
    unlimited = limiter.account_of(Identity("k"), 0.0)
    assert unlimited.tokens is None


def test_key_asks_for_at_most_its_priority() -> None:
    limits = RateLimit.model_validate({"max_priority": "-1"})
    account = RateLimiter().account_of(Identity("batch", limits), 0.0)
    account.check_priority(-1)
    with pytest.raises(
        InvalidField, match=r"batch may ask for at most -1 \(rate_limit.max_priority"
    ):
        account.check_priority(0)
    RateLimiter().account_of(Identity("free"), 0.0).check_priority(2**31 - 1)
