"""Effects of the scheduling and KV cache settings on a running engine; tokens stay equal to generate's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine.short_names import by_short_names
from engine.torch.harness import Harness, configure, running
from oracle import tiny_models
from pydantic import ValidationError
from trtmesh.chassis.errors import InvalidField, ModelUnusable, PromptTooLong
from trtmesh.chassis.vocabulary import TokenRangeRetention
from trtmesh.engine.backends.torch.backend import TorchBackend
from trtmesh.engine.backends.torch.cpu.device import Cpu, free_memory
from trtmesh.engine.backends.torch.settings import TorchSettings

TINY = {"kv_cache_tokens": 64, "tokens_per_block": 4, "max_batch_size": 8}
PROMPTS = [[number] * 6 for number in range(5, 15)]
CONFIG = configure(max_tokens=24, ignore_end_id=True)


def scheduler_of(engine: Harness) -> Any:
    return engine.backend._loaded.engine.scheduler


@pytest.fixture(scope="module")
def expected(model_dir: Any) -> list[list[int]]:
    model = tiny_models.reference_model(model_dir("llama"))
    return [tiny_models.greedy(model, prompt, 24) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("settings", "pauses"),
    [
        ({}, True),
        ({"batching_policy": "max_utilization"}, True),
        ({"batching_policy": "max_utilization", "prefix_reuse": False}, True),
        ({"batching_policy": "max_utilization", "host_cache_bytes": 2**20}, True),
        ({"batching_policy": "guaranteed_no_evict"}, False),
        ({"batching_policy": "static_batch"}, False),
        ({"max_step_tokens": 2}, True),
        ({"chunked_context": False, "max_step_tokens": 16}, True),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
async def test_a_tiny_pool_changes_no_token(
    llama: Path, settings: dict[str, Any], pauses: bool, expected: list[list[int]]
) -> None:
    async with running(llama, **TINY, **settings) as engine:
        assert await engine.run(PROMPTS, CONFIG) == expected
        assert (scheduler_of(engine).preemptions > 0) == pauses
        assert engine.info.static_batching == (settings.get("batching_policy") == "static_batch")
        assert await engine.run(PROMPTS[::-1], CONFIG) == expected[::-1]
        assert engine.backend.stats().used_blocks == 0


async def test_the_host_keeps_what_the_pool_has_no_room_for(llama: Path) -> None:
    shared = list(range(10, 42))
    model = tiny_models.reference_model(llama)
    token = tiny_models.greedy(model, shared, 8)
    for host_cache_bytes, cached in ((0, 0), (2**20, 31)):
        settings = {**TINY, "host_cache_bytes": host_cache_bytes}
        async with running(llama, **settings) as engine:
            config = configure(max_tokens=8, ignore_end_id=True)
            assert await engine.run([shared], config) == [token]
            await engine.run([[number] * 30 for number in range(60, 64)], CONFIG)
            (stream,) = await engine.ended(engine.submit(shared, config))
            assert stream.token_ids == token
            assert stream.end
            assert stream.end.cached_prompt_tokens == cached


async def test_retention_keeps_a_prompt(llama: Path) -> None:
    shared = list(range(10, 42))
    config = configure(max_tokens=2, token_ranges=(TokenRangeRetention(priority=90),))
    async with running(llama, **TINY) as engine:
        await engine.run([shared], config)
        for number in range(60, 65):
            await engine.run([[number] * 20], configure(max_tokens=2))
        (stream,) = await engine.ended(engine.submit(shared, configure(max_tokens=2)))
        assert stream.end
        assert stream.end.cached_prompt_tokens == 31


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        (
            {"token_ranges": (TokenRangeRetention(4, 4, 9),)},
            r"kv_cache\.token_ranges\[0\]\.token_end is 4",
        ),
        ({"decode_duration_ms": 5}, r"kv_cache\.decode_duration_ms is set, but"),
    ],
)
async def test_contradictory_retention_is_refused(
    llama: Path, wishes: dict[str, Any], words: str
) -> None:
    async with running(llama) as engine:
        with pytest.raises(InvalidField, match=words):
            engine.submit([5], configure(**wishes))


async def test_a_prompt_longer_than_a_step_is_refused_without_chunks(llama: Path) -> None:
    settings = {"chunked_context": False, "max_step_tokens": 8}
    async with running(llama, **settings) as engine:
        with pytest.raises(PromptTooLong) as refused:
            engine.submit([5] * 9, CONFIG)
        assert (refused.value.value, refused.value.limit) == ("9", "at most 8")
        (tokens,) = await engine.run([[5] * 8], CONFIG)
        # Tokens generated elsewhere are not prompt tokens.
        keys = engine.submit([5] * 8, CONFIG, emitted=tokens[:20])
        (rest,) = await engine.ended(keys)
        assert rest.token_ids == tokens[20:]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batching_policy": "V1"}, r"batching\.policy"),
        ({"kv_cache_free_memory_fraction": 1.0}, r"kv_cache\.free_memory_fraction"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        by_short_names(TorchSettings, **settings)


# The tiny llama has 2 layers, 2 KV heads of 16 and 4 bytes a number.
BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4


@pytest.mark.parametrize(
    ("settings", "blocks"),
    [
        ({"kv_cache_tokens": 100}, 25),
        ({"kv_cache_bytes": 100 * BYTES_PER_TOKEN}, 25),
        ({"kv_cache_bytes": 100 * BYTES_PER_TOKEN, "kv_cache_tokens": 80}, 20),
        ({"kv_cache_bytes": 60 * BYTES_PER_TOKEN, "kv_cache_tokens": 80}, 15),
        ({"kv_cache_free_memory_fraction": 0.9, "kv_cache_tokens": 80}, 20),
        # Without a limit, as much as the batch can need.
        ({"max_batch_size": 2, "max_sequence_tokens": 64}, 32),
    ],
)
async def test_lowest_limit_sizes_the_pool(
    llama: Path, settings: dict[str, Any], blocks: int
) -> None:
    async with running(llama, tokens_per_block=4, **settings) as engine:
        assert engine.info.total_blocks == blocks
        assert engine.backend.stats().total_blocks == blocks


async def test_a_fraction_of_the_free_memory_sizes_the_pool(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cpu, "spare_memory", lambda *_: 1000 * BYTES_PER_TOKEN)
    settings = {"kv_cache_free_memory_fraction": 0.5, "host_cache_bytes": 99 * BYTES_PER_TOKEN}
    async with running(llama, tokens_per_block=4, **settings) as engine:
        assert engine.info.total_blocks == 125
        assert scheduler_of(engine).pool.host_blocks == 24


async def test_a_pool_without_a_block_is_refused(llama: Path) -> None:
    backend = TorchBackend(llama, by_short_names(TorchSettings, threads=1, kv_cache_bytes=1))
    with pytest.raises(ModelUnusable, match=r"0 tokens holds no block of 16.*kv_cache\.bytes"):
        await backend.start(lambda _: None, lambda _: None)
    await backend.close()


ADAPTERS = {"adapters_host_bytes": 2**30, "max_rank": 16}


@pytest.mark.parametrize(("settings", "slots"), [({}, 8), ({"max_batch_adapters": 2}, 2)])
async def test_slots_are_those_of_a_batch(
    llama: Path, settings: dict[str, Any], slots: int
) -> None:
    async with running(llama, **{**TINY, **ADAPTERS, **settings}) as engine:
        assert engine.info.capabilities.max_adapters == slots
        assert engine.backend.stats().adapter_slots == slots


def test_free_memory_is_what_machine_and_container_leave(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable: 50 kB\n")
    assert free_memory(meminfo, tmp_path) == 50 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("9000\n")
    assert free_memory(meminfo, tmp_path) == 50 * 1024
    (tmp_path / "memory.max").write_text("10000\n")
    assert free_memory(meminfo, tmp_path) == 1000
    assert free_memory() > 2**20


@pytest.mark.parametrize(("family", "frees"), [("mistral", True), ("gemma2", False)])
async def test_blocks_outside_the_window_are_freed_only_if_every_layer_has_one(
    model_dir: Any, family: str, frees: bool
) -> None:
    folder = model_dir(family)
    prompts = [*PROMPTS, list(range(10, 50))]
    model = tiny_models.reference_model(folder)
    expected = [tiny_models.greedy(model, prompt, 24) for prompt in prompts]
    async with running(folder, **TINY) as engine:
        for _ in range(2):
            assert await engine.run(prompts, CONFIG) == expected
        assert (scheduler_of(engine).rules.window is not None) == frees
        engine.used_blocks.clear()
        await engine.run(prompts[-1:], CONFIG)
        assert engine.backend.stats().used_blocks == 0
        # 40 tokens fill 10 blocks, the window of 8 touches 3.
        assert (max(engine.used_blocks) < 10) == frees


async def test_blocks_and_pauses_are_counted(llama: Path) -> None:
    prompt = list(range(10, 32))
    settings = {"kv_cache_tokens": 48, "tokens_per_block": 4, "host_cache_bytes": 2**16}
    config = configure(max_tokens=3, ignore_end_id=True, perf_metrics=True)
    async with running(llama, **settings) as engine:
        for new, reused in ((6, 0), (1, 5)):
            (stream,) = await engine.ended(engine.submit(prompt, config))
            assert stream.end
            metrics = stream.end.perf_metrics
            assert metrics
            assert metrics.kv_cache_alloc_new_blocks == new
            assert metrics.kv_cache_reused_blocks == reused
            assert metrics.kv_cache_alloc_total_blocks == new
        stats = engine.backend.stats()
        assert (stats.new_blocks, stats.reused_blocks, stats.preemptions) == (7, 5, 0)
        assert stats.host_blocks == 2**16 // (4 * BYTES_PER_TOKEN)
        assert stats.used_host_blocks == 0
        await engine.run([[number] * 8 for number in range(40, 46)], CONFIG)
        stats = engine.backend.stats()
        assert stats.preemptions > 0
        assert stats.paused_sequences == 0
        assert 0 < stats.used_host_blocks <= stats.host_blocks
