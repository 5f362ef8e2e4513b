"""Results of the library become streams: one object that changes, trimmed words, cut limits, and whole beams."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
from engine.backend_lab import SECONDS, Lab, config_of, lab
from engine.tensorrt_llm.harness import (
    DEMO,
    PROMPT,
    VOCABULARY,
    backend,
    executor,
    last_call,
    last_params,
    run,
    submit,
    tokens,
    watch,
)
from process_constants import patch
from trtmesh.chassis.errors import (
    InvalidField,
    InvalidRequest,
    QueueFull,
    TrtmeshError,
    UnsupportedField,
)
from trtmesh.chassis.vocabulary import GuidedDecoding, Tensor
from trtmesh.engine.backend import PromptDetails, StepOutput, Submission
from trtmesh.engine.backends.tensorrt_llm import sequences
from trtmesh.engine.backends.tensorrt_llm.details import prompt_details
from trtmesh.v1 import generation_pb2 as pb

NEW: dict[str, Any] = {"max_tokens": 12, "ignore_end_id": True}
DRAWN: dict[str, Any] = {**NEW, "temperature": 1.0, "seed": 5}


async def test_a_stream_ends_at_its_length(release: str) -> None:
    async with lab(backend()) as on:
        (outcome,) = await run(on, **NEW)
        assert len(outcome.token_ids) == 12
        assert outcome.end is not None
        assert outcome.end.reason == pb.FINISH_REASON_LENGTH
        assert outcome.end.generated_tokens == 12
        assert last_call()["streaming"] is True


async def test_calls_are_fresh_and_need_no_tokenizer(release: str) -> None:
    """The stand-in refuses parameters that were used before, and a call without an end id."""
    async with lab(backend()) as on:
        assert await tokens(on, **NEW) == await tokens(on, **NEW)
        assert last_params().end_id == -1
        await tokens(on, max_tokens=3)
        # From generation_config.json of the model.
        assert last_params().end_id == 0
        assert last_params().detokenize is False


async def test_the_end_id_ends_and_is_told(release: str) -> None:
    async with lab(backend()) as on:
        plain = await tokens(on, **NEW)
        (outcome,) = await run(on, max_tokens=12, end_id=plain[3])
        assert outcome.token_ids == plain[:4]
        assert outcome.end is not None
        assert outcome.end.reason == pb.FINISH_REASON_END_ID
        assert outcome.end.stop_token_ids == (plain[3],)


async def test_further_end_ids_of_the_model_end_too(release: str, tmp_path: Any) -> None:
    """The library adds them only where it has a tokenizer."""
    async with lab(backend()) as on:
        plain = await tokens(on, **NEW)
    model = tmp_path / "model"
    model.mkdir()
    for file in DEMO.iterdir():
        (model / file.name).symlink_to(file)
    (model / "generation_config.json").unlink()
    (model / "generation_config.json").write_text(f'{{"eos_token_id": [1, {plain[5]}]}}')
    async with lab(backend(model)) as on:
        (outcome,) = await run(on, max_tokens=12)
        assert outcome.token_ids == plain[:6]
        assert outcome.end is not None
        assert outcome.end.reason == pb.FINISH_REASON_END_ID
        assert outcome.end.stop_token_ids == (plain[5],)
        assert last_params().end_id == 1
        assert last_params().stop_token_ids == [plain[5]]


@pytest.mark.parametrize("length", [1, 2, 3])
async def test_a_stop_word_of_ids_ends_with_all_its_tokens(release: str, length: int) -> None:
    async with lab(backend()) as on:
        plain = await tokens(on, **NEW)
        word = plain[4 : 4 + length]
        (outcome,) = await run(on, **NEW, stop_token_ids=[[7, 7], word])
        assert outcome.token_ids == plain[: 4 + length]
        assert outcome.end is not None
        assert outcome.end.reason == pb.FINISH_REASON_STOP_WORD
        assert outcome.end.stop_token_ids == tuple(word)
        await eventually_idle()


async def test_the_library_gets_sequences_of_ids_where_it_takes_them(target: str) -> None:
    async with lab(backend()) as on:
        await tokens(on, **NEW, stop_token_ids=[[7], [8, 9]], bad_token_ids=[[10], [11, 12]])
        params = last_params()
        assert params._get_stop_words() == [[7], [8, 9]]
        assert params._get_bad_words() == [[10], [11, 12]]
        assert params.include_stop_str_in_output is True


async def test_a_release_without_sequences_of_bad_ids_refuses_them(newer: str) -> None:
    async with lab(backend()) as on:
        await tokens(on, **NEW, bad_token_ids=[[10]])
        with pytest.raises(TrtmeshError, match="bad_token_ids") as refused:
            on.submit(PROMPT, config_of({**NEW, "bad_token_ids": [[11, 12]]}))
        assert refused.value.reason == "UNSUPPORTED_FIELD"


async def test_a_stop_word_that_begins_in_the_prompt_is_no_stop_word(release: str) -> None:
    async with lab(backend()) as on:
        plain = await tokens(on, **NEW)
        assert await tokens(on, **NEW, stop_token_ids=[[PROMPT[-1], plain[0]]]) == plain


async def test_words_and_end_ids_wait_for_the_minimum(release: str) -> None:
    async with lab(backend()) as on:
        plain = await tokens(on, **NEW)
        options = {**NEW, "stop_token_ids": [plain[2:4], plain[8:10]], "min_tokens": 6}
        assert await tokens(on, **options) == plain[:10]
        banned = await tokens(on, max_tokens=12, end_id=plain[2], min_tokens=6)
        assert plain[2] not in banned[:6]
        assert len(banned) > 6


async def test_too_many_tokens_are_cut_to_what_a_sequence_may_have(release: str) -> None:
    """The library would clamp without a word."""
    async with lab(backend(limits={"max_sequence_tokens": 20})) as on:
        (outcome,) = await run(on, max_tokens=500, ignore_end_id=True)
        assert len(outcome.token_ids) == 20 - len(PROMPT)
        assert last_params().max_tokens == 20 - len(PROMPT)


async def test_sampled_sequences_of_an_item_keep_their_own_counters(release: str) -> None:
    async with lab(backend()) as on:
        outcomes = await run(on, **DRAWN, num_return_sequences=3)
        assert [len(each.token_ids) for each in outcomes] == [12] * 3
        assert len({tuple(each.token_ids) for each in outcomes}) == 3
        again = await run(on, **DRAWN, num_return_sequences=3)
        assert [each.token_ids for each in again] == [each.token_ids for each in outcomes]


async def test_greedy_sequences_of_an_item_share_one_output(release: str) -> None:
    """The library refuses several."""
    async with lab(backend()) as on:
        plain = await tokens(on, **NEW)
        outcomes = await run(on, **NEW, num_return_sequences=3)
        assert [each.token_ids for each in outcomes] == [plain] * 3


async def test_the_best_of_several_come_whole(release: str) -> None:
    """The library sorts them by their sums and numbers them anew."""
    async with lab(backend()) as on:
        outcomes = await run(on, **DRAWN, num_return_sequences=2, best_of=4)
        assert last_call()["streaming"] is False
        assert [len(each.token_ids) for each in outcomes] == [12] * 2
        everything = await run(on, **DRAWN, num_return_sequences=4)
        drawn = [each.token_ids for each in everything]
        assert all(each.token_ids in drawn for each in outcomes)


async def test_items_of_a_request_draw_differently(release: str) -> None:
    async with lab(backend()) as on:
        config = config_of(DRAWN)
        seeds = []
        for batch_index in (0, 1):
            await submit(on, PROMPT, config, batch_index=batch_index)
            seeds.append(last_params().seed)
        assert seeds[0] == 5
        assert seeds[1] != 5


async def test_beams_are_told_whole(release: str) -> None:
    async with lab(backend(limits={"max_beam_width": 3})) as on:
        steps: list[StepOutput] = []
        watch(on, steps.append)
        outcomes = await run(on, **NEW, beam_width=3)
        assert [len(each.token_ids) for each in outcomes] == [12] * 3
        assert len({tuple(each.token_ids) for each in outcomes}) == 3
        offsets = [offset for step in steps for offset in step.token_offsets]
        assert len(offsets) > 3
        assert set(offsets) == {0}
        executor_beams = executor().calls[-1]["sampling_params"]
        assert (executor_beams.use_beam_search, executor_beams.best_of) == (True, 3)


async def test_a_beam_width_that_the_library_does_not_take_names_the_field(release: str) -> None:
    async with lab(backend(limits={"max_beam_width": 4})) as on:
        outcomes = await run(on, **NEW, beam_width=2)
        for each in outcomes:
            assert each.end is not None
            assert isinstance(each.end.error, InvalidField)
            assert each.end.error.field == "beam_search.beam_width"


async def test_log_probs_follow_the_tokens(release: str) -> None:
    async with lab(backend()) as on:
        (outcome,) = await run(on, **NEW, log_probs=True, top_log_probs=2)
        log_probs = [each for details in outcome.details for each in details.log_probs]
        top = [each for details in outcome.details for each in details.top_log_probs]
        assert len(log_probs) == len(top) == 12
        assert all(len(ids) == len(values) == 2 for ids, values in top)
        assert [values[0] for _, values in top] == log_probs
        assert outcome.end is not None
        assert outcome.end.cumulative_log_prob == pytest.approx(sum(log_probs))
        (alone,) = await run(on, **NEW, log_probs=True)
        assert [each for details in alone.details for each in details.log_probs] == log_probs


async def test_logits_come_whole_and_in_the_type_asked_for(release: str) -> None:
    async with lab(backend(options={"gather_generation_logits": True})) as on:
        options: dict[str, Any] = {"logits_data_type": pb.DATA_TYPE_BF16, "generation_logits": True}
        (outcome,) = await run(
            on, **NEW, **options, context_logits=True, prompt_log_probs=True, top_log_probs=2
        )
        (details,) = outcome.details
        (prompt,) = outcome.prompts
        assert prompt.context_logits is not None
        assert details.generation_logits is not None
        check_logits(prompt.context_logits, PROMPT)
        check_logits(details.generation_logits, outcome.token_ids)
        assert len(prompt.log_probs) == len(PROMPT) - 1
        assert [ids[0] for ids, _ in prompt.top_log_probs] == PROMPT[:-1]
        # Reused tokens would have no logits.
        assert len(last_call()["cache_salt"]) == 32


async def test_log_probs_of_a_long_prompt_are_refused_for_their_logits(
    release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library makes them from all logits of the prompt, in FP32."""
    limit = (len(PROMPT) - 1) * VOCABULARY * 4
    patch(monkeypatch, max_logits_bytes=limit)
    async with lab(backend()) as on:
        asked = {**NEW, "prompt_log_probs": True}
        with pytest.raises(InvalidField, match=f"at most {limit}; shorten") as refused:
            on.submit(PROMPT, config_of(asked))
        assert refused.value.field == "output.prompt_log_probs"
        (outcome,) = await run(on, PROMPT[1:], **asked)
        assert len(outcome.prompts[0].log_probs) == len(PROMPT) - 2


