"""Drafts change nothing: any combination of fields, companions and interruptions gives what each item gets alone,
without drafts. For the rounds see test_any_combination.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, repeat
from math import inf

import pytest
from engine.torch.combinations import (
    FAMILIES,
    TINY_POOL,
    Item,
    Maker,
    Result,
    check,
    fits_the_tiny_pool,
    frequent,
    lonely,
)
from engine.torch.conftest import Device, ModelDir
from engine.torch.drafts.drafters import SOURCES, AnyLengths, FixedLengths, draft
from engine.torch.harness import Harness
from trtmesh.chassis.vocabulary import Draft
from trtmesh.engine.backends.torch.drafts import drafting

ITEMS = 9
FIXED = {"absurd": 3, "perfect": 8, "ngram": 5}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """In every run a source has one number, and every number about a third of the sources."""
    rounds = metafunc.config.getoption("--combinations", default=None)
    metafunc.parametrize(
        ("source", "number"),
        [
            pytest.param(
                source,
                number,
                marks=[] if rounds or (place + number) % 3 == 0 else pytest.mark.soak,
            )
            for place, source in enumerate([*SOURCES, "client"])
            for number in range(rounds or len(FAMILIES))
        ],
    )


async def test_any_drafts_change_nothing(
    source: str,
    number: int,
    device: Device,
    model_dir: ModelDir,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafting, "PAUSE_STEPS", 2)
    # Else guesses rest for some steps that a device launches ahead: for all of them where it is fast.
    monkeypatch.setattr(drafting, "FORESIGHT", inf)
    model = model_dir(FAMILIES[number % len(FAMILIES)])
    async with lonely(model) as engine:
        maker = Maker(1000 + number, await frequent(engine))
        settings = device | maker.settings()
        settings["drafts"] = "off" if source == "client" else "ngram"
        made: Iterator[Item] = (maker.item(index) for index in repeat(0))
        # Room for drafts.
        settings["max_step_tokens"] = 64
        if number % 2:
            settings |= TINY_POOL
            made = filter(fits_the_tiny_pool, made)
        items = [replace(item, batch_index=index) for index, item in enumerate(islice(made, ITEMS))]

        def prepare(engine: Harness, alone: list[list[Result]]) -> None:
            known = {
                (item.batch_index, index): result.token_ids
                for item, results in zip(items, alone, strict=True)
                for index, result in enumerate(results)
            }
            if source == "client":
                for item, results in zip(items, alone, strict=True):
                    right = results[0].token_ids[: maker.dice.randrange(20)]
                    ids = (*right, *(maker.dice.randrange(300) for _ in range(5)))
                    item.config = replace(item.config, draft=Draft(ids))
                return
            fixed = FIXED.get(source)
            lengths = FixedLengths(fixed) if fixed else AnyLengths(number)
            draft(engine, SOURCES[source](known, number), lengths)

        stats = await check(items, settings, model, engine, prepare)
    assert stats.drafts
    if source in ("perfect", "client"):
        assert stats.accepted_draft_tokens
    if source == "absurd":
        assert stats.accepted_draft_tokens < stats.draft_tokens
    if source == "failing":
        assert stats.draft_failures
