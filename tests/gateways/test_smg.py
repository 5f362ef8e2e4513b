"""SMG's gateway of PyPI drives engines of ours through TrtllmService."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import suppress

import aiohttp
import pytest
import pytest_asyncio
from e2e.mesh import DEMO, PATIENCE_SECONDS, SIMULATED, WIDE_TOKENS, eventually, scrape
from e2e.test_trtllm_service import LONG, TORCH, idle, own_tokens, started
from gateways.smg import Gateway, choices, running
from processes import ServiceProcess
from tokenizers import Tokenizer

pytestmark = [pytest.mark.gateways, pytest.mark.asyncio(loop_scope="module")]

PROMPTS = ["def fibonacci(n):", "class Stack:", "import os"]
TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
MODEL = ("--model-path", str(DEMO))
BLOCK = 32


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[ServiceProcess]:
    async with started(*TORCH, "--model", "demo") as process:
        yield process


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(engine: ServiceProcess) -> AsyncIterator[Gateway]:
    async with running("--worker-urls", f"grpc://{engine.address}", *MODEL) as found:
        yield found


async def own_text(engine: ServiceProcess, prompt: str, count: int) -> str:
    """The greedy text by the engine's own protocol."""
    ids = await own_tokens(engine, TOKENIZER.encode(prompt).ids, count)
    return str(TOKENIZER.decode(ids))


async def test_a_completion_streams(engine: ServiceProcess, gateway: Gateway) -> None:
    expected = await own_text(engine, PROMPTS[0], 24)
    texts, reasons = [], []
    async with gateway.streaming(PROMPTS[0], max_tokens=24) as events:
        async for event in events:
            (choice,) = event["choices"]
            texts.append(choice["text"])
            reasons.append(choice["finish_reason"])
    print(f"\n{len(texts)} events: {''.join(texts)!r}, then {reasons[-1]}")
    assert "".join(texts) == expected
    assert sum(map(bool, texts)) > 5
    assert reasons[-1] == "length"
    assert not any(reasons[:-1])
    await idle(engine)


async def test_prompts_of_a_batch_are_answered_in_order(
    engine: ServiceProcess, gateway: Gateway
) -> None:
    answer = await gateway.complete(PROMPTS, max_tokens=12)
    print(f"\n{choices(answer)}, usage {answer['usage']}")
    assert choices(answer) == [await own_text(engine, prompt, 12) for prompt in PROMPTS]
    assert answer["usage"]["completion_tokens"] == 36
    await idle(engine)


async def test_a_stop_text_ends_a_completion(engine: ServiceProcess, gateway: Gateway) -> None:
    whole = await own_text(engine, PROMPTS[0], 24)
    word = whole.split()[3]
    answer = await gateway.complete(PROMPTS[0], max_tokens=24, stop=[word])
    print(f"\nbefore {word!r}: {choices(answer)}, {answer['choices'][0]['finish_reason']}")
    assert choices(answer) == [whole[: whole.index(word)]]
    assert answer["choices"][0]["finish_reason"] == "stop"
    await idle(engine)


async def test_several_choices_with_a_seed_repeat(engine: ServiceProcess, gateway: Gateway) -> None:
    fields = {"max_tokens": 8, "n": 3, "temperature": 1.0, "seed": 7}
    first = await gateway.complete(PROMPTS[1], **fields)
    again = await gateway.complete(PROMPTS[1], **fields)
    print(f"\n{choices(first)}")
    assert choices(first) == choices(again)
    assert len(set(choices(first))) == 3
    await idle(engine)


async def test_a_client_that_disconnects_frees_its_blocks(
    engine: ServiceProcess, gateway: Gateway
) -> None:
    async with gateway.streaming(PROMPTS[0], max_tokens=1900, ignore_eos=True) as events:
        await anext(events)

        async def holds_blocks() -> bool:
            return (await scrape(engine))["trtmesh_engine_used_blocks"] > 0

        await eventually(holds_blocks)
        before = await scrape(engine)
    assert before["trtmesh_engine_live_sequences"] == 1
    await idle(engine)
    after = await scrape(engine, reason="cancelled")
    print(
        f"\nbefore: live_sequences {before['trtmesh_engine_live_sequences']:g},"
        f" used_blocks {before['trtmesh_engine_used_blocks']:g}; after: 0 and 0, sequences cancelled:"
        f" {after['trtmesh_engine_sequences_finished_total']:g}"
    )
    assert after["trtmesh_engine_sequences_finished_total"] >= 1
    assert before["trtmesh_engine_generated_tokens_total"] < 1900


