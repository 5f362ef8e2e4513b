"""Stop, failure, migration and preemption: each sequence ends once, with the blocks already free."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.torch.conftest import Device
from engine.torch.harness import Harness, Stream, configure, module_of, running
from oracle import tiny_models
from trtmesh.chassis.errors import BackendFailed
from trtmesh.chassis.vocabulary import GenerationConfig
from trtmesh.engine.backend import SequenceEnd
from trtmesh.v1 import generation_pb2 as pb

LONG = configure(max_tokens=400, ignore_end_id=True)
SHORT = configure(max_tokens=6, ignore_end_id=True)


def end_of(stream: Stream) -> SequenceEnd:
    assert stream.end is not None
    return stream.end


def internals(engine: Harness) -> Any:
    return engine.backend._loaded.engine


@pytest.mark.parametrize(
    "reason", [pb.FINISH_REASON_STOPPED, pb.FINISH_REASON_CANCELLED, pb.FINISH_REASON_STOP_WORD]
)
async def test_stop_ends_with_the_reason_given_and_frees_first(llama: Path, reason: int) -> None:
    async with running(llama) as engine:
        with engine.gate.held():
            (key,) = engine.submit([5, 6, 7], LONG)
            await engine.until(lambda: engine.streams[key].token_ids)
            assert engine.backend.stats().used_blocks > 0
            engine.backend.stop([key], reason)
        (stream,) = await engine.ended([key])
        assert end_of(stream).reason == reason
        assert end_of(stream).generated_tokens == len(stream.token_ids)
        assert stream.blocks_used_at_end == 0


async def test_unknown_and_ended_keys_are_ignored(llama: Path) -> None:
    async with running(llama) as engine:
        (key,) = engine.submit([5], SHORT)
        await engine.ended([key])
        engine.backend.stop([key, 12345], pb.FINISH_REASON_STOPPED)
        await engine.ended(engine.submit([5], SHORT))


async def test_waiting_sequence_can_be_stopped(llama: Path) -> None:
    async with running(llama, max_batch_size=1) as engine:
        with engine.gate.held():
            (running_key,) = engine.submit([5], LONG)
            (waiting,) = engine.submit([6] * 9, LONG)
            await engine.until(lambda: engine.streams[running_key].token_ids)
            assert engine.backend.stats().waiting_sequences == 1
            assert engine.backend.stats().pending_prompt_tokens == 9
            engine.backend.stop([waiting], pb.FINISH_REASON_STOPPED)
        (stream,) = await engine.ended([waiting])
        assert stream.token_ids == []
        assert engine.backend.stats().pending_prompt_tokens == 0
        engine.backend.stop([running_key], pb.FINISH_REASON_STOPPED)
        await engine.ended()


async def test_a_finished_sequence_has_freed_its_blocks(llama: Path) -> None:
    async with running(llama) as engine:
        (stream,) = await engine.ended(engine.submit([5] * 40, SHORT))
        assert end_of(stream).reason == pb.FINISH_REASON_LENGTH
        assert stream.blocks_used_at_end == 0


async def test_close_ends_every_sequence(llama: Path) -> None:
    async with running(llama, max_batch_size=2) as engine:
        with engine.gate.held():
            keys = [engine.submit([5], LONG)[0] for _ in range(4)]
            await engine.until(lambda: engine.streams[keys[0]].token_ids)
            closing = asyncio.create_task(engine.backend.close())
            # Asks, then waits for the thread.
            await asyncio.sleep(0)
        await closing
    for stream in await engine.ended(keys):
        assert end_of(stream).reason == pb.FINISH_REASON_CANCELLED


@pytest.mark.parametrize(
    "config",
    [
        configure(max_tokens=20, ignore_end_id=True),
        configure(max_tokens=20, ignore_end_id=True, temperature=1.5, top_p=0.9, seed=3),
        configure(
            max_tokens=20,
            ignore_end_id=True,
            repetition_penalty=1.3,
            presence_penalty=1.0,
            frequency_penalty=0.5,
            min_tokens=10,
            stop_token_ids=((1, 2), (7, 8, 9)),
        ),
    ],
    ids=["greedy", "sampled", "penalised"],
)
async def test_migrated_sequence_continues_bit_for_bit(
    llama: Path, config: GenerationConfig, device: Device
) -> None:
    prompt = tiny_models.prompts(2)[1]
    async with running(llama, **device) as engine:
        (whole,) = await engine.ended(engine.submit(prompt, config, batch_index=3))
        for emitted in (1, 7, 19):
            before = whole.token_ids[:emitted]
            keys = engine.submit(prompt, config, emitted=before, batch_index=3)
            (rest,) = await engine.ended(keys)
            assert before + rest.token_ids == whole.token_ids
            assert rest.first_offset == emitted
            assert end_of(rest).generated_tokens == end_of(whole).generated_tokens
            assert end_of(rest).prompt_tokens == len(prompt)
            assert end_of(rest).reason == end_of(whole).reason


async def test_complete_migrated_sequence_ends_at_once(llama: Path) -> None:
    async with running(llama, max_sequence_tokens=16) as engine:
        at_limit = engine.submit([5], configure(max_tokens=3), emitted=[7, 7, 7])
        at_end = engine.submit([5], configure(max_tokens=9, end_id=8), emitted=[7, 8])
        full = engine.submit([5] * 10, configure(), emitted=[7] * 6)
        ends = [end_of(stream) for stream in await engine.ended([*at_limit, *at_end, *full])]
        length, end_id = pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_END_ID
        assert [end.reason for end in ends] == [length, end_id, length]
        assert [end.generated_tokens for end in ends] == [3, 2, 6]
        assert not any(stream.token_ids for stream in engine.streams.values())


def poison(engine: Harness, token: int) -> None:
    """From now on the token's embedding is not a number."""
    with torch.no_grad():
        module_of(engine).get_input_embeddings().weight[token] = torch.nan


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"beam_width": 3},
        {"num_return_sequences": 3, "temperature": 1.0, "seed": 1},
        {"top_log_probs": 3, "prompt_log_probs": True, "context_logits": True},
    ],
)
async def test_non_finite_logits_fail_their_item_alone(
    llama: Path, values: dict[str, Any], device: Device
) -> None:
    good = tiny_models.prompts(4)
    config = configure(max_tokens=6, ignore_end_id=True, **values)
    async with running(llama, kv_cache_tokens=512, **device) as engine:
        expected = await engine.run(good, SHORT)
        met = {token for tokens in [*good, *expected] for token in tokens}
        bad = next(token for token in range(250, 320) if token not in met)
        poison(engine, bad)
        for _ in range(5):
            keys = [engine.submit(prompt, SHORT)[0] for prompt in good]
            failing = engine.submit([5, bad, 6], config)
            assert [stream.token_ids for stream in await engine.ended(keys)] == expected
            # Also where the first KV of the only sequence is not finite.
            failing += engine.submit([bad, 5], config)
            for failed in await engine.ended(failing):
                assert end_of(failed).reason == pb.FINISH_REASON_ERROR
                assert isinstance(end_of(failed).error, BackendFailed)
                assert failed.token_ids == []
        assert engine.backend.stats().used_blocks == 0
        assert engine.failures == []


