"""Any combination of fields, companions and interruptions: each item gets what it gets alone.

A round is made of its number alone: a model, a worker with settings, items with configs, and what befalls them. Some
are cancelled, some go on from their tokens as after a migration, and in the last rounds a tiny pool pauses many. Alone
means on a CPU's worker with room for all, whole steps and no reuse, one item after another.
`pytest tests/engine/torch/test_any_combination.py --combinations 500` plays more rounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from engine.torch.combinations import (
    FAMILIES,
    Item,
    Maker,
    Result,
    compare,
    frequent,
    play_alone,
    result_of,
    some_tokens,
)
from engine.torch.conftest import Device, ModelDir
from engine.torch.harness import Harness, running
from trtmesh.engine.backend import BackendStats
from trtmesh.v1 import generation_pb2 as pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUNDS = 8
PAUSING_ROUNDS = 6
ITEMS = 9
TINY_POOL_TOKENS = 112
"""Room for the longest item of one sequence and little more."""
TINY_POOL_BLOCK = 4


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "number" in metafunc.fixturenames:
        rounds = metafunc.config.getoption("--combinations", default=None)
        metafunc.parametrize("number", range(rounds or ROUNDS))


@dataclass
class Happened:
    """Counters over the rounds played."""

    rounds: int = 0
    reused_blocks: int = 0
    tiny_rounds: int = 0
    preemptions: int = 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def happened() -> AsyncIterator[Happened]:
    """Rounds without reuse or pauses would prove little."""
    counts = Happened()
    yield counts
    if counts.rounds >= ROUNDS:
        assert counts.reused_blocks
    if counts.tiny_rounds >= PAUSING_ROUNDS:
        assert counts.preemptions


@asynccontextmanager
async def lonely(model: Path) -> AsyncIterator[Harness]:
    """The worker for items alone."""
    async with running(model, prefix_reuse=False, kv_cache_tokens=4096) as engine:
        yield engine


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


@pytest.mark.parametrize("tiny", range(PAUSING_ROUNDS))
async def test_any_combination_equals_each_item_alone_under_preemption(
    tiny: int, device: Device, model_dir: ModelDir, happened: Happened
) -> None:
    model = model_dir(FAMILIES[tiny % len(FAMILIES)])
    async with lonely(model) as engine:
        maker = Maker(tiny, await frequent(engine))
        settings = {
            **device,
            **maker.settings(),
            "kv_cache_tokens": TINY_POOL_TOKENS,
            "tokens_per_block": TINY_POOL_BLOCK,
            "max_step_tokens": 64,
            "max_batch_size": 64,
            "batching_type": "inflight_fused_batching",
            "batching_policy": "max_utilization",
        }
        made = (maker.item(index) for index in repeat(0))
        items = [
            replace(item, batch_index=index)
            for index, item in enumerate(islice(filter(fits_the_tiny_pool, made), ITEMS))
        ]
        stats = await check(items, settings, model, engine)
    happened.tiny_rounds += 1
    happened.preemptions += stats.preemptions


def fits_the_tiny_pool(item: Item) -> bool:
    """Whether the pool holds all beams of a search; other sequences need not fit together."""
    config, prompt = item.config, len(item.prompt)
    assert config.stopping.max_tokens
    shared = (prompt - 1) // TINY_POOL_BLOCK
    own = -(-(prompt + config.stopping.max_tokens - 1) // TINY_POOL_BLOCK) - shared
    return shared + config.beam_search.beam_width * own <= TINY_POOL_TOKENS // TINY_POOL_BLOCK


async def check(
    items: Sequence[Item], settings: dict[str, Any], model: Path, lonely: Harness
) -> BackendStats:
    """Plays the items together; returns the worker's counters."""
    alone = [await play_alone(lonely, item) for item in items]
    async with running(model, **settings) as engine:
        async with asyncio.timeout(120):
            with engine.gate.held():
                playing = asyncio.gather(*(play(engine, item) for item in items))
                # Each task submits before waiting.
                await asyncio.sleep(0)
            results = await playing
        stats = engine.backend.stats()
        assert stats.used_blocks == stats.running_sequences == stats.paused_sequences == 0
        assert not engine.failures
    for item, found, expected in zip(items, results, alone, strict=True):
        try:
            compare(item, found, expected)
        except AssertionError as error:
            raise AssertionError(f"{item}, with {settings}") from error
    return stats


async def play(engine: Harness, item: Item) -> list[Result]:
    keys = engine.submit(item.prompt, item.config, batch_index=item.batch_index)
    if item.cancelled_after is not None:
        await some_tokens(engine, keys[0], item.cancelled_after)
        engine.backend.stop(keys, pb.FINISH_REASON_CANCELLED)
    elif item.moves_after:
        return list(await asyncio.gather(*(move(engine, item, i, k) for i, k in enumerate(keys))))
    return [result_of(item, [stream]) for stream in await engine.ended(keys)]


async def move(engine: Harness, item: Item, sequence_index: int, key: int) -> Result:
    """Continues a sequence as another worker would, from the tokens."""
    streams, tokens = [], list[int]()
    alone = replace(item.config, sampling=replace(item.config.sampling, num_return_sequences=1))
    for count in item.moves_after:
        await some_tokens(engine, key, count - len(tokens))
        engine.backend.stop([key], pb.FINISH_REASON_STOPPED)
        (stream,) = await engine.ended([key])
        assert stream.end
        streams.append(stream)
        tokens += stream.token_ids
        if stream.end.reason != pb.FINISH_REASON_STOPPED:
            return result_of(item, streams)
        if tokens:
            told = replace(alone.output, prompt_log_probs=False, context_logits=False)
            alone = replace(alone, output=told)
        else:
            streams.clear()
        (key,) = engine.submit(
            item.prompt,
            alone,
            emitted=tokens,
            batch_index=item.batch_index,
            sequence_index=sequence_index,
        )
    streams += await engine.ended([key])
    return result_of(item, streams)
