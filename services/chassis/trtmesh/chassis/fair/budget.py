"""Limits what is buffered for all connections together.

If others waited for room, a peer that never finishes a message would keep them out. Beyond the limit, the connection
that holds most sheds some instead.
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
        """Opens the account of a connection or client. `shed` makes it hold less."""
        account = Account(self, shed)
        self._accounts.add(account)
        return account

    def forget(self, account: Account) -> None:
        self.held -= account.held
        self._accounts.discard(account)

    def check(self) -> None:
        """Has the largest connection shed, beyond the limit. Called while a quarter of the limit is held."""
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
        """Counts no more: the connection or client is lost, and its calls free what they hold."""
        if not self._closed:
            self._closed = True
            self._budget.forget(self)
            # It names the owner, which names this account.
            self.shed = _nothing_to_give


def _nothing_to_give() -> None:
    """Its owner is lost."""
