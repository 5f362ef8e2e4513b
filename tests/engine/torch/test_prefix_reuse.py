"""Equal beginnings are computed once, and the tokens stay the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engine.torch.harness import Harness, configure, running
from oracle import tiny_models
from trtmesh.engine.backend import BlocksStored
from trtmesh.engine.service.streams import KvMirror

SHARED = list(range(10, 43))
FREE = configure(max_tokens=8, ignore_end_id=True)


async def cached(engine: Harness, prompt: list[int], **config: object) -> int:
    """Reused prompt tokens of a new item."""
    values = {"max_tokens": 8, "ignore_end_id": True, **config}
    (stream,) = await engine.ended(engine.submit(prompt, configure(**values)))
    assert stream.end is not None
    return stream.end.cached_prompt_tokens


@pytest.mark.parametrize("family", ["llama", "gemma2"])
async def test_a_warm_cache_changes_no_token(family: str, model_dir: Callable[[str], Path]) -> None:
    folder = model_dir(family)
    # Some beginnings end inside a block, some differ inside a block.
    prompts = [SHARED + tail for tail in ([], [5], [6, 7], [8] * 20)]
    prompts += [[*SHARED[:cut], 5] for cut in (6, 13, 20)]
    model = tiny_models.reference_model(folder)
    expected = [tiny_models.greedy(model, prompt, 8) for prompt in prompts]
    async with running(folder, tokens_per_block=4) as engine:
        assert await engine.run(prompts, FREE) == expected
        assert await engine.run(prompts, FREE) == expected
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert await engine.run([prompt], FREE) == [tokens]
        assert engine.backend.stats().reused_prompt_tokens > 0


async def test_cached_prompt_is_reused_except_for_the_last_token(llama: Path) -> None:
    expected, computed = [0, 32, 31, 9, 2], 33 + 1 + 1 + 1 + 3
    prompts = [SHARED, SHARED, SHARED[:32], [*SHARED[:9], 5], [*SHARED[:2], 5, 6, 7]]
    async with running(llama, tokens_per_block=4) as engine:
        assert [await cached(engine, prompt) for prompt in prompts] == expected
        stats = engine.backend.stats()
        assert stats.reused_prompt_tokens == sum(expected)
        assert stats.computed_prompt_tokens == computed
        assert stats.used_blocks == 0


async def test_generated_tokens_are_reused_as_a_prompt(llama: Path) -> None:
    async with running(llama, tokens_per_block=4) as engine:
        (tokens,) = await engine.run([SHARED], FREE)
        # The KV of the last generated token was never computed.
        assert await cached(engine, SHARED + tokens + [5]) == 40


async def test_salts_do_not_share(llama: Path) -> None:
    async with running(llama, tokens_per_block=4) as engine:
        assert await cached(engine, SHARED, salt="a") == 0
        assert await cached(engine, SHARED) == 0
        assert await cached(engine, SHARED, salt="b") == 0
        assert await cached(engine, SHARED, salt="a") == 32


async def test_item_without_reuse_neither_reads_nor_leaves_blocks(llama: Path) -> None:
    async with running(llama, tokens_per_block=4) as engine:
        assert await cached(engine, SHARED, reuse=False) == 0
        assert await cached(engine, SHARED) == 0
        assert await cached(engine, SHARED, reuse=False) == 0
        assert await cached(engine, SHARED) == 32
    async with running(llama, tokens_per_block=4, prefix_reuse=False) as engine:
        assert await cached(engine, SHARED) == 0
        assert await cached(engine, SHARED) == 0
        assert not any(output.kv_events for output in engine.outputs)


async def test_a_preempted_sequence_finds_its_blocks_again(llama: Path) -> None:
    prompts = [[number] * 6 for number in range(5, 17)]
    model = tiny_models.reference_model(llama)
    expected = [tiny_models.greedy(model, prompt, 30) for prompt in prompts]
    async with running(llama, kv_cache_tokens=64, tokens_per_block=4) as engine:
        config = configure(max_tokens=30, ignore_end_id=True)
        assert await engine.run(prompts, config) == expected
        assert await engine.run(prompts, config) == expected


async def test_events_add_up_to_what_is_reusable(llama: Path) -> None:
    prompts = [SHARED[:start] + [start] * 9 for start in range(2, 30, 3)]
    mirror = KvMirror()
    async with running(llama, kv_cache_tokens=100, tokens_per_block=4) as engine:
        await engine.run(prompts, FREE)
        await engine.run([*prompts[::-1], SHARED], FREE)
        for output in engine.outputs:
            mirror.record(output.kv_events)
        pool = engine.backend._loaded.engine.scheduler.pool
        stored = [
            block
            for event in mirror.snapshot()
            if isinstance(event, BlocksStored)
            for block in event.block_hashes
        ]
        assert sorted(stored) == sorted(pool.published._by_hash)
        assert 0 < len(stored) <= pool.total_blocks


async def test_an_event_names_the_tokens_of_its_blocks(llama: Path) -> None:
    async with running(llama, tokens_per_block=4) as engine:
        await engine.run([SHARED], FREE)
        stored = [event for output in engine.outputs for event in output.kv_events]
        tokens = [
            token
            for event in stored
            if isinstance(event, BlocksStored)
            for token in event.token_ids
        ]
        assert tokens[:32] == SHARED[:32]
        first = stored[0]
        assert isinstance(first, BlocksStored)
        assert first.parent_hash == 0
        assert len(first.token_ids) == 4 * len(first.block_hashes)
