"""The engine on a GPU: the tokens of `generate` and of the CPU, through captured steps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.torch.cuda.launches import recorded
from engine.torch.harness import Harness, configure, running
from oracle import tiny_models
from trtmesh.chassis.stopping import EndRule
from trtmesh.chassis.vocabulary import GenerationConfig
from trtmesh.engine.backends.torch.cuda import chunk_graphs
from trtmesh.engine.backends.torch.cuda.capturing import Rows
from trtmesh.engine.backends.torch.cuda.chunk_graphs import ChunkGraphs, parts_of
from trtmesh.engine.backends.torch.cuda.decode_graphs import sizes
from trtmesh.engine.backends.torch.cuda.device import Cuda
from trtmesh.engine.backends.torch.cuda.invariant_device import InvariantCuda
from trtmesh.engine.backends.torch.cuda.runner import GraphRunner
from trtmesh.engine.backends.torch.cuda.step_inputs import MOST_CHUNKS
from trtmesh.engine.backends.torch.sampling.token_rules import TokenRules
from trtmesh.engine.backends.torch.sequence import Chunk, Sequence

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

NEW_TOKENS = 12
FREE = configure(max_tokens=NEW_TOKENS, ignore_end_id=True)
CONFIGS = [
    FREE,
    configure(max_tokens=NEW_TOKENS, ignore_end_id=True, temperature=1.3, seed=1),
    configure(max_tokens=NEW_TOKENS, ignore_end_id=True, temperature=1.0, seed=3, top_k=20),
    configure(max_tokens=NEW_TOKENS, ignore_end_id=True, temperature=0.8, seed=4, top_p=0.9),
    configure(max_tokens=NEW_TOKENS, ignore_end_id=True, temperature=0.8, seed=5, min_p=0.1),
    configure(max_tokens=NEW_TOKENS, ignore_end_id=True, temperature=1.0, seed=6, log_probs=True),
    configure(max_tokens=NEW_TOKENS, ignore_end_id=True, repetition_penalty=1.4),
    configure(
        max_tokens=NEW_TOKENS,
        temperature=0.9,
        seed=7,
        top_p=0.8,
        presence_penalty=0.7,
        min_tokens=9,
    ),
    configure(max_tokens=NEW_TOKENS, ignore_end_id=True, no_repeat_ngram_size=2),
    configure(max_tokens=NEW_TOKENS, ignore_end_id=True, beam_width=3),
]
"""Chosen by the step's graph, by that of the rules, and by the way of all devices."""
DRAWS: list[dict[str, Any]] = [{}, {"temperature": 1.1, "seed": 8}, {"temperature": 0.7, "seed": 9}]
UNCAPTURED = {"mixtral", "gpt_oss"}
"""Families whose experts are picked on the host: they run operation by operation."""


def captured(engine: Harness) -> bool:
    compute = engine.backend._loaded.engine._compute
    return isinstance(compute, GraphRunner) and bool(compute._graphs._replays)


@pytest.mark.parametrize("family", sorted(set(tiny_models.FAMILIES) - UNCAPTURED))
async def test_decode_steps_are_captured(family: str, model_dir: Callable[[str], Path]) -> None:
    """Their tokens are those of `generate`: ../test_greedy.py."""
    folder = model_dir(family)
    async with running(folder, device="cuda:0", dtype="float32", max_batch_size=2) as engine:
        assert captured(engine)


async def test_each_choice_equals_the_cpus_alone_and_in_a_mixed_batch(llama: Path) -> None:
    prompts = tiny_models.prompts(len(CONFIGS))

    async def alone(engine: Harness) -> list[list[list[int]]]:
        found = []
        for prompt, config in zip(prompts, CONFIGS, strict=True):
            streams = await engine.ended(engine.submit(prompt, config))
            found.append([stream.token_ids for stream in streams])
        return found

    async def together(engine: Harness) -> list[list[list[int]]]:
        with engine.gate.held():
            keys = [
                engine.submit(prompt, config)
                for prompt, config in zip(prompts, CONFIGS, strict=True)
            ]
        return [[stream.token_ids for stream in await engine.ended(each)] for each in keys]

    async with running(llama) as engine:
        expected = await together(engine)
    async with running(llama, device="cuda:0", dtype="float32", max_batch_size=32) as engine:
        assert captured(engine)
        assert await together(engine) == expected
        # The seed counts, and not the place in the batch: prompts were submitted as items of equal coordinates.
        assert await alone(engine) == expected


