"""The budget of unread bytes: beyond the limit the largest connection gives way."""

from __future__ import annotations

from trtmesh.chassis.fair.limits import Account, Budget


def test_the_largest_connection_gives_way() -> None:
    budget, gave_way = Budget(100), list[str]()
    accounts: dict[str, Account] = {}

    def opened(name: str) -> Account:
        def shed() -> None:
            gave_way.append(name)
            accounts[name].add(-accounts[name].held)

        accounts[name] = budget.account(shed)
        return accounts[name]

    small, large = opened("small"), opened("large")
    large.add(90)
    small.add(10)
    assert gave_way == []
    small.add(1)
    assert gave_way == ["large"]
    assert (budget.held, small.held, large.held) == (11, 11, 0)


def test_a_closed_connection_holds_nothing() -> None:
    budget = Budget(100)
    account = budget.account(lambda: None)
    account.add(70)
    account.close()
    account.add(-70)
    account.close()
    assert budget.held == 0


def test_what_is_added_beyond_a_quarter_is_told() -> None:
    told = list[int]()
    budget = Budget(100, lambda: told.append(budget.held))
    account = budget.account(lambda: account.add(-account.held))
    account.add(25)
    account.add(-5)
    assert told == []
    account.add(6)
    account.add(-1)
    account.add(75)
    account.add(1)
    assert told == [26, 100, 0]
