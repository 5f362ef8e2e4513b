"""Limits the token rate, the rate of items and the live items of each caller.

Prompt tokens are charged at encoding, generated tokens with each step. Output lengths are unknown in advance, so a
bucket may fall below zero; the caller is then refused until the bucket refills.
"""

from __future__ import annotations

from collections import OrderedDict

from trtmesh.chassis.errors import InvalidField, RateLimited
from trtmesh.router.callers.identity import Identity
from trtmesh.router.callers.limits import RateLimit

MOST_ACCOUNTS = 10_000
"""Most accounts kept, by latest use; a forgotten account has full buckets. Those with live items are kept."""

UNKNOWN_RETRY_MS = 1000


class Bucket:
    """A token bucket. Times are seconds of any one clock."""

    __slots__ = ("_at", "_burst", "_caller", "_level", "_rate", "_what")

    def __init__(self, caller: str, what: str, rate: float, burst: float, now: float) -> None:
        """A bucket of `what`: tokens or items."""
        self._caller = caller
        self._what = what
        self._rate = rate
        self._burst = self._level = burst
        self._at = now

    def check(self, now: float, *, in_debt: bool = False) -> None:
        """Raises RateLimited with the time to wait, unless the bucket is above zero or, `in_debt`, above -burst."""
        self._fill(now)
        lowest = -self._burst if in_debt else 0.0
        missing = lowest - self._level
        if missing >= 0:
            raise self._refusal(1 + missing)

    def check_room(self, count: int, now: float) -> None:
        """Raises RateLimited with the time to wait, unless the bucket pays for `count` or is full."""
        self._fill(now)
        missing = min(count, self._burst) - self._level
        if missing > 0:
            raise self._refusal(missing)

    def _refusal(self, missing: float) -> RateLimited:
        seconds = missing / self._rate
        return RateLimited(
            f"{self._caller} used up its {self._rate:g} {self._what} a second"
            f" (rate_limit.{self._what}_per_second); try again in {seconds:.1f} s",
            retry_after_ms=int(seconds * 1000) + 1,
        )

    def spend(self, tokens: int, now: float) -> None:
        """Charges tokens."""
        if now != self._at:
            # Equal for all sequences of a step but the first.
            self._fill(now)
        self._level -= tokens

    def change(self, rate: float, burst: float, now: float) -> None:
        """Fills at another rate from now on; keeps what was spent."""
        self._fill(now)
        spent = self._burst - self._level
        self._rate, self._burst, self._level = rate, burst, burst - spent

    def _fill(self, now: float) -> None:
        self._level = min(self._burst, self._level + (now - self._at) * self._rate)
        self._at = now


class Account:
    """What a caller uses at this router."""

    __slots__ = ("_items", "_name", "is_limited", "limits", "live_items", "tokens")

    def __init__(self, name: str) -> None:
        self._name = name
        self.limits = RateLimit()
        self.is_limited = False
        self._items: Bucket | None = None
        self.tokens: Bucket | None = None
        """None without a limit."""
        self.live_items = 0

    def adopt(self, limits: RateLimit, now: float) -> None:
        """Applies the caller's limits, which have changed."""
        self.limits, self.is_limited = limits, limits != RateLimit()
        self.tokens = self._bucket(
            self.tokens, "tokens", limits.tokens_per_second, limits.burst_tokens, now
        )
        self._items = self._bucket(
            self._items, "items", limits.items_per_second, limits.burst_items, now
        )

    def _bucket(
        self, former: Bucket | None, what: str, rate: float | None, burst: int, now: float
    ) -> Bucket | None:
        if rate is None:
            return None
        if former is None:
            return Bucket(self._name, what, rate, burst, now)
        former.change(rate, burst, now)
        return former

    def check_rates(self, items: int, now: float) -> None:
        """Raises RateLimited with the time to wait before so many items may start."""
        if self.tokens is not None:
            self.tokens.check(now)
        if self._items is not None:
            self._items.check_room(items, now)

    def check_token_debt(self, now: float) -> None:
        """Raises RateLimited for a caller who owes a burst of tokens: too much to continue items that were paid."""
        if self.tokens is not None:
            self.tokens.check(now, in_debt=True)

    def check_item_debt(self, now: float) -> None:
        """Raises RateLimited for a caller who owes a burst of items: too many were started or continued."""
        if self._items is not None:
            self._items.check(now, in_debt=True)

    def check_priority(self, priority: int) -> None:
        """Raises InvalidField for a priority that the caller may not ask for."""
        most = self.limits.max_priority
        if most is not None and priority > most:
            raise InvalidField(
                f"is {priority}, but {self._name} may ask for at most {most} (rate_limit.max_priority)",
                field="priority",
                value=str(priority),
                limit=f"at most {most}",
            )

    def check_live(self, items: int, freed: int) -> None:
        """Raises RateLimited if more items are too many once `freed` have ended, InvalidField if they always are."""
        most = self.limits.max_items
        if most is not None and items > most:
            raise InvalidField(
                f"has {items} prompts but {self._name} may have at most {most} live (rate_limit.max_items); split the"
                " request",
                field="items",
                value=str(items),
                limit=f"at most {most}",
            )
        if most is not None and self.live_items - freed + items > most:
            raise RateLimited(
                f"{self._name} has {self.live_items} items live, {items} asked, {most} allowed"
                " (rate_limit.max_items); try again when some have ended",
                retry_after_ms=UNKNOWN_RETRY_MS,
            )

    def open(self, items: int, now: float) -> None:
        """Books live items, also at their rate."""
        self.live_items += items
        if self._items is not None:
            self._items.spend(items, now)

    def item_ended(self, *_: object) -> None:
        """Also the done callback of an item's task."""
        self.live_items -= 1


class RateLimiter:
    """The accounts of this router."""

    def __init__(self) -> None:
        self._accounts: OrderedDict[str, Account] = OrderedDict()

    def account_of(self, caller: Identity, now: float) -> Account:
        """The account of a caller, with its present limits."""
        name = caller.account or caller.name
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = Account(name)
            if len(self._accounts) > MOST_ACCOUNTS:
                self._forget_one()
        else:
            self._accounts.move_to_end(name)
        if caller.limits is not account.limits:
            account.adopt(caller.limits, now)
        return account

    def _forget_one(self) -> None:
        """Forgets the longest unused account. An account in use stays; the next call may forget another."""
        name, account = next(iter(self._accounts.items()))
        if account.live_items:
            self._accounts.move_to_end(name)
        else:
            del self._accounts[name]