async def test_sequences_that_end_at_different_steps_equal_the_cpus(llama: Path) -> None:
    """A step is launched before the tokens of the one before are known: by length some ends are, by word none."""
    prompts = tiny_models.prompts(40)
    configs = [
        configure(max_tokens=1 + 7 * place % 60, ignore_end_id=True, **DRAWS[place % len(DRAWS)])
        for place in range(len(prompts))
    ]

    async def run(engine: Harness, configs: list[GenerationConfig]) -> list[list[int]]:
        keys = [
            engine.submit(prompt, config) for prompt, config in zip(prompts, configs, strict=True)
        ]
        return [(await engine.ended(each))[0].token_ids for each in keys]

    async with running(llama, max_batch_size=16, tokens_per_block=4) as engine:
        free = await run(engine, configs)
        worded = [
            replace(config, stopping=replace(config.stopping, stop_token_ids=(tuple(ids[5:6]),)))
            if len(ids) > 5
            else config
            for config, ids in zip(configs, free, strict=True)
        ]
        expected = await run(engine, worded)
    assert sum(map(len, expected)) < sum(map(len, free))
    options: dict[str, Any] = {"device": "cuda:0", "dtype": "float32", "max_batch_size": 16}
    async with running(llama, tokens_per_block=4, **options) as engine:
        assert captured(engine)
        assert await run(engine, configs) == free
        assert await run(engine, worded) == expected
        # The KV of these ends is found again.
        assert await run(engine, worded) == expected


