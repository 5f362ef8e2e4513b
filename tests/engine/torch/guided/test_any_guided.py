"""Guided items among any others, with any fields and interruptions: each gets what it gets alone, with drafts or not.

For the rounds see test_any_combination.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from random import Random

import pytest
from engine.torch.combinations import (
    FAMILIES,
    TINY_POOL,
    Item,
    Maker,
    check,
    fits_the_tiny_pool,
    frequent,
    lonely,
)
from engine.torch.conftest import Device, ModelDir
from trtmesh.chassis.vocabulary import GuidedDecoding
from trtmesh.engine.backends.torch.sampling import mask_time
from trtmesh.v1 import generation_pb2 as pb

ITEMS = 6
GUIDES = (
    GuidedDecoding(pb.GUIDE_TYPE_REGEX, "[a-z ]*"),
    GuidedDecoding(pb.GUIDE_TYPE_REGEX, "(?s:.)*"),
    GuidedDecoding(pb.GUIDE_TYPE_EBNF_GRAMMAR, "root ::= ([a-z] | [A-Z] | [0-9] | [ .,])*"),
)
"""They may always end and always go on, so that no bans leave nothing to choose."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    rounds = metafunc.config.getoption("--combinations", default=None)
    later = pytest.param(2, marks=pytest.mark.soak)
    metafunc.parametrize("number", range(rounds) if rounds else [0, 1, later])


def with_a_guide(item: Item, dice: Random) -> Item:
    if dice.random() < 0.2:
        return item
    return replace(item, config=replace(item.config, guided_decoding=dice.choice(GUIDES)))


async def test_any_guided_item_equals_the_item_alone(
    number: int, device: Device, model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where each step has time for a single mask, and the other rows sit out."""
    if number % 4:
        monkeypatch.setattr(mask_time, "STEP_SECONDS", 1e-9)
    model = model_dir(FAMILIES[number % len(FAMILIES)])
    dice = Random(number)
    async with lonely(model) as engine:
        maker = Maker(2000 + number, await frequent(engine))
        settings = {**device, **maker.settings(), **TINY_POOL}
        settings["drafts"] = "ngram" if number % 2 else "off"
        made = (with_a_guide(maker.item(0), dice) for _ in iter(int, 1))
        items = [
            replace(item, batch_index=index)
            for index, item in enumerate(islice(filter(fits_the_tiny_pool, made), ITEMS))
        ]
        await check(items, settings, model, engine)
