"""Any combination of fields, companions and interruptions: each item gets what it gets alone.

A round is made of its number alone: a model, a worker with settings, items with configs, and what befalls them. Some
are cancelled, some go on from their tokens as after a migration, and in the last rounds a tiny pool pauses some. Alone
means on a CPU's worker with room for all, whole steps and no reuse, one item after another.
`pytest tests/engine/torch/test_any_combination.py --combinations 500` plays more rounds.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from itertools import islice, repeat

import pytest
import pytest_asyncio
from engine.torch.combinations import (
    CROWD,
    FAMILIES,
    TINY_POOL,
    Maker,
    check,
    fits_the_tiny_pool,
    frequent,
    lonely,
)
from engine.torch.conftest import Device, ModelDir

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUNDS = 3
ITEMS = 6


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "number" in metafunc.fixturenames:
        rounds = metafunc.config.getoption("--combinations", default=None)
        metafunc.parametrize("number", range(rounds or ROUNDS))


@dataclass
class Happened:
    """Counters over the rounds played."""

    rounds: int = 0
    reused_blocks: int = 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def happened() -> AsyncIterator[Happened]:
    """Rounds without reuse would prove little."""
    counts = Happened()
    yield counts
    if counts.rounds >= ROUNDS:
        assert counts.reused_blocks


async def test_any_combination_equals_each_item_alone(
    number: int, device: Device, model_dir: ModelDir, happened: Happened
) -> None:
    model = model_dir(FAMILIES[number % len(FAMILIES)])
    async with lonely(model) as engine:
        maker = Maker(number, await frequent(engine))
        settings = device | maker.settings()
        items = [maker.item(index) for index in range(ITEMS)]
        stats = await check(items, settings, model, engine)
    happened.rounds += 1
    happened.reused_blocks += stats.reused_blocks


@pytest.mark.parametrize(
    "tiny",
    [pytest.param(each, marks=[pytest.mark.soak] if each else []) for each in range(len(FAMILIES))],
)
async def test_any_combination_equals_each_item_alone_under_preemption(
    tiny: int, device: Device, model_dir: ModelDir
) -> None:
    model = model_dir(FAMILIES[tiny])
    async with lonely(model) as engine:
        maker = Maker(tiny, await frequent(engine))
        settings = {**device, **maker.settings(), **TINY_POOL}
        made = (maker.item(index) for index in repeat(0))
        crowd = [maker.crowding() for _ in range(CROWD)]
        items = [
            replace(item, batch_index=index)
            for index, item in enumerate([*crowd, *islice(filter(fits_the_tiny_pool, made), ITEMS)])
        ]
        stats = await check(items, settings, model, engine)
    # With a window in every layer, the crowd needs no more blocks than it began with.
    assert stats.preemptions or FAMILIES[tiny] == "mistral"
