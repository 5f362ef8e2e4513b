"""Loads of five kinds, small enough to try every fleet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from random import Random

from trtmesh.tools.fleet_replay.fleet_model import FleetModel
from trtmesh.tools.fleet_replay.trace import Arrival

MODEL = FleetModel(
    prefill_tokens_per_second=8000, step_seconds=0.020, step_seconds_per_sequence=0.0005
)
BLOCK = 512


def steady_chat(items: int) -> list[Arrival]:
    dice = Random(1)
    return [
        Arrival(at, dice.randint(200, 1200), dice.randint(40, 160), BLOCK, ())
        for at in poisson(dice, 24, items)
    ]


def long_prompts(items: int) -> list[Arrival]:
    dice = Random(2)
    return [
        Arrival(at, dice.randint(3000, 9000), dice.randint(10, 60), BLOCK, ())
        for at in poisson(dice, 4, items)
    ]


def bursty(items: int) -> list[Arrival]:
    """Twelve at once, then a pause."""
    dice, found = Random(3), []
    for at in poisson(dice, 1.5, items // 12):
        found += [Arrival(at, dice.randint(300, 900), 80, BLOCK, ()) for _ in range(12)]
    return found


def shared_prefixes(items: int) -> list[Arrival]:
    """Sixteen system prompts."""
    dice, found = Random(4), []
    for number, at in enumerate(poisson(dice, 16, items)):
        prefix = dice.randrange(16)
        blocks = (*(prefix * 100 + n for n in range(6)), 10_000 + number)
        found.append(Arrival(at, 7 * BLOCK + 20, dice.randint(30, 90), BLOCK, blocks))
    return found


def like_mooncake(items: int) -> list[Arrival]:
    """Conversations: each turn repeats what was said, of lengths far apart, at times in steps of 3 s."""
    dice, found, names = Random(5), [], count()
    talks: list[tuple[int, ...]] = []
    for at in poisson(dice, 5, items):
        said = dice.choice(talks) if talks and dice.random() < 0.5 else ()
        more = min(24, 1 + int(dice.lognormvariate(1.5, 0.9)))
        blocks = (*said, *(next(names) for _ in range(more)))[:40]
        talks.append(blocks)
        found.append(
            Arrival(
                3.0 * (at // 3.0), len(blocks) * BLOCK + 9, dice.randint(20, 200), BLOCK, blocks
            )
        )
    return found


def poisson(dice: Random, rate: float, items: int) -> Iterator[float]:
    now = 0.0
    for _ in range(items):
        yield now
        now += dice.expovariate(rate)


LOADS: dict[str, tuple[Callable[[int], list[Arrival]], str]] = {
    "steady chat": (steady_chat, "ttft:400 tpot:45"),
    "long prompts": (long_prompts, "ttft:3000 tpot:150"),
    "bursty": (bursty, "ttft:800 tpot:60"),
    "shared prefixes": (shared_prefixes, "ttft:1000 tpot:60"),
    "like Mooncake": (like_mooncake, "ttft:4000 tpot:150"),
}