async def test_many_streams_at_once(engine: ServiceProcess, gateway: Gateway) -> None:
    expected = [await own_text(engine, prompt, 8) for prompt in PROMPTS]
    answers = await asyncio.gather(
        *(gateway.complete(PROMPTS[number % 3], max_tokens=8) for number in range(48))
    )
    # Other rows in the batch may decide between tokens that nearly tie, so not all of them must be equal.
    right = sum(choices(answer) == [expected[n % 3]] for n, answer in enumerate(answers))
    print(f"\n{right} of 48 answers are those of one call alone")
    assert all(answer["usage"]["completion_tokens"] == 8 for answer in answers)
    assert right > 24
    await idle(engine)


async def test_the_gateway_takes_the_tokenizer_from_the_worker(
    engine: ServiceProcess, gateway: Gateway
) -> None:
    flags = ("--worker-urls", f"grpc://{engine.address}", "--model-path", "/nonexistent/demo")
    async with running(*flags) as other:

        async def is_loaded() -> bool:
            asked = {"model": "demo", "prompt": "a", "max_tokens": 1}
            async with other.session.post(f"{other.url}/v1/completions", json=asked) as response:
                return response.status == 200

        await eventually(is_loaded)
        answer = await other.complete(PROMPTS[0], max_tokens=12)
    assert choices(answer) == choices(await gateway.complete(PROMPTS[0], max_tokens=12))
    await idle(engine)


async def test_kv_events_route_equal_prefixes_to_one_worker() -> None:
    flags = (*SIMULATED, *WIDE_TOKENS, "--simulated-kv-cache-tokens-per-block", str(BLOCK))
    async with started(*flags) as first, started(*flags) as second:
        urls = [f"grpc://{each.address}" for each in (first, second)]
        async with running("--worker-urls", *urls, *MODEL, "--policy", "cache_aware") as gateway:
            prompts = [f"# {word}\n" * 60 for word in ("alpha", "beta", "gamma", "delta")]
            for prompt in prompts:
                await gateway.complete(prompt, max_tokens=2)
            lengths = [len(TOKENIZER.encode(prompt).ids) for prompt in prompts]
            blocks = [(length - 1) // BLOCK for length in lengths]

            async def has_heard() -> bool:
                return await gateway.metric("smg_kv_index_blocks") >= sum(blocks)

            await eventually(has_heard)
            for prompt in 5 * prompts:
                await gateway.complete(prompt, max_tokens=2)
            counts = [await scrape(each) for each in (first, second)]
    cached = sum(each["trtmesh_engine_cached_prompt_tokens_total"] for each in counts)
    shares = [each["trtmesh_engine_prompt_tokens_total"] for each in counts]
    print(f"\nprompt tokens by worker {shares}, of {6 * sum(lengths)} {cached:g} were cached")
    # After the first round every prompt finds all of its blocks.
    assert cached == 5 * BLOCK * sum(blocks)


async def test_a_killed_worker_ends_the_stream_with_an_error() -> None:
    flags = (*SIMULATED, *WIDE_TOKENS, *LONG)
    async with (
        started(*flags) as worker,
        running("--worker-urls", f"grpc://{worker.address}", *MODEL) as gateway,
    ):
        seen = []
        # Some gateways end the stream with an event, others break it off.
        with suppress(aiohttp.ClientError):
            async with asyncio.timeout(PATIENCE_SECONDS):
                async with gateway.streaming(PROMPTS[0], max_tokens=20_000) as events:
                    async for event in events:
                        seen.append(event)
                        if len(seen) == 3:
                            worker.signal(signal.SIGKILL)
        print(f"\n{len(seen)} events, the last {str(seen[-1])[:200]}")
        assert "error" in seen[-1] or not seen[-1]["choices"][0]["finish_reason"]
