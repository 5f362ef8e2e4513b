"""The end of a loop over two models: by a full context, and by a client's stop, at each moment at which no request of
the mesh runs for it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from compat.triton import Triton
from router.scripted import (
    LENGTH,
    READY,
    RouterClient,
    ScriptedEngine,
    serving_engine,
    serving_router,
    until_states,
)
from router.scripted_tokenizer import ScriptedTokenizer, serving_tokenizer
from trtmesh.router.requests.requests import RunningRequest

FIELDS = ["stopping.max_tokens", "draft.token_ids", "sampling.seed"]
NAMES = ("large", "small")
BLS = "tensorrt_llm_bls"


async def answer(engine: ScriptedEngine, token: int) -> None:
    """Gives each item the token up to its length or the context's, and ends at once what is stopped."""
    done, stopped = 0, 0
    while True:
        await asyncio.sleep(0.002)
        for submit in engine.submits[done:]:
            done += 1
            first = submit.emitted_tokens
            count = submit.config.stopping.max_tokens - first
            if most := engine.description.max_sequence_tokens:
                count = min(count, most - len(submit.token_ids))
            await engine.step(
                (submit.handle, first, [token] * count), ends=[(submit.handle, LENGTH)]
            )
        for stop in engine.stops[stopped:]:
            stopped += 1
            await engine.step(ends=[stop])


async def looped(
    stack: AsyncExitStack, **description: int
) -> tuple[RouterClient, list[ScriptedEngine]]:
    """A router of two models that answer, with a loop."""
    engines = [
        ScriptedEngine(worker=name, model=name, supported_fields=FIELDS, **description)
        for name in NAMES
    ]
    tokenizers = [ScriptedTokenizer(model=name) for name in NAMES]
    models = {BLS: {"template": BLS, "draft_model": "small"}}
    client = await stack.enter_async_context(
        serving_router(
            [await stack.enter_async_context(serving_engine(each)) for each in engines],
            [await stack.enter_async_context(serving_tokenizer(each)) for each in tokenizers],
            models=NAMES,
            triton={"models": models},
        )
    )
    await until_states(client, [READY] * 2, [READY] * 2)
    for engine in engines:
        task = asyncio.create_task(answer(engine, 65 if engine is engines[0] else 66))
        stack.callback(task.cancel)
    return client, engines


@pytest.mark.parametrize("moment", range(5))
async def test_a_stop_between_two_rounds_ends_the_loop(
    moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the drafts of the first round, before they are verified, and so on."""
    begin, begun = RunningRequest.__aenter__, 0

    async def begin_later(self: RunningRequest) -> Any:
        nonlocal begun
        if begun == moment:
            assert not self._requests.live
            await triton.stream(BLS, {"stop": True}, request_id="r")
        begun += 1
        return await begin(self)

    monkeypatch.setattr(RunningRequest, "__aenter__", begin_later)
    async with AsyncExitStack() as stack:
        client, engines = await looped(stack)
        triton = Triton(client.addresses[0])
        asked = {"text_input": "ab", "max_tokens": 30, "num_draft_tokens": 2}
        response = await triton.infer(BLS, asked, request_id="r")
        verified = moment // 2
        assert response.text == (f"ab{'AAA' * verified}." if verified else "")
        # The round that the stop found is the last, and no drafts are asked for after it.
        assert [len(engine.submits) for engine in engines] == [verified, (moment + 1) // 2]


async def test_a_full_context_ends_the_loop() -> None:
    async with AsyncExitStack() as stack:
        client, engines = await looped(stack, max_sequence_tokens=7)
        asked = {"text_input": "ab", "max_tokens": 30, "num_draft_tokens": 2}
        response = await Triton(client.addresses[0]).infer(BLS, asked)
        assert response.text == "abAAAAA."
        assert len(engines[0].submits) == 2