async def test_higher_priority_runs_earlier(llama: Path) -> None:
    async with running(llama, max_batch_size=1) as engine:
        with engine.gate.held():
            (first,) = engine.submit([5], configure(max_tokens=20, ignore_end_id=True))
            await engine.until(lambda: engine.streams[first].token_ids)
            (low,) = engine.submit([5], configure(max_tokens=3, ignore_end_id=True, priority=-1))
            (high,) = engine.submit([5], configure(max_tokens=3, ignore_end_id=True, priority=1))
        await engine.ended()
        order = [end.key for output in engine.outputs for end in output.ends]
        assert order == [first, high, low]


async def test_perf_metrics_are_in_order_and_only_on_request(llama: Path) -> None:
    config = configure(max_tokens=20, ignore_end_id=True, perf_metrics=True)
    async with running(llama, tokens_per_block=4) as engine:
        (asking,) = await engine.ended(engine.submit([5] * 10, config))
        (silent,) = await engine.ended(engine.submit([5] * 10, SHORT))
        assert end_of(silent).perf_metrics is None
        metrics = end_of(asking).perf_metrics
        assert metrics is not None
        assert metrics.arrival_time_ns <= metrics.first_scheduled_time_ns
        assert metrics.first_scheduled_time_ns < metrics.first_token_time_ns
        assert metrics.first_token_time_ns < metrics.last_token_time_ns
        assert silent.start is None
        # With the first token: the prompt's 10 tokens have KV, and there is no last token.
        assert asking.start == pb.PerfMetrics(
            arrival_time_ns=metrics.arrival_time_ns,
            first_scheduled_time_ns=metrics.first_scheduled_time_ns,
            first_token_time_ns=metrics.first_token_time_ns,
            kv_cache_alloc_new_blocks=3,
            kv_cache_alloc_total_blocks=3,
        )
        # 10 prompt tokens and 19 of the 20 new ones have KV.
        assert metrics.kv_cache_alloc_total_blocks == 8
        assert end_of(asking).queue_seconds >= 0


