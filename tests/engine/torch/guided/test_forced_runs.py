"""Drafts of text that a guide leaves no choice about: fewer steps, and the same tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
from e2e.mesh import DEMO_DRAFT
from engine.torch.drafts.drafters import Failing, FixedLengths, Knowing, draft, drafting_of
from engine.torch.guided.guides import guided, text_of
from engine.torch.harness import Harness, running
from trtmesh.engine.backends.torch.guided.grammars import Guide

PROMPT = [9, 40, 41, 42]
KEYS = [f"a_rather_long_name_of_property_{word}" for word in ("one", "two")]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {key: {"enum": ["x", "y", None]} for key in KEYS},
        "required": KEYS,
        "additionalProperties": False,
    }
)
CONFIGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 3, "num_return_sequences": 3},
    {"temperature": 1.5, "seed": 4, "repetition_penalty": 1.3, "top_p": 0.9},
    {"temperature": 0.7, "seed": 5, "max_tokens": 23},
    {"stop_token_ids": ((44,),), "min_tokens": 5, "log_probs": True},
]


def asked() -> list[Any]:
    return [guided("JSON_SCHEMA", SCHEMA, 0, **{"max_tokens": 200, **own}) for own in CONFIGS]


async def answers(engine: Harness) -> tuple[list[list[list[int]]], int]:
    """The tokens of all, and the outputs that they took together."""
    first, found = len(engine.outputs), []
    for keys in [engine.submit(PROMPT, config) for config in asked()]:
        streams = await engine.ended(keys)
        assert all(stream.end and stream.end.error is None for stream in streams)
        found.append([stream.token_ids for stream in streams])
    return found, sum(bool(out.keys) for out in engine.outputs[first:])


async def test_text_without_a_choice_takes_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Guide.forced
    async with running(DEMO_DRAFT, drafts="ngram") as engine:
        ngram = drafting_of(engine).drafter
        draft(engine, None, FixedLengths(0))
        alone, steps = await answers(engine)
        assert set(json.loads(text_of(DEMO_DRAFT, alone[0][0]))) == set(KEYS)
        for drafter in (ngram, Knowing({}, 0.0), Failing({}, 0.0)):
            draft(engine, drafter, FixedLengths(8))
            monkeypatch.setattr(Guide, "forced", lambda *_: ())
            without = await answers(engine)
            monkeypatch.setattr(Guide, "forced", own)
            found = await answers(engine)
            assert without[0] == found[0] == alone
            print(
                f"{drafter}: {steps} steps, {without[1]} with drafts, {found[1]} with forced runs"
            )
            # Errors of the drafter are a pause for these drafts too.
            assert isinstance(drafter, Failing) or found[1] < 0.7 * without[1]
