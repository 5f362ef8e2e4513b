"""The simulated backend keeps the promises of Backend; the test's own loop drives the steps."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from engine.simulated.runs import item, running
from trtmesh.chassis.errors import (
    InvalidField,
    OutOfBlocks,
    PromptEmpty,
    PromptTooLong,
    QueueFull,
    TokenOutOfVocabulary,
    TrtmeshError,
)
from trtmesh.chassis.vocabulary import KvCache, Sampling, Stopping
from trtmesh.engine.backend import (
    Submission,
)
from trtmesh.engine.scheduling.scheduler import PATIENCE
from trtmesh.v1 import generation_pb2 as pb

SAMPLED = Sampling(temperature=1.0, seed=3)


class TestTokens:
    async def test_equal_requests_get_equal_tokens(self) -> None:
        async with running() as run, running(tokens_per_block=4) as other:
            first = await run.generate(item(1, 200))
            assert len(first) == 200
            assert await run.generate(item(2, 200)) == first
            assert await other.generate(item(1, 200)) == first
            assert await run.generate(item(3, 200, prompt=(40, 41, 43))) != first

    async def test_migrated_sequence_continues_bit_for_bit(self) -> None:
        async with (
            running(end_probability=0.02, end_id=99) as here,
            running(end_probability=0.02, end_id=99) as there,
        ):
            for number in range(40):
                stopping = Stopping(min_tokens=number)
                asked: dict[str, Any] = {
                    "prompt": (number, 50),
                    "stopping": stopping,
                    "sampling": SAMPLED,
                    "sequence_index": number % 3,
                }
                whole = await here.generate(item(number, 150, **asked))
                cut = number * 4 % len(whole)
                emitted = tuple(whole[:cut])
                rest = await there.generate(item(number, 150, emitted=emitted, **asked))
                assert [*emitted, *rest] == whole
                assert there.offsets[number] == cut
                end, other_end = here.ends[number], there.ends[number]
                assert other_end.reason == end.reason
                assert other_end.generated_tokens == end.generated_tokens == len(whole)
                assert other_end.prompt_tokens == end.prompt_tokens == 2

    async def test_complete_migrated_sequence_ends_at_once(self) -> None:
        async with running() as run:
            assert await run.generate(item(1, 3, emitted=(5, 6, 7))) == []
            assert run.ends[1].reason == pb.FINISH_REASON_LENGTH
            assert run.ends[1].generated_tokens == 3

    async def test_migrated_sequence_with_end_id_ends_at_once(self) -> None:
        async with running(end_id=2) as run:
            assert await run.generate(item(1, 9, emitted=(5, 2))) == []
            assert run.ends[1].reason == pb.FINISH_REASON_END_ID
            assert run.ends[1].stop_token_ids == (2,)

    async def test_sampled_sequences_of_item_differ(self) -> None:
        async with running() as run:
            await run.generate(item(keys=(1, 2), sampling=SAMPLED))
            await run.generate(item(keys=(3, 4)))
            assert run.tokens[1] != run.tokens[2]
            assert run.tokens[3] == run.tokens[4]

    @pytest.mark.parametrize("max_tokens", [None, 98, 2**31 - 1])
    async def test_sequence_ends_at_model_length(self, max_tokens: int | None) -> None:
        async with running(max_sequence_tokens=100) as run:
            assert len(await run.generate(item(1, max_tokens))) == 97
            assert run.ends[1].reason == pb.FINISH_REASON_LENGTH

    async def test_stop_words_and_end_ids_end_sequence(self) -> None:
        async with running(end_id=2) as run:
            plain = await run.generate(item(1, 100))
            word = tuple(plain[70:72])
            first = next(end for end in range(2, 101) if tuple(plain[end - 2 : end]) == word)
            stopped = await run.generate(item(2, 100, stopping=Stopping(stop_token_ids=(word,))))
            assert stopped == plain[:first]
            assert run.ends[2].reason == pb.FINISH_REASON_STOP_WORD
            assert run.ends[2].stop_token_ids == word
            by_id = await run.generate(item(3, 100, stopping=Stopping(end_id=plain[5])))
            assert by_id == plain[: plain.index(plain[5]) + 1]
            assert run.ends[3].reason == pb.FINISH_REASON_END_ID


class TestBlocks:
    async def test_reused_prefix_is_reported(self) -> None:
        prompt = tuple(range(10))
        async with running(tokens_per_block=4) as run:
            first = await run.generate(item(1, prompt=prompt))
            # 10 + 8 tokens, the last without KV: 4 full blocks.
            assert len(run.stored) == 4
            again = await run.generate(item(2, prompt=prompt))
            assert again == first
            assert run.ends[1].cached_prompt_tokens == 0
            assert run.ends[2].cached_prompt_tokens == 8
            assert run.backend.stats().reused_prompt_tokens == 8
            await run.generate(item(3, prompt=prompt, kv_cache=KvCache(reuse=False)))
            await run.generate(item(4, prompt=prompt, kv_cache=KvCache(salt="other")))
            assert run.ends[3].cached_prompt_tokens == run.ends[4].cached_prompt_tokens == 0

    async def test_last_prompt_token_is_always_computed(self) -> None:
        prompt = tuple(range(8))
        async with running(tokens_per_block=4) as run:
            await run.generate(item(1, prompt=prompt))
            await run.generate(item(2, prompt=prompt))
            assert run.ends[2].cached_prompt_tokens == 4

    async def test_full_pool_queues_items_and_evicts(self) -> None:
        async with running(tokens_per_block=4, total_blocks=6) as run:
            for key in range(1, 9):
                run.backend.submit(item(key, 8, prompt=(key,) * 8))
            for key in range(1, 9):
                await run.end(key)
            assert len(run.stored) <= 6
            # Each needs 4 of 6 blocks, so never two at a time.
            assert all(len(output.keys) <= 1 for output in run.outputs)

    async def test_item_beyond_pool_is_refused(self) -> None:
        async with running(tokens_per_block=4, total_blocks=6) as run:
            with pytest.raises(OutOfBlocks) as refused:
                run.backend.submit(item(1, 23))
            assert (refused.value.value, refused.value.limit) == ("7", "at most 6")


class TestScheduling:
    @pytest.mark.parametrize("is_prefill", [False, True])
    async def test_short_prompt_overtakes_a_long_one_on_a_prefill_worker(
        self, is_prefill: bool
    ) -> None:
        async with running(prefill_tokens_per_step=8) as run:
            run.backend.submit(item(1, 1, prompt=tuple(range(80)), is_prefill=is_prefill))
            await run.until(lambda: len(run.outputs) > 2)
            run.backend.submit(item(2, 1, prompt=tuple(range(20)), is_prefill=is_prefill))
            run.backend.submit(item(3, 1, prompt=tuple(range(9)), is_prefill=is_prefill))
            for key in (1, 2, 3):
                await run.end(key)
            assert list(run.ends) == ([3, 2, 1] if is_prefill else [1, 2, 3])

    @pytest.mark.parametrize("max_batch_size", [1, 4])
    async def test_short_prompts_overtake_a_long_one_for_a_bounded_time(
        self, max_batch_size: int
    ) -> None:
        async with running(prefill_tokens_per_step=8, max_batch_size=max_batch_size) as run:
            short = iter(range(2, 10_000))

            def submit_short() -> None:
                key = next(short)
                run.backend.submit(item(key, 1, prompt=(key, *range(7)), is_prefill=True))

            for _ in range(3):
                submit_short()
            run.backend.submit(item(1, 1, prompt=tuple(range(80)), is_prefill=True))
            while 1 not in run.ends:
                submit_short()
                await run.output()
            # Shorter prompts of PATIENCE times its 10 steps, the first three, and its own.
            assert PATIENCE * 10 < run.backend.stats().step_count <= PATIENCE * 10 + 3 + 10
            for key in list(run.tokens):
                await run.end(key)

    async def test_queue_orders_by_priority_then_arrival(self) -> None:
        async with running(max_batch_size=1) as run:
            for key, priority in ((1, 0), (2, 0), (3, 5), (4, 5)):
                run.backend.submit(item(key, 2, priority=priority))
            for key in range(1, 5):
                await run.end(key)
            assert list(run.ends) == [3, 4, 1, 2]

    async def test_long_prompt_takes_several_steps(self) -> None:
        async with running(prefill_tokens_per_step=10) as run:
            await run.generate(item(1, 1, prompt=(7,) * 35))
            assert run.backend.stats().step_count == 4
            assert run.backend.stats().computed_prompt_tokens == 35

    async def test_queue_is_bounded(self) -> None:
        async with running(max_batch_size=1, max_queue_size=2) as run:
            for key in range(3):
                run.backend.submit(item(key))
            with pytest.raises(QueueFull, match="3 sequences wait and at most 2 may"):
                run.backend.submit(item(9))

    async def test_stop_frees_blocks_between_steps(self) -> None:
        async with running(step_ms=3_600_000, max_batch_size=2) as run:
            for key in range(4):
                run.backend.submit(item(key, 100))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert run.backend.stats().running_sequences == 2
            run.backend.stop([0, 1, 2, 3, 77], pb.FINISH_REASON_STOPPED)
            assert run.backend.stats().used_blocks == 0
            for key in range(4):
                assert (await run.end(key)).reason == pb.FINISH_REASON_STOPPED
            run.backend.stop([0], pb.FINISH_REASON_STOPPED)

    async def test_stop_leaves_other_sequences_unchanged(self) -> None:
        async with running() as run:
            expected = {key: await run.generate(item(key, 200, prompt=(key,))) for key in range(9)}
        async with running() as run:
            for key in range(9):
                run.backend.submit(item(key, 200, prompt=(key,)))
            for key in (0, 4, 8):
                await run.until(lambda: len(run.tokens.get(1, [])) >= 20)
                run.backend.stop([key], pb.FINISH_REASON_CANCELLED)
            for key in range(9):
                await run.end(key)
                assert expected[key][: len(run.tokens[key])] == run.tokens[key]
                assert run.ends[key].generated_tokens == len(run.tokens[key])
            assert [len(run.tokens[key]) for key in (1, 2, 3, 5, 6, 7)] == [200] * 6

    async def test_perf_metrics_are_delivered_on_request(self) -> None:
        async with running(tokens_per_block=4) as run:
            await run.generate(item(1, prompt=(5,) * 8))
            await run.generate(item(2, prompt=(5,) * 8, perf_metrics=True))
            assert run.ends[1].perf_metrics is None
            metrics = run.ends[2].perf_metrics
            assert metrics is not None
            times = (
                metrics.arrival_time_ns,
                metrics.first_scheduled_time_ns,
                metrics.first_token_time_ns,
                metrics.last_token_time_ns,
            )
            assert sorted(times) == list(times)
            # The blocks of generated tokens come later.
            (at_start,) = run.starts.values()
            assert at_start.kv_cache_alloc_total_blocks == 1
            assert metrics.kv_cache_reused_blocks == 1
            assert metrics.kv_cache_alloc_total_blocks == 3
            metrics.last_token_time_ns = 0
            at_start.kv_cache_alloc_new_blocks = metrics.kv_cache_alloc_new_blocks
            at_start.kv_cache_alloc_total_blocks = metrics.kv_cache_alloc_total_blocks
            assert at_start == metrics


class TestRefusals:
    @pytest.mark.parametrize(
        ("wrong", "kind", "field", "value"),
        [
            (item(prompt=()), PromptEmpty, "", ""),
            (item(prompt=(), emitted=(5,)), PromptEmpty, "", ""),
            (item(max_tokens=None, prompt=(5,) * 100), PromptTooLong, "prompt", "100"),
            (item(prompt=(5, 32000)), TokenOutOfVocabulary, "prompt.token_ids", "32000"),
            (item(stopping=Stopping(end_id=32000)), InvalidField, "stopping.end_id", "32000"),
        ],
    )
    async def test_invalid_item_is_refused(
        self, wrong: Submission, kind: type[TrtmeshError], field: str, value: str
    ) -> None:
        async with running(max_sequence_tokens=100) as run:
            with pytest.raises(kind) as refused:
                run.backend.submit(wrong)
        assert (refused.value.field, refused.value.value) == (field, value)


class TestFaults:
    async def test_fail_item_fails_alone(self) -> None:
        async with running(fail_item=2) as run:
            for key in (1, 2, 3):
                run.backend.submit(item(key, 50))
            for key in (1, 2, 3):
                await run.end(key)
            assert [run.ends[key].reason for key in (1, 3)] == [pb.FINISH_REASON_LENGTH] * 2
            assert run.ends[2].reason == pb.FINISH_REASON_ERROR
            assert run.ends[2].error is not None

    async def test_broken_backend_reports_failure_once(self) -> None:
        async with running(break_after_steps=5) as run:
            run.backend.submit(item(1, 50))
            await run.until(lambda: run.failures)
            assert run.backend.stats().step_count == 5
        assert len(run.failures) == 1
        assert run.ends[1].reason == pb.FINISH_REASON_CANCELLED

    async def test_frozen_backend_stays_alive_without_steps(self) -> None:
        async with running(freeze_after_steps=5) as run:
            run.backend.submit(item(1, 50))
            await run.until(lambda: run.backend.stats().step_count == 5)
            run.backend.stop([1], pb.FINISH_REASON_CANCELLED)
            for _ in range(20):
                await asyncio.sleep(0)
            assert run.backend.stats().running_sequences == 1
            assert run.backend.stats().step_count == 5
