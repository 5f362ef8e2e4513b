"""Which items are sampled, and which of three workers is believed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from trtmesh.router.canary.sample import is_chosen
from trtmesh.router.canary.verdict import (
    Difference,
    Generated,
    Side,
    Verdict,
    first_difference,
    judged,
)

ITEMS = 1_000_000


@pytest.mark.parametrize("share", [0.001, 0.25])
def test_share_of_the_items_is_sampled_wherever_they_run(share: float) -> None:
    chosen = [is_chosen(share, f"request-{n // 4}", n % 4) for n in range(200_000)]
    expected = share * len(chosen)
    # Five standard deviations.
    assert abs(sum(chosen) - expected) < 5 * (expected * (1 - share)) ** 0.5
    assert chosen[:1000] == [is_chosen(share, f"request-{n // 4}", n % 4) for n in range(1000)]


def test_no_share_is_nothing_and_the_whole_is_all() -> None:
    assert not any(is_chosen(0.0, f"{n}", 0) for n in range(1000))
    assert all(is_chosen(1.0, f"{n}", 0) for n in range(1000))


def outputs(draw: random.Random, tokens: int) -> list[Generated]:
    """Sequences of an item as its client has them: some were cut, and those that moved have sums of their own."""
    found = []
    for _ in range(1 + (draw.random() < 0.2)):
        ids = [draw.randrange(6000) for _ in range(draw.randrange(1, tokens))]
        is_whole = draw.random() < 0.8
        found.append(Generated(ids, is_whole, -draw.random() * len(ids) if is_whole else None))
    return found


def repeated(item: list[Generated], draw: random.Random) -> list[Generated]:
    """What an honest worker makes of it: the same, and more where the item was cut."""
    longest = max(len(each.token_ids) for each in item)
    return [
        Generated(
            each.token_ids if each.is_whole else [*each.token_ids, *[5] * (longest % 3)],
            True,
            None if each.log_prob is None else each.log_prob * (1 + draw.uniform(-1e-9, 1e-9)),
        )
        for each in item
    ]


def corrupted(item: list[Generated], draw: random.Random) -> list[Generated]:
    at = draw.randrange(len(item))
    ids = [*item[at].token_ids]
    ids[draw.randrange(len(ids))] += 1
    return [*item[:at], Generated(ids, item[at].is_whole, item[at].log_prob), *item[at + 1 :]]


def items(count: int) -> Iterator[tuple[list[Generated], random.Random]]:
    draw = random.Random(38)
    for _ in range(count):
        yield outputs(draw, 6), draw


def test_no_false_alarm_in_a_million_items() -> None:
    for item, draw in items(ITEMS):
        assert judged(item, repeated(item, draw), None) is None


def test_whoever_differs_is_found_and_nobody_else() -> None:
    for item, draw in items(20_000):
        honest = repeated(item, draw)
        bad = corrupted(item, draw)
        found = judged(bad, honest, repeated(item, draw))
        assert found is not None
        assert found.side is Side.ITEM
        second = judged(item, corrupted(honest, draw), repeated(item, draw))
        if second is None:
            # What it changed was beyond the end of a cut sequence.
            assert any(not each.is_whole for each in item)
        else:
            assert second.side is Side.REPETITION
        alone = judged(bad, honest, None)
        assert alone == Verdict(Side.UNKNOWN, found.where)


def test_three_that_all_differ_name_nobody() -> None:
    one, two, three = ([Generated([1, 2, n], True)] for n in range(3))
    assert judged(one, two, three) == Verdict(Side.UNKNOWN, Difference(0, 2))


@pytest.mark.parametrize(
    ("kept", "again", "where"),
    [
        (Generated([1, 2], True), Generated([1, 2], True), None),
        (Generated([1, 2], False), Generated([1, 2, 3], True), None),
        (Generated([1, 2], True), Generated([1, 2, 3], True), Difference(0, 2)),
        (Generated([1, 2], False), Generated([1], True), Difference(0, 1)),
        (Generated([1, 2], True), Generated([1], True), Difference(0, 1)),
        (Generated([1, 2], True, -3.0), Generated([1, 2], True, -3.1), Difference(0, 2)),
        (Generated([1, 2], True, -3.0), Generated([1, 2], True, -3.000001), None),
        (Generated([1, 2], True), Generated([1, 2], True, -3.1), None),
    ],
)
def test_difference_is_placed(kept: Generated, again: Generated, where: Difference | None) -> None:
    assert first_difference([kept], [again]) == where