async def test_chunks_by_graph_equal_chunks_without(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts around the sizes of graphs and beyond, several in a step, and beside decoding sequences."""
    monkeypatch.setattr(chunk_graphs, "SIZES", (64, 128, 256))
    dice = random.Random(0)
    lengths = [2, 63, 64, 65, 128, 129, 255, 256, 300, 490]
    prompts = [[dice.randrange(3, 300) for _ in range(length)] for length in lengths]
    several = [[dice.randrange(3, 300) for _ in range(dice.randrange(1, 16))] for _ in range(24)]

    async def run(engine: Harness) -> list[list[list[int]]]:
        found = [await engine.run([prompt], FREE) for prompt in prompts]
        found.append(await engine.run(prompts[-8:] + prompts[-3:], FREE))
        for count in (2, 7, 16, 17, 24):
            with engine.gate.held():
                keys = [engine.submit(prompt, FREE)[0] for prompt in several[:count]]
            found.append([stream.token_ids for stream in await engine.ended(keys)])
        # The last arrive while others decode.
        return [*found, await engine.run(several, FREE)]

    options: dict[str, Any] = {"max_batch_size": 20, "prefix_reuse": False}
    async with running(llama, **options) as engine:
        expected = await run(engine)
    async with running(llama, device="cuda:0", dtype="float32", **options) as engine:
        compute = engine.backend._loaded.engine._compute
        assert isinstance(compute, GraphRunner)
        graphs = compute._chunks
        launched: list[tuple[int, int]] = []

        def launch(chunks: SequenceOf[Chunk]) -> Rows:
            launched.append((sum(chunk.count for chunk in chunks), len(chunks)))
            return ChunkGraphs._launch(graphs, chunks)

        # Bound to the instance: a recorder around the method.
        graphs._launch = launch  # type: ignore[method-assign]
        before = engine.backend.stats()
        assert await run(engine) == expected
        after = engine.backend.stats()
        assert after.captured_steps - before.captured_steps == after.step_count - before.step_count
    assert {tokens for tokens, _ in launched} >= {length for length in lengths if length <= 256}
    assert max(tokens for tokens, _ in launched) == 256
    assert {count for _, count in launched} >= {2, 7, 16}
    assert max(count for _, count in launched) == MOST_CHUNKS


def nameless(key: int) -> Sequence:
    config = FREE
    return Sequence(
        key=key,
        batch_index=0,
        sequence_index=0,
        tokens=[],
        rule=EndRule(config.stopping, (), 0, 0),
        token_rules=TokenRules(config),
        config=config,
        submitted_tokens=0,
    )


def test_parts_of_chunks_have_each_token_once() -> None:
    dice = random.Random(1)
    for most in (1, 7, 64):
        counts = [dice.randrange(1, 200) for _ in range(dice.randrange(1, 40))]
        chunks = [
            Chunk(nameless(key), dice.randrange(9), count) for key, count in enumerate(counts)
        ]
        parts = parts_of(chunks, most)
        assert all(sum(chunk.count for chunk in part) <= most for part in parts)
        assert all(len(part) <= MOST_CHUNKS for part in parts)
        # Only a full part is followed by another.
        for part in parts[:-1]:
            assert sum(chunk.count for chunk in part) == most or len(part) == MOST_CHUNKS
        tokens = [
            (chunk.sequence.key, token)
            for part in parts
            for chunk in part
            for token in range(chunk.start, chunk.start + chunk.count)
        ]
        assert tokens == [
            (chunk.sequence.key, token)
            for chunk in chunks
            for token in range(chunk.start, chunk.start + chunk.count)
        ]


async def test_the_step_after_a_prompt_is_launched_ahead(llama: Path) -> None:
    """Alone, and beside decoding sequences."""
    prompts = tiny_models.prompts(6)
    configs = [FREE, *(configure(max_tokens=9, ignore_end_id=True, **draw) for draw in DRAWS)]

    async def run(engine: Harness) -> list[list[int]]:
        alone = await engine.run(prompts[:1], FREE)
        keys: list[int] = []
        for place, prompt in enumerate(prompts):
            keys += engine.submit(prompt, configs[place % len(configs)])
            await asyncio.sleep(0)
        return alone + [stream.token_ids for stream in await engine.ended(keys)]

    async with running(llama, max_batch_size=8) as engine:
        expected = await run(engine)
    async with running(llama, device="cuda:0", dtype="float32", max_batch_size=8) as engine:
        compute = engine.backend._loaded.engine._compute
        assert isinstance(compute, GraphRunner)
        kinds = recorded(compute, ("forward", "follow"))
        for config in (FREE, *CONFIGS[3:8]):
            kinds.clear()
            await engine.run(prompts[:1], config)
            # The prompt, and all tokens after the first.
            assert kinds == ["forward", *(["follow"] * (NEW_TOKENS - 1))]
        assert await run(engine) == expected


async def test_a_sequence_longer_than_a_run_of_keys(tmp_path: Path) -> None:
    folder = tiny_models.build(tmp_path, max_position_embeddings=2048)
    prompts = [
        tiny_models.prompts(6, seed=seed)[1] * length for seed, length in ((1, 9), (2, 40), (3, 1))
    ]
    model = tiny_models.reference_model(folder)
    expected = [tiny_models.greedy(model, prompt, NEW_TOKENS) for prompt in prompts]
    async with running(folder, device="cuda:0", dtype="float32", max_batch_size=4) as engine:
        assert await engine.run(prompts, FREE) == expected


async def test_half_precision_is_as_near_to_float32_as_transformers(llama: Path) -> None:
    """Tokens of a model with clear winners; the check at load compares the logits."""
    prompts = tiny_models.prompts(6)
    model = tiny_models.reference_model(llama).bfloat16()
    expected = [tiny_models.greedy(model, prompt, 4) for prompt in prompts]
    async with running(llama, device="cuda:0", dtype="bfloat16", max_batch_size=8) as engine:
        assert captured(engine)
        got = await engine.run(prompts, configure(max_tokens=4, ignore_end_id=True))
    same = sum(a == b for a, b in zip(got, expected, strict=True))
    assert same >= 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
async def test_batch_invariant_steps_are_captured(dtype: str, llama: Path) -> None:
    """Their bits are compared by test_batch_invariant.py."""
    async with running(
        llama, device="cuda:0", dtype=dtype, batch_invariant=True, max_batch_size=4
    ) as engine:
        assert isinstance(engine.backend._loaded.device, InvariantCuda)
        assert captured(engine)
        compute = engine.backend._loaded.engine._compute
        assert isinstance(compute, GraphRunner)
        assert compute._chunks._replays


async def test_auto_takes_the_gpu(llama: Path) -> None:
    async with running(llama, device="auto", max_batch_size=2) as engine:
        assert isinstance(engine.backend._loaded.device, Cuda)
        assert engine.backend._loaded.cache.pool.device == torch.device("cuda:0")


def test_sizes_of_graphs_cover_every_step() -> None:
    for most in (1, 2, 3, 20, 256, 257, 1000):
        found = sizes(most)
        assert found == sorted(set(found))
        assert found[-1] == most
    assert sizes(20) == [1, 2, 4, 8, 16, 20]


def test_sizes_of_chunk_graphs_cover_steps_of_up_to_2048_tokens() -> None:
    for most in (1, 64, 65, 300, 2048):
        found = chunk_graphs.sizes(most)
        assert found == sorted(set(found))
        assert found[-1] == most
    assert chunk_graphs.sizes(8192) == chunk_graphs.sizes(2048)
