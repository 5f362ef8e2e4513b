"""Limits the memory held for all connections together.

Nobody waits for room, because a peer with an endless message would keep the others waiting. Instead, beyond the limit,
the connection with the most must shed some.
"""

from __future__ import annotations

from collections.abc import Callable


class Budget:
    """The bytes or calls held for all connections of a server, or for all clients of a router."""

    def __init__(self, limit: int, on_much: Callable[[], None] | None = None) -> None:
        """Calls `on_much` after each addition beyond a quarter of the limit."""
        self.limit = limit
        self._on_much = on_much
        self._accounts: set[Account] = set()
        self.held = 0

    def account(self, shed: Callable[[], None]) -> Account:
        """Opens the account of a connection or client. After `shed`, the owner must hold less."""
        account = Account(self, shed)
        self._accounts.add(account)
        return account

    def forget(self, account: Account) -> None:
        self.held -= account.held
        self._accounts.discard(account)

    def check(self) -> None:
        """Beyond the limit, has the largest account shed. Called for additions beyond a quarter of the limit."""
        if self.held > self.limit:
            max(self._accounts, key=lambda account: account.held).shed()
        if self._on_much is not None:
            self._on_much()


class Account:
    """The bytes or calls held for a connection or client."""

    def __init__(self, budget: Budget, shed: Callable[[], None]) -> None:
        self._budget = budget
        self._closed = False
        self.shed = shed
        self.held = 0

    def add(self, size: int) -> None:
        """Counts an addition, or a release if `size` is negative."""
        if self._closed:
            return
        budget = self._budget
        self.held += size
        budget.held += size
        if size > 0 and 4 * budget.held > budget.limit:
            budget.check()

    def close(self) -> None:
        """Stops counting: the connection or client is lost, and the calls free their memory."""
        if not self._closed:
            self._closed = True
            self._budget.forget(self)
            # A cycle: the method belongs to the owner of this account.
            self.shed = _nothing_to_give


def _nothing_to_give() -> None:
    """The owner is lost."""
