"""Items with any combination of fields, made of a number, and their results."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from engine.torch.harness import Harness, Stream, configure, running
from oracle import tiny_models
from trtmesh.chassis.vocabulary import (
    GenerationConfig,
    PromptTuning,
    Tensor,
    TokenRangeRetention,
)
from trtmesh.engine.backend import BackendStats, TopLogProbs
from trtmesh.v1 import generation_pb2 as pb

FAMILIES = ("llama", "mistral", "gemma2")
"""By the number of the round: full attention, a window in every layer, windows in some."""
VOCABULARY = tiny_models.VOCABULARY_SIZE
TABLE_ROWS = 6
POOL_TOKENS = 208
TINY_POOL_TOKENS = 112
"""Room for the longest item of one sequence and little more."""
TINY_POOL_BLOCK = 4
TINY_POOL: dict[str, Any] = {
    "kv_cache_tokens": TINY_POOL_TOKENS,
    "tokens_per_block": TINY_POOL_BLOCK,
    "max_step_tokens": 64,
    "max_batch_size": 64,
    "batching_policy": "max_utilization",
}
"""Settings under which sequences are paused."""
CROWD, CROWDING_PROMPT = 7, 12
"""So many items begin together in the tiny pool, and end with more than twice its tokens."""
MOST_NEW = 24
DTYPES = {pb.DATA_TYPE_FP32: np.float32, pb.DATA_TYPE_FP16: np.float16}


@dataclass
class Item:
    """An item and the interruptions planned."""

    prompt: list[int]
    config: GenerationConfig
    batch_index: int
    cancelled_after: int | None = None
    """The item is cancelled after this many tokens of the first sequence."""
    moves_after: list[int] = field(default_factory=list)
    """The sequences are stopped after this many tokens and continue from there."""


@dataclass
class Result:
    """The result of a sequence."""

    token_ids: list[int]
    log_probs: list[float]
    top_log_probs: list[TopLogProbs]
    logits: list[np.ndarray[Any, Any]]
    reason: int
    stop_token_ids: tuple[int, ...]
    cumulative_log_prob: float | None
    prompt_log_probs: list[float]
    context_logits: list[np.ndarray[Any, Any]]


class Maker:
    """Makes a round from a number."""

    def __init__(self, number: int, common: Sequence[int]) -> None:
        self.dice = Random(number)
        self._common = common
        generator = torch.Generator().manual_seed(number)
        self._tables = [
            torch.randn(TABLE_ROWS, 64, generator=generator) * tiny_models.WEIGHT_STD
            for _ in range(2)
        ]
        stems = [self._ids(self.dice.randint(1, 30)) for _ in range(3)]
        # Prompts with the same beginning share blocks, some wholly.
        self._prompts = [
            stem + self._ids(self.dice.randint(0, 10)) for stem in stems for _ in range(2)
        ]

    def settings(self) -> dict[str, Any]:
        dice = self.dice
        return {
            "kv_cache_tokens": dice.choice([POOL_TOKENS, POOL_TOKENS, 2048]),
            "tokens_per_block": dice.choice([4, 8, 16]),
            "max_step_tokens": dice.choice([3, 5, 16, 64, 512]),
            "max_batch_size": dice.choice([4, 9, 64]),
            "prefix_reuse": dice.random() < 0.8,
            "host_cache_bytes": dice.choice([0, 2**20]),
            "batching_policy": dice.choices(
                ["max_utilization", "guaranteed_no_evict", "static_batch"], [57, 28, 15]
            )[0],
        }

    def item(self, batch_index: int) -> Item:
        dice = self.dice
        values = self._shared()
        searches = dice.random() < 0.3
        values |= self._search() if searches else self._draws()
        config = configure(**values)
        prompt = list(dice.choice(self._prompts))
        if dice.random() < 0.25 and not config.output.prompt_log_probs:
            prompt, config = self._tuned(prompt, config)
        item = Item(prompt, config, batch_index)
        fate = dice.random()
        if fate < 0.2:
            item.cancelled_after = dice.randint(0, MOST_NEW)
        elif fate < 0.5 and not searches:
            item.moves_after = sorted(dice.sample(range(1, MOST_NEW), dice.randint(1, 2)))
        return item

    def crowding(self) -> Item:
        """An item before all others, which none befalls: some of a crowd of them are paused, whatever the rest do."""
        config = configure(
            max_tokens=MOST_NEW,
            ignore_end_id=True,
            priority=9,
            temperature=1.0,
            seed=self.dice.getrandbits(64),
        )
        return Item(self._ids(CROWDING_PROMPT), config, 0)

    def _shared(self) -> dict[str, Any]:
        dice = self.dice
        values: dict[str, Any] = {"max_tokens": dice.randint(1, MOST_NEW)}
        options: dict[str, Any] = {
            "min_tokens": dice.randint(0, values["max_tokens"]),
            "stop_token_ids": tuple(
                tuple(dice.sample(self._common, dice.randint(1, 2))) for _ in range(3)
            ),
            "bad_token_ids": tuple(
                tuple(dice.sample(self._common, dice.randint(1, 3))) for _ in range(3)
            ),
            "repetition_penalty": dice.uniform(0.7, 1.6),
            "presence_penalty": dice.uniform(-1, 1),
            "frequency_penalty": dice.uniform(-0.5, 1),
            "prompt_ignore_length": dice.randint(0, 20),
            "no_repeat_ngram_size": dice.randint(1, 3),
            "embedding_bias": self._bias(),
            "log_probs": True,
            "top_log_probs": dice.randint(1, 5),
            "prompt_log_probs": True,
            "context_logits": True,
            "perf_metrics": True,
            "reuse": False,
            "salt": dice.choice(["a", "b"]),
            "decode_priority": dice.randint(0, 100),
            "token_ranges": (TokenRangeRetention(dice.randint(0, 9), None, dice.randint(0, 100)),),
            "priority": dice.randint(-2, 2),
        }
        values |= {name: value for name, value in options.items() if dice.random() < 0.25}
        if dice.random() < 0.5:
            values["end_id"] = dice.choice(self._common)
        else:
            values["ignore_end_id"] = True
        return values

    def _draws(self) -> dict[str, Any]:
        dice = self.dice
        options: dict[str, Any] = {
            "temperature": dice.uniform(0.3, 2),
            "top_k": dice.randint(0, 40),
            "top_p": dice.uniform(0.3, 1),
            "min_p": dice.uniform(0, 0.2),
            "top_p_decay": dice.uniform(0.7, 1),
            "top_p_min": dice.uniform(0.1, 0.5),
            "top_p_reset_id": dice.choice(self._common),
            "num_return_sequences": dice.randint(2, 4),
            "normalize_log_probs": True,
            "generation_logits": True,
            "logits_data_type": dice.choice(list(DTYPES)),
        }
        values = {name: value for name, value in options.items() if dice.random() < 0.3}
        return values | {"seed": dice.getrandbits(64)}

    def _search(self) -> dict[str, Any]:
        dice = self.dice
        options: dict[str, Any] = {
            "length_penalty": dice.uniform(-1, 2),
            "early_stopping": dice.randint(1, 3),
            "diversity_rate": dice.uniform(0, 1),
            "num_return_sequences": dice.randint(1, 2),
            "temperature": dice.uniform(0.5, 2),
            "generation_logits": True,
            "logits_data_type": dice.choice(list(DTYPES)),
        }
        values = {name: value for name, value in options.items() if dice.random() < 0.4}
        return values | {"beam_width": dice.randint(2, 4)}

    def _tuned(
        self, prompt: list[int], config: GenerationConfig
    ) -> tuple[list[int], GenerationConfig]:
        dice = self.dice
        for place in dice.sample(range(len(prompt)), (len(prompt) + 2) // 3):
            prompt[place] = VOCABULARY + dice.randrange(TABLE_ROWS)
        rows = dice.choice(self._tables)
        table = Tensor(pb.DATA_TYPE_FP32, tuple(rows.shape), rows.numpy().tobytes())
        extra_ids = (dice.randint(0, 1),) * len(prompt) if dice.random() < 0.5 else ()
        return prompt, replace(config, prompt_tuning=PromptTuning(table, extra_ids=extra_ids))

    def _bias(self) -> tuple[float, ...]:
        bias = [0.0] * VOCABULARY
        for token in self.dice.sample(range(VOCABULARY), 30):
            bias[token] = self.dice.choice([-math.inf, -2.0, 2.0])
        return tuple(bias)

    def _ids(self, count: int) -> list[int]:
        return [self.dice.randrange(2, VOCABULARY) for _ in range(count)]


async def frequent(engine: Harness) -> list[int]:
    """Frequent ids, so that words of them occur."""
    outputs = await engine.run(tiny_models.prompts(6), configure(max_tokens=30, ignore_end_id=True))
    return sorted({token for tokens in outputs for token in tokens[::3]})[:24]


async def play_alone(engine: Harness, item: Item) -> list[Result]:
    keys = engine.submit(item.prompt, item.config, batch_index=item.batch_index)
    return [result_of(item, [stream]) for stream in await engine.ended(keys)]


async def some_tokens(engine: Harness, key: int, count: int) -> None:
    stream = engine.streams[key]
    await engine.until(lambda: len(stream.token_ids) >= count or stream.end)


def result_of(item: Item, streams: Sequence[Stream]) -> Result:
    """The parts of a sequence put together."""
    end = streams[-1].end
    assert end
    assert end.error is None, end.error
    details = [each for stream in streams for each in stream.details]
    prompts = [each for stream in streams for each in stream.prompts]
    tokens = [token for stream in streams for token in stream.token_ids]
    assert end.generated_tokens == len(tokens)
    assert end.prompt_tokens == len(item.prompt)
    assert (end.perf_metrics is not None) == item.config.output.perf_metrics
    return Result(
        tokens,
        [value for each in details for value in each.log_probs],
        [top for each in details for top in each.top_log_probs],
        [rows(each.generation_logits) for each in details if each.generation_logits],
        end.reason,
        end.stop_token_ids,
        end.cumulative_log_prob,
        [value for each in prompts for value in each.log_probs],
        [rows(each.context_logits) for each in prompts if each.context_logits],
    )


def rows(tensor: Tensor) -> np.ndarray[Any, Any]:
    dtype = DTYPES[pb.DataType.ValueType(tensor.data_type)]
    return np.frombuffer(tensor.data, dtype=dtype).reshape(tensor.shape).astype(np.float32)


def compare(item: Item, found: list[Result], expected: list[Result]) -> None:
    assert len(found) == len(expected) == item.config.sequences
    for mine, theirs in zip(found, expected, strict=True):
        if mine.reason == pb.FINISH_REASON_CANCELLED:
            assert item.cancelled_after is not None
            if item.config.beam_search.beam_width == 1:
                count = len(mine.token_ids)
                assert mine.token_ids == theirs.token_ids[:count]
                assert mine.log_probs == near(theirs.log_probs[:count])
            continue
        assert mine.token_ids == theirs.token_ids
        assert (mine.reason, mine.stop_token_ids) == (theirs.reason, theirs.stop_token_ids)
        assert mine.log_probs == near(theirs.log_probs)
        assert mine.cumulative_log_prob == near(theirs.cumulative_log_prob)
        assert values(mine.top_log_probs) == near(values(theirs.top_log_probs))
        assert mine.prompt_log_probs == near(theirs.prompt_log_probs)
        for some, others in (
            (mine.logits, theirs.logits),
            (mine.context_logits, theirs.context_logits),
        ):
            assert bool(some) == bool(others)
            if some:
                half = item.config.output.logits_data_type == pb.DATA_TYPE_FP16
                np.testing.assert_allclose(
                    np.concatenate(some),
                    np.concatenate(others),
                    atol=2e-2 if half else 1e-4,
                    rtol=1e-3 if half else 1e-4,
                )


def values(tops: list[TopLogProbs]) -> list[float]:
    """Equally likely alternatives may come in any order, so the values are compared."""
    return [value for _, values in tops for value in values]


def near(value: Any) -> Any:
    return None if value is None else pytest.approx(value, abs=2e-3)


@asynccontextmanager
async def lonely(model: Path) -> AsyncIterator[Harness]:
    """The worker for items alone."""
    async with running(model, prefix_reuse=False, kv_cache_tokens=4096) as engine:
        yield engine


def fits_the_tiny_pool(item: Item) -> bool:
    """Whether the pool holds all beams of a search; other sequences need not fit together."""
    config, prompt = item.config, len(item.prompt)
    assert config.stopping.max_tokens
    shared = (prompt - 1) // TINY_POOL_BLOCK
    own = -(-(prompt + config.stopping.max_tokens - 1) // TINY_POOL_BLOCK) - shared
    return shared + config.beam_search.beam_width * own <= TINY_POOL_TOKENS // TINY_POOL_BLOCK


async def check(
    items: Sequence[Item],
    settings: dict[str, Any],
    model: Path,
    lonely: Harness,
    prepare: Callable[[Harness, list[list[Result]]], object] = lambda _engine, _alone: None,
) -> BackendStats:
    """Plays the items together; returns the worker's counters. `prepare` sees the worker and the results alone."""
    alone = [await play_alone(lonely, item) for item in items]
    async with running(model, **settings) as engine:
        prepare(engine, alone)
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