async def test_a_sequence_may_be_stopped_while_logits_are_computed(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread computes them, and the loop alone changes the item."""
    computes, may_end = threading.Event(), threading.Event()

    def waits(*given: Any) -> PromptDetails:
        computes.set()
        assert may_end.wait(SECONDS)
        return prompt_details(*given)

    monkeypatch.setattr(sequences, "prompt_details", waits)
    asked = {**NEW, "context_logits": True, "generation_logits": True, "num_return_sequences": 2}
    async with lab(backend(options={"gather_generation_logits": True})) as on:
        keys = on.submit(PROMPT, config_of(asked))
        assert await asyncio.to_thread(computes.wait, SECONDS)
        on.backend.stop(keys[:1], pb.FINISH_REASON_STOPPED)
        (stopped,) = await on.ended(keys[:1])
        may_end.set()
        (whole,) = await on.ended(keys[1:])
        assert (stopped.token_ids, stopped.prompts, stopped.details) == ([], [], [])
        assert len(whole.token_ids) == NEW["max_tokens"]
        assert [each.key for each in whole.prompts] == keys[1:]
        (details,) = whole.details
        assert details.generation_logits is not None
        assert details.generation_logits.shape == (NEW["max_tokens"], VOCABULARY)


def check_logits(logits: Tensor, tokens: list[int]) -> None:
    """The stand-in makes each token the likeliest of its own row."""
    import torch

    assert logits.data_type == pb.DATA_TYPE_BF16
    assert logits.shape == (len(tokens), VOCABULARY)
    rows = torch.frombuffer(bytearray(logits.data), dtype=torch.bfloat16).view(*logits.shape)
    assert rows.argmax(-1).tolist() == tokens


async def test_metrics_have_the_library_s_blocks_and_the_worker_s_clock(release: str) -> None:
    async with lab(backend(options={"kv_cache_config": {"tokens_per_block": 4}})) as on:
        await tokens(on, **NEW)
        (outcome,) = await run(on, **NEW, perf_metrics=True)
        assert outcome.end is not None
        metrics = outcome.end.perf_metrics
        assert metrics is not None
        assert metrics.kv_cache_reused_blocks == 2
        assert metrics.kv_cache_alloc_new_blocks == 1
        assert metrics.first_scheduled_time_ns - metrics.arrival_time_ns == 250_000
        assert metrics.arrival_time_ns < metrics.first_token_time_ns <= metrics.last_token_time_ns
        assert outcome.end.cached_prompt_tokens == 8


async def test_a_stopped_item_ends_at_once_and_is_aborted(release: str) -> None:
    async with lab(backend()) as on:
        keys = on.submit(PROMPT, config_of({"ignore_end_id": True}))
        await on._until(lambda: len(on.outcomes[keys[0]].token_ids) > 3)
        on.backend.stop(keys, pb.FINISH_REASON_STOPPED)
        (outcome,) = await on.ended(keys)
        assert outcome.end is not None
        assert outcome.end.reason == pb.FINISH_REASON_STOPPED
        assert outcome.end.generated_tokens == len(outcome.token_ids)
        await eventually_idle()
        # An ended key is ignored.
        on.backend.stop(keys, pb.FINISH_REASON_STOPPED)
        assert on.backend.stats().running_sequences == 0


async def test_one_stopped_sequence_leaves_the_others(release: str) -> None:
    async with lab(backend()) as on:
        asked = {**DRAWN, "max_tokens": 200, "num_return_sequences": 2}
        keys = on.submit(PROMPT, config_of(asked))
        await on._until(lambda: len(on.outcomes[keys[0]].token_ids) > 3)
        on.backend.stop(keys[:1], pb.FINISH_REASON_STOPPED)
        outcomes = await on.ended(keys)
        ends = [each.end for each in outcomes]
        assert [end.reason if end else None for end in ends] == [
            pb.FINISH_REASON_STOPPED,
            pb.FINISH_REASON_LENGTH,
        ]
        assert len(outcomes[1].token_ids) == 200


async def eventually_idle() -> None:
    """Waits until the library computes nothing: an abort reached it."""
    async with asyncio.timeout(60):
        while executor()._running or executor()._waiting:  # noqa: ASYNC110 - another thread sets no event
            await asyncio.sleep(0.005)


async def test_a_migrated_greedy_item_continues_its_tokens(release: str) -> None:
    async with lab(backend()) as on:
        plain = await tokens(on, **NEW)
        emitted = plain[:5]
        outcome = await submit(on, [*PROMPT, *emitted], config_of(NEW), emitted_tokens=5)
        # Of these tests' lab, which knows no emitted tokens, the first five are missing.
        assert outcome.token_ids == plain[5:]
        assert last_params().max_tokens == 7
        assert outcome.end is not None
        assert outcome.end.generated_tokens == 12


async def test_a_migrated_item_finds_a_word_that_began_elsewhere(release: str) -> None:
    async with lab(backend()) as on:
        plain = await tokens(on, **NEW)
        config = config_of({**NEW, "stop_token_ids": [plain[4:7]]})
        outcome = await submit(on, [*PROMPT, *plain[:5]], config, emitted_tokens=5)
        assert outcome.token_ids == plain[5:7]
        assert outcome.end is not None
        assert outcome.end.reason == pb.FINISH_REASON_STOP_WORD


async def test_a_guide_is_refused_for_an_item_that_began_elsewhere(release: str) -> None:
    """The library would begin the grammar anew."""
    async with lab(backend(options={"guided_decoding_backend": "xgrammar"})) as on:
        config = replace(config_of(NEW), guided_decoding=GuidedDecoding(pb.GUIDE_TYPE_JSON))
        calls = len(executor().calls)
        with pytest.raises(UnsupportedField) as refused:
            await submit(on, [*PROMPT, 5], config, emitted_tokens=1)
        assert refused.value.field == "guided_decoding"
        assert len(executor().calls) == calls


async def test_a_migrated_item_that_is_complete_calls_nothing(release: str) -> None:
    async with lab(backend()) as on:
        plain = await tokens(on, **NEW)
        calls = len(executor().calls)
        outcome = await submit(on, [*PROMPT, *plain], config_of(NEW), emitted_tokens=12)
        assert outcome.end is not None
        assert outcome.end.reason == pb.FINISH_REASON_LENGTH
        assert len(executor().calls) == calls


async def test_a_continued_draw_has_another_seed(release: str) -> None:
    """The library numbers its draws from 0 in every request, so the old ones would come again."""
    async with lab(backend()) as on:
        await submit(on, [*PROMPT, 50], config_of(DRAWN), emitted_tokens=1)
        assert last_params().seed != 5
        assert on.backend.stats().generated_tokens == 11


async def test_a_full_queue_refuses(release: str) -> None:
    limits = {"max_batch_size": 2, "max_queue_size": 1}
    async with lab(backend(limits=limits)) as on:
        config = config_of({"ignore_end_id": True})
        keys = [on.submit(PROMPT, config)[0] for _ in range(3)]
        with pytest.raises(QueueFull):
            on.backend.submit(Submission((99,), "r", 0, 0, PROMPT, 0, config))
        on.backend.stop(keys, pb.FINISH_REASON_STOPPED)
        await on.ended(keys)
        await tokens(on, **NEW)


async def test_the_library_s_own_refusal_is_the_caller_s(release: str) -> None:
    async with lab(backend()) as on:
        with pytest.raises(InvalidRequest, match="top_p"):
            refuse_top_p(on)
        assert on.backend.stats().running_sequences == 0
        await tokens(on, **NEW)


def refuse_top_p(on: Lab) -> None:
    """Submits what only the library knows to be wrong."""
    from dataclasses import replace

    config = config_of(DRAWN)
    wrong = replace(config.sampling, top_p=2.0)
    fields = config.fields_set | {"sampling.top_p"}
    item = replace(config, sampling=wrong, fields_set=fields)
    on.backend.submit(Submission((99,), "r", 0, 0, PROMPT, 0, item))


async def test_a_long_salt_is_refused(release: str) -> None:
    """Some releases check it late."""
    async with lab(backend()) as on:
        with pytest.raises(InvalidField, match="salt"):
            on.submit(PROMPT, config_of({**NEW, "kv_cache": pb.KvCacheConfig(salt="ä" * 129)}))
