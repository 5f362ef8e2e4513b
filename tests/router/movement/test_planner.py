"""Plans of moves over snapshots of a fleet: each pays, and none is made that helps nobody."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from trtmesh.router.movement.planner import PAYS, Move, Site, Stream, emptied, roomy
from trtmesh.router.movement.planner import evened as each_evening
from trtmesh.router.placement.snapshot import KvFacts

KV = KvFacts(b"kind", frozenset({1}), 64, frozenset({1}))
ADAPTER = (7, "v1")

SITE = Site(
    address="",
    takes=True,
    sequences=0,
    most_sequences=100,
    used_blocks=0,
    total_blocks=1000,
    tokens_per_block=16,
    longest_sequence=1000,
    base_seconds=0.01,
    sequence_seconds=0.001,
    rank_seconds=0.0,
    prefill_seconds=1e-4,
    transfer_seconds=1e-6,
    handoff_seconds=0.01,
    kv=KV,
    held=frozenset({ADAPTER}),
)


def sites(*sequences: int, blocks: int = 10, **changed: Any) -> list[Site]:
    """Workers a, b, ... with so many sequences."""
    return [
        replace(
            SITE,
            address="abcdefgh"[n],
            sequences=count,
            used_blocks=count * blocks,
            **changed,
        )
        for n, count in enumerate(sequences)
    ]


def streams(worker: str, count: int, **changed: Any) -> list[Stream]:
    first = ord(worker) * 1000
    made = Stream(0, worker, tokens=160, remaining=200)
    return [replace(made, number=first + n, **changed) for n in range(count)]


def evened(fleet: Sequence[Site], running: Sequence[Stream], most: int) -> list[Move]:
    return [*each_evening(fleet, running, most)]


def test_crowded_worker_gives_streams_to_an_empty_one_until_both_are_even() -> None:
    moves = evened(sites(10, 0), streams("a", 10), most=20)
    assert {(move.sender, move.receiver) for move in moves} == {("a", "b")}
    assert 3 <= len(moves) <= 5
    assert all(move.gain_seconds >= PAYS * move.cost_seconds for move in moves)
    assert len({each.number for move in moves for each in move.streams}) == len(moves)


def test_nothing_moves_where_it_does_not_pay() -> None:
    assert evened(sites(5, 5), [*streams("a", 5), *streams("b", 5)], most=20) == []
    dear = sites(10, 0, transfer_seconds=1.0)
    assert evened(dear, streams("a", 10), most=20) == []
    short = streams("a", 10, remaining=1)
    assert evened(sites(10, 0), short, most=20) == []


def test_what_may_not_move_stays_and_full_or_other_workers_get_nothing() -> None:
    assert evened(sites(10, 0), streams("a", 10, may_move=False), most=20) == []
    crowded, empty = sites(10, 0)
    for other in (
        replace(empty, takes=False),
        replace(empty, kv=None),
        replace(empty, kind={"device": "another"}),
        replace(empty, kv=KV._replace(compatibility_hash=b"other")),
        replace(empty, used_blocks=990),
        replace(empty, most_sequences=0),
    ):
        assert evened([crowded, other], streams("a", 10), most=20) == []


def test_nothing_moves_to_a_worker_that_would_end_it_earlier() -> None:
    crowded, empty = sites(10, 0)
    short = replace(empty, longest_sequence=800)
    long = streams("a", 10, most_tokens=900)
    assert evened([crowded, empty], long, most=20)
    assert evened([crowded, short], long, most=20) == []
    assert evened([crowded, short], streams("a", 10, most_tokens=800), most=20)
    assert roomy([replace(crowded, used_blocks=950), short], long, 900, "a") == []
    assert roomy([replace(crowded, used_blocks=950), empty], long, 900, "a")


def test_full_pool_gives_kv_to_one_with_space_though_steps_take_equally_long() -> None:
    same = sites(9, 3, blocks=100, sequence_seconds=0.0)
    moves = evened(same, [*streams("a", 9, tokens=1600), *streams("b", 3, tokens=1600)], most=20)
    assert moves
    assert {(move.sender, move.receiver) for move in moves} == {("a", "b")}


def test_sequences_of_an_adapter_are_gathered_where_its_rank_costs_already() -> None:
    fleet = sites(12, 12, sequence_seconds=0.0, rank_seconds=0.0005)
    few = streams("a", 2, adapter=ADAPTER, rank=64)
    others = [replace(each, number=each.number + 500) for each in streams("a", 10)]
    many = streams("b", 12, adapter=ADAPTER, rank=64)
    (move,) = evened(fleet, [*few, *others, *many], most=20)
    assert {each.number for each in move.streams} == {each.number for each in few}
    assert "adapter" in move.why
    elsewhere = [fleet[0], replace(fleet[1], held=frozenset())]
    assert evened(elsewhere, [*few, *others, *many], most=20) == []


def item_of(first: Stream, count: int, shared: int) -> list[Stream]:
    """The sequences of an item, with a prompt of so many tokens."""
    of_item = replace(first, item=first.number, shared_tokens=shared)
    return [replace(of_item, number=first.number + 100 * n) for n in range(count)]


def test_sequences_of_an_item_move_together_and_their_prompt_once() -> None:
    fleet = sites(8, 0)
    running = [each for first in streams("a", 4) for each in item_of(first, 2, 80)]
    moves = evened(fleet, running, most=20)
    assert moves
    assert all(len({each.item for each in move.streams}) == 1 for move in moves)
    assert all(len(move.streams) == 2 for move in moves)
    # 160 tokens and a handoff, then 80 and another one.
    assert moves[0].cost_seconds == pytest.approx(2 * 0.01 + (160 + 80) * 1e-6)
    stays = [replace(each, may_move=each.number >= 100_000) for each in running]
    assert evened(fleet, stays, most=20) == []
    sample = [replace(site, stands_for=2) for site in fleet]
    assert evened(sample, running, most=20) == []


def test_item_needs_room_for_its_prompt_once_and_makes_as_much() -> None:
    full, other = sites(4, 0)
    full, other = replace(full, used_blocks=990), replace(other, used_blocks=0, total_blocks=160)
    # 100 blocks of a prompt, and 20 for each of the sequences.
    item = item_of(Stream(1, "a", tokens=1640, remaining=280, may_move=True), 3, 1600)
    (move,) = roomy([full, other], item, 16 * 110, "a")
    assert len(move.streams) == 3
    assert roomy([full, replace(other, total_blocks=159)], item, 16 * 110, "a") == []
    assert roomy([full, other], item, 16 * 130, "a") == []


def test_room_is_made_by_the_fewest_moves_and_not_where_there_is_some() -> None:
    full = sites(2, 2, 2, blocks=450)
    held = [
        *streams("a", 2, tokens=7200),
        *streams("b", 1, tokens=4000),
        *streams("c", 2, tokens=7200),
    ]
    assert roomy(full, held, tokens=1500) == []
    spacious = [*full[:2], replace(full[2], used_blocks=100)]
    moves = roomy(spacious, held, tokens=14_000)
    assert [(move.sender, move.receiver) for move in moves] == []
    moves = roomy(spacious, held, tokens=6000, only="a")
    assert [(move.sender, move.receiver) for move in moves] == [("a", "c")]
    assert roomy(full, held, tokens=6000, only="a") == []


def test_what_ends_soon_makes_room_by_itself() -> None:
    fleet = sites(1, 0, blocks=950)
    assert roomy(fleet, streams("a", 1, tokens=15_000, remaining=1), 9000, "a") == []
    assert len(roomy(fleet, streams("a", 1, tokens=15_000, remaining=900), 9000, "a")) == 1


def test_leaving_worker_hands_over_what_pays_most_and_lets_the_rest_end() -> None:
    (site, other) = sites(3, 0)
    short, long = streams("a", 2)
    short, long = replace(short, tokens=100), replace(long, tokens=5000)
    ends = replace(short, number=1, remaining=10)
    assert emptied(site, [short, ends, long], 2.0, other) == [long, short]
    assert emptied(site, [short, ends, long], 0.01, other)[0] == long


def calls(work: Callable[[], object]) -> int:
    """Calls of functions in some work: time that no other process changes."""
    count = 0

    def profile(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("adapters", [0, 500, 2000])
@pytest.mark.parametrize("count", [200, 4000])
def test_move_is_found_as_fast_among_any_number_of_streams(count: int, adapters: int) -> None:
    held = frozenset((number, "v1") for number in range(adapters))
    fleet = sites(count, *[count // 2] * 7, total_blocks=10**6, most_sequences=10**6, held=held)
    running = [each for site in fleet for each in streams(site.address, site.sequences)]
    for number, each in enumerate(running):
        adapter = (number % adapters, "v1") if adapters else None
        running[number] = replace(each, number=number, adapter=adapter, rank=8 if adapter else 0)
    moves = each_evening(fleet, running, most=8)
    first = next(moves)
    assert first.pays
    assert calls(partial(next, moves)) < 20_000


def test_room_is_looked_for_at_few_workers_and_streams() -> None:
    fleet = [
        replace(each, address=f"{number}", used_blocks=990)
        for number, each in enumerate(sites(*[8] * 8) * 4)
    ]
    running = streams("a", 400, remaining=10_000)
    running = [replace(each, worker=f"{n % 32}", number=n) for n, each in enumerate(running)]
    first = calls(lambda: roomy(fleet, running[:32], 10_000))
    assert calls(lambda: roomy(fleet, running, 10_000)) - first < 4000
