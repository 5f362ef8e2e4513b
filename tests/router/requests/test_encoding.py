"""An item's text on its way to ids."""

from __future__ import annotations

import pytest
from router.scene import scene
from router.scripted import ScriptedEngine
from router.scripted_tokenizer import ScriptedTokenizer
from trtmesh.chassis.errors import PromptTooLong

MOST = 10_000
"""Tokens of a prompt that the worker takes."""


def engine() -> ScriptedEngine:
    return ScriptedEngine(supported_fields=["stopping.max_tokens"], max_sequence_tokens=MOST + 1)


async def test_beginning_shows_that_a_text_is_too_long() -> None:
    async with scene(engine()) as on:
        (item,) = await on.ask("x" * 100 * MOST, max_tokens=1)
        assert isinstance(item.error, PromptTooLong)
        assert "tokens or more" in item.error.message
        assert sum(len(command.text) for command in on.tokenizer.encodes) < 5 * MOST
        assert not on.engine.submits


@pytest.mark.parametrize(("tokens", "encodes"), [(MOST // 50, 3), (MOST // 200, 2), (1, 1)])
async def test_long_text_of_few_tokens_is_encoded_whole(tokens: int, encodes: int) -> None:
    tokenizer = ScriptedTokenizer()
    tokenizer.characters_of_id = 1000
    async with scene(engine(), tokenizer) as on:
        text = "x" * 1000 * tokens
        asked = on.ask(text, max_tokens=1)
        (submit,) = await on.engine.submitted()
        assert list(submit.token_ids) == [ord("x")] * tokens
        assert [len(command.text) for command in tokenizer.encodes][-1] == len(text)
        assert len(tokenizer.encodes) == encodes
        asked.cancel()
