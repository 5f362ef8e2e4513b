"""The real library on its GPU, beside the torch backend: `make tensorrt-llm-test`.

Each engine is a process. That of the torch backend runs under TORCH_PYTHON, because the two need different releases of
transformers; MODEL_DIR names another model than the demo's.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from engine.tensorrt_llm.site import half
from engine_streams import RouterStream, router_stream, stop, submit
from trtmesh.v1 import generation_pb2 as pb

pytestmark = [pytest.mark.tensorrt_llm, pytest.mark.slow]

DEMO = Path(__file__).parents[3] / "models" / "demo"
MODEL = Path(os.environ.get("MODEL_DIR", DEMO))
LOAD_SECONDS = 1800.0
TOKENS = 32
NEAR_TIE = 0.15
"""Difference of log-probabilities that half precision may turn round."""
PROMPTS = [[9, 40, 41, 42], [100, 200, 300, 400, 500], [7] * 70]


@asynccontextmanager
async def engine(python: str, *flags: str) -> AsyncIterator[RouterStream]:
    """An engine process, and a router's stream to it once its model is loaded."""
    process = await asyncio.create_subprocess_exec(
        *(python, "-m", "trtmesh.engine", "--model-dir", str(MODEL), *flags),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout
        address = json.loads(await process.stdout.readline())["address"]
        async with asyncio.timeout(LOAD_SECONDS), opened(address) as stream:
            yield stream
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@asynccontextmanager
async def opened(address: str) -> AsyncIterator[RouterStream]:
    """Tries until the model is loaded: before, the engine refuses streams."""
    while True:
        try:
            async with router_stream(address) as stream:
                yield stream
                return
        except Exception as error:
            if "not loaded" not in str(error):
                raise
            await asyncio.sleep(1.0)


def greedy(**output: Any) -> pb.GenerationConfig:
    return pb.GenerationConfig(
        stopping=pb.StoppingConfig(ignore_end_id=True), output=pb.OutputConfig(**output)
    )


async def generate(stream: RouterStream, handle: int, prompt: Sequence[int]) -> list[int]:
    await stream.send(submit(handle, TOKENS, prompt=prompt, config=greedy()))
    received = await stream.end(handle)
    assert received.end is not None
    assert received.end.error.message == ""
    return received.token_ids


async def nearly_best(stream: RouterStream, handle: int, prompt: Sequence[int]) -> list[set[int]]:
    """The likeliest token of each position, with the next one if the two nearly tie."""
    config = greedy(log_probs=True, top_log_probs=2)
    await stream.send(submit(handle, TOKENS, prompt=prompt, config=config))
    await stream.end(handle)
    return [
        {
            token
            for token, value in zip(position.token_ids, position.log_probs, strict=True)
            if value > position.log_probs[0] - NEAR_TIE
        }
        for step in stream.steps
        for each in step.details
        if each.handle == handle
        for position in each.details.top_log_probs
    ]


@pytest.fixture(autouse=True)
def library() -> None:
    """Whoever asks for these tests wants them run."""
    if find_spec("tensorrt_llm") is None:
        pytest.fail(f"TensorRT-LLM is not installed for {sys.executable}", pytrace=False)


async def test_greedy_tokens_are_those_of_the_torch_backend() -> None:
    """Until a near tie, where rounding decides."""
    torch = os.environ.get("TORCH_PYTHON", sys.executable)
    async with engine(torch, "--torch-device", "auto") as other:
        expected = [await generate(other, index, prompt) for index, prompt in enumerate(PROMPTS)]
        near = [
            await nearly_best(other, 10 + index, prompt) for index, prompt in enumerate(PROMPTS)
        ]
    equal = 0
    async with engine(sys.executable, "--backend", "tensorrt_llm") as stream:
        for index, prompt in enumerate(PROMPTS):
            tokens = await generate(stream, index, prompt)
            pairs = zip(tokens, expected[index], strict=True)
            differing = next((at for at, (a, b) in enumerate(pairs) if a != b), TOKENS)
            if differing < TOKENS:
                assert tokens[differing] in near[index][differing], (index, differing)
            equal += differing
    print(f"{equal} of {TOKENS * len(PROMPTS)} tokens are equal before the first near tie")
    assert equal >= TOKENS, "near ties leave too little to compare"


async def test_words_stops_and_details() -> None:
    async with engine(sys.executable, "--backend", "tensorrt_llm") as stream:
        plain = await generate(stream, 1, PROMPTS[0])
        config = greedy(log_probs=True, perf_metrics=True)
        config.stopping.stop_token_ids.add(ids=plain[4:6])
        await stream.send(submit(2, TOKENS, prompt=PROMPTS[0], config=config))
        received = await stream.end(2)
        assert received.token_ids == plain[:6]
        assert received.end is not None
        assert received.end.reason == pb.FINISH_REASON_STOP_WORD
        assert received.end.perf_metrics.first_token_time_ns > 0
        await stream.send(submit(3, 1000, prompt=PROMPTS[0], config=greedy()))
        await stream.until(lambda: 3 in stream.received)
        await stream.send(stop(3))
        received = await stream.end(3)
        assert received.end is not None
        assert received.end.reason == pb.FINISH_REASON_STOPPED
        # The others are not disturbed.
        assert await generate(stream, 4, PROMPTS[0]) == plain


async def test_prompt_and_decode_run_on_two_workers() -> None:
    """On one GPU, each with a share of its memory."""
    share = ("--tensorrt-llm-kv-cache-free-memory-fraction", "0.3")
    both = (*share, "--backend", "tensorrt_llm")
    lease = "0123456789abcdef0123456789abcdef"
    async with (
        engine(sys.executable, *both, *half("prefill")) as first,
        engine(sys.executable, *both, *half("decode")) as second,
    ):
        plain = await generate(second, 1, PROMPTS[2])
        command = submit(1, TOKENS, prompt=PROMPTS[2], config=greedy(), sender_lease_id=lease)
        command.submit.lease_expires_in_ms = 10_000
        await first.send(command)
        prompt_end = await first.end(1)
        assert prompt_end.end is not None
        assert prompt_end.end.reason == pb.FINISH_REASON_HANDOFF
        command = submit(2, TOKENS, prompt=[*PROMPTS[2], *prompt_end.token_ids], config=greedy())
        command.submit.emitted_tokens = 1
        command.submit.handoff.CopyFrom(prompt_end.end.handoff)
        await second.send(command)
        rest = await second.end(2)
        assert [*prompt_end.token_ids, *rest.token_ids] == plain
