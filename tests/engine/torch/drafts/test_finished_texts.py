"""Drafts from finished sequences of the same salt and adapter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from engine.torch.drafts.drafters import FixedLengths, draft
from engine.torch.harness import configure, running
from trtmesh.chassis.vocabulary import KvCache
from trtmesh.engine.backends.torch.drafts import finished_texts
from trtmesh.engine.backends.torch.drafts.finished_texts import Shelf


async def test_what_was_asked_before_is_drafted_for_the_same_salt_alone(llama: Path) -> None:
    config = configure(max_tokens=40, ignore_end_id=True, temperature=2.0, seed=3)
    other = replace(config, kv_cache=KvCache(salt="another"))
    async with running(llama, drafts="suffix") as engine:
        counts = draft(engine, None, FixedLengths(8)).counts
        accepted, tokens = [], []
        for each in (config, other, config):
            before = counts.accepted_tokens
            (stream,) = await engine.ended(engine.submit([9, 40, 41, 42], each))
            accepted.append(counts.accepted_tokens - before)
            tokens.append(stream.token_ids)
        # At this temperature a text hardly repeats itself.
        assert max(accepted[:2]) < 10
        assert accepted[2] > 25
        assert tokens[0] == tokens[1] == tokens[2]


def test_old_texts_are_dropped_and_nothing_goes_on_across_texts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(finished_texts, "MOST_TOKENS", 10)
    shelf = Shelf()
    shelf.add([1, 2, 3, 4])
    shelf.add([5, 6, 7])
    assert shelf.find([1, 2, 3], 8) == [(3, [4])]
    assert shelf.find([6, 7], 8) == [(0, ())]
    for first in (10, 20, 30):
        shelf.add(list(range(first, first + 10)))
    assert max(shelf.find([1, 2, 3], 8)) == (0, ())
    assert max(shelf.find([30, 31, 32], 8)) == (3, [33, 34, 35])
