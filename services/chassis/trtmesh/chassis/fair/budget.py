"""What waits for its peers, or for this process to read it: bounded for all connections together.

Waiting for room would let those who never finish a message keep everyone else out. Beyond the limit, the connection
that holds most gives way instead.
"""

from __future__ import annotations

from collections.abc import Callable


class Budget:
    """The bytes, or calls, held for all connections of a server, or for all clients of a router."""

    def __init__(self, limit: int, on_much: Callable[[], None] | None = None) -> None:
        """Calls `on_much` whenever something is added beyond a quarter of the limit."""
        self.limit = limit
        self._on_much = on_much
        self._accounts: set[Account] = set()
        self.held = 0

    def account(self, shed: Callable[[], None]) -> Account:
        """The account of a new connection or client. `shed` makes it hold less."""
        account = Account(self, shed)
        self._accounts.add(account)
        return account

    def forget(self, account: Account) -> None:
        self.held -= account.held
        self._accounts.discard(account)

    def check(self) -> None:
        """Called while a quarter of the limit is held. Beyond the limit the largest connection gives way."""
        if self.held > self.limit:
            max(self._accounts, key=lambda account: account.held).shed()
        if self._on_much is not None:
            self._on_much()


class Account:
    """What is held for one connection or client."""

    def __init__(self, budget: Budget, shed: Callable[[], None]) -> None:
        self._budget = budget
        self._closed = False
        self.shed = shed
        self.held = 0

    def add(self, size: int) -> None:
        """Counts what is held from now on, or no longer if `size` is negative."""
        if self._closed:
            return
        budget = self._budget
        self.held += size
        budget.held += size
        if size > 0 and 4 * budget.held > budget.limit:
            budget.check()

    def close(self) -> None:
        """The connection or client is lost: what is held for it counts no longer, and is freed with its calls."""
        if not self._closed:
            self._closed = True
            self._budget.forget(self)
            # It names the owner, which names this account.
            self.shed = _nothing_to_give


def _nothing_to_give() -> None:
    """Its owner is lost."""