async def test_no_block_leaks_in_thousands_of_random_operations(llama: Path) -> None:
    draw = random.Random(4)
    settings = {"kv_cache_tokens": 240, "tokens_per_block": 4, "max_batch_size": 8}
    async with running(llama, **settings, max_queue_size=100_000) as engine:
        keys: list[int] = []
        for _ in range(2500):
            if keys and draw.random() < 0.55:
                chosen = draw.sample(keys, min(len(keys), draw.randint(1, 4)))
                engine.backend.stop(chosen, pb.FINISH_REASON_STOPPED)
                keys = [key for key in keys if key not in chosen]
            else:
                prompt = [draw.randint(2, 40)] * draw.randint(1, 30)
                reuse = draw.random() < 0.5
                config = configure(
                    max_tokens=draw.randint(1, 20), reuse=reuse, priority=draw.randint(-2, 2)
                )
                keys += engine.submit(prompt, config)
            if draw.random() < 0.1:
                steps = len(engine.outputs) + 1
                await engine.until(
                    lambda steps=steps: _idle(engine) or len(engine.outputs) >= steps
                )
        engine.backend.stop(list(engine.streams), pb.FINISH_REASON_STOPPED)
        streams = await engine.ended()
        assert len(streams) > 1000
        stats = engine.backend.stats()
        assert (stats.used_blocks, stats.free_blocks) == (0, stats.total_blocks)
        assert (stats.running_sequences, stats.waiting_sequences) == (0, 0)
        assert stats.pending_prompt_tokens == 0
        scheduler = internals(engine).scheduler
        assert scheduler.tables.free_slots == 8
        assert not scheduler.tables.rows.any()
        assert all(count == 0 for count in scheduler.pool._references)


def _idle(engine: Harness) -> bool:
    return all(stream.end for stream in engine.streams.values())


async def test_no_sequence_starves_in_a_tiny_pool(llama: Path) -> None:
    settings = {"kv_cache_tokens": 40, "tokens_per_block": 4, "max_batch_size": 8}
    async with running(llama, **settings, prefix_reuse=False) as engine:
        config = configure(max_tokens=30, ignore_end_id=True)
        with engine.gate.held():
            keys = [engine.submit([5 + number] * 6, config)[0] for number in range(12)]
        await engine.ended(keys)
        assert internals(engine).scheduler.preemptions > 0
        first_ends = [end.key for output in engine.outputs for end in output.ends]
        # The oldest sequence is never preempted and ends first.
        assert first_ends[0] == keys[0]
