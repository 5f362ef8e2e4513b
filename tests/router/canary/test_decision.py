"""Which items are sampled, and which of three workers is believed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache

import pytest
from trtmesh.router.canary.sample import has_room, is_chosen, repeatable
from trtmesh.router.canary.verdict import (
    Difference,
    Generated,
    Side,
    Verdict,
    first_difference,
    judged,
)
from trtmesh.v1.engine_pb2 import SubmitCommand


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


def computed(truth: list[list[int]], most: int, stopped: int) -> list[Generated]:
    """What a worker makes of sequences with at most so many new tokens; the first is stopped after a few, if not 0."""
    whole = [ids[:most] for ids in truth]
    found = [Generated(ids, True, -0.5 * len(ids)) for ids in whole]
    if 0 < stopped < len(whole[0]):
        found[0] = Generated(whole[0][:stopped], False)
    return found


@cache
def repetition_of(prompt_tokens: int, tokens: int) -> SubmitCommand:
    return repeatable(SubmitCommand(token_ids=[0] * prompt_tokens), [Generated([7] * tokens, True)])


def false_alarms(has_room: Callable[[SubmitCommand, int], bool], count: int) -> tuple[int, int]:
    """Alarms among items of honest workers with unlike limits, and the number of comparisons: items end by themselves,
    by `max_tokens`, by the limit of their worker, or are stopped."""
    draw, alarms, compared = random.Random(38), 0, 0
    columns = (range(1, 12), (0, 0, 0, 5), range(1, 9), (10, 14, 32), (10, 14, 32), range(1, 12))
    drawn = zip(*(draw.choices(each, k=count) for each in (*columns, range(4))), strict=True)
    for length, other, prompt, one, two, asked, stopped in drawn:
        truth = [[7] * length, *([[7] * other] if other else [])]
        item = computed(truth, min(asked, one - prompt), stopped)
        command = repetition_of(prompt, max(len(each.token_ids) for each in item))
        if has_room(command, two):
            most = min(command.config.stopping.max_tokens, two - prompt)
            alarms += judged(item, computed(truth, most, 0), None) is not None
            compared += 1
    return alarms, compared


@pytest.mark.parametrize("count", [20_000, pytest.param(10**6, marks=pytest.mark.soak)])
def test_no_false_alarm(count: int) -> None:
    alarms, compared = false_alarms(has_room, count)
    assert alarms == 0
    assert compared > count / 2


def test_workers_without_room_would_be_false_alarms() -> None:
    alarms, compared = false_alarms(lambda command, limit: len(command.token_ids) < limit, 1000)
    assert alarms > 10
    assert compared == 1000


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
