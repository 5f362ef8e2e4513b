"""The stand-in fails where the library would: a test that passes over it says something."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

import pytest
from engine.tensorrt_llm.harness import DEMO
from pydantic import ValidationError


def construct(**arguments: Any) -> Any:
    from tensorrt_llm import LLM

    return LLM(model=str(DEMO), skip_tokenizer_init=True, **arguments)


async def constructed(**arguments: Any) -> Any:
    return await asyncio.to_thread(construct, **arguments)


def params(**values: Any) -> Any:
    from tensorrt_llm import SamplingParams

    return SamplingParams(**{"end_id": 2, "max_tokens": 2, **values})


async def test_unknown_names_are_refused(release: str) -> None:
    from tensorrt_llm.llmapi import KvCacheConfig

    with pytest.raises(ValueError, match="LLM got invalid argument: unheard_of"):
        await constructed(unheard_of=1)
    with pytest.raises(TypeError, match="unheard_of"):
        params(unheard_of=1)
    with pytest.raises(ValidationError, match="unheard_of"):
        KvCacheConfig(unheard_of=1)
    llm = await constructed()
    with pytest.raises(TypeError, match="unheard_of"):
        llm.generate_async(inputs=[1, 2], sampling_params=params(), unheard_of=1)
    await asyncio.to_thread(llm.shutdown)


async def test_releases_differ_as_published(target: str) -> None:
    from tensorrt_llm.llmapi import KvCacheConfig
    from tensorrt_llm.lora_helper import LoraConfig

    KvCacheConfig(onboard_blocks=True)
    LoraConfig(max_lora_rank=8)
    with pytest.raises(ValidationError):
        KvCacheConfig(kv_events_config=None)
    llm = await constructed()
    with pytest.raises(TypeError, match="priority"):
        llm.generate_async(inputs=[1, 2], sampling_params=params(), priority=0.5)
    assert not hasattr(llm, "get_kv_cache_capacity")
    await asyncio.to_thread(llm.shutdown)


async def test_the_newer_release_has_lost_names(newer: str) -> None:
    from tensorrt_llm.llmapi import KvCacheConfig

    with pytest.raises(ValidationError):
        KvCacheConfig(onboard_blocks=True)
    for name in ("tensorrt_llm.lora_helper", "tensorrt_llm._tensorrt_engine"):
        with pytest.raises(ImportError):
            importlib.import_module(name)
    assert not hasattr(params(), "_stop_word_ids")


async def test_parameters_are_used_once_and_by_keyword(release: str) -> None:
    llm = await constructed()
    fresh = params()
    result = llm.generate_async(inputs=[1, 2], sampling_params=fresh, streaming=True)
    with pytest.raises(AssertionError, match="used again"):
        llm.generate_async(inputs=[1, 2], sampling_params=fresh)
    with pytest.raises(AssertionError, match="by keyword"):
        llm.generate_async([1, 2], params())
    with pytest.raises(ValueError, match="tokenizer is required"):
        llm.generate_async(inputs=[1, 2], sampling_params=params(end_id=None))
    with pytest.raises(RuntimeError, match="stop word ids"):
        llm.generate_async(inputs=[1, 2], sampling_params=params(stop=["end"]))
    seen = [each async for each in result]
    assert len({id(each) for each in seen}) == 1, "each step yields the same object"
    await asyncio.to_thread(llm.shutdown)
    with pytest.raises(RuntimeError, match="shutting down"):
        llm.generate_async(inputs=[1, 2], sampling_params=params())


async def test_a_result_made_outside_the_loop_cannot_be_iterated(release: str) -> None:
    llm = await constructed()

    def call() -> Any:
        return llm.generate_async(inputs=[1, 2], sampling_params=params())

    result = await asyncio.to_thread(call)
    with pytest.raises(AssertionError, match="event loop was not present"):
        await result
    with pytest.raises(AssertionError, match="on the event loop"):
        construct()
    with pytest.raises(AssertionError, match="not properly instantiated"):
        (await constructed()).get_kv_cache_events_async()
    await asyncio.to_thread(llm.shutdown)


async def test_stop_words_are_cut_off_unless_kept(target: str) -> None:
    llm = await constructed()
    whole = await llm.generate_async(inputs=[5, 6], sampling_params=params(max_tokens=6))
    tokens = list(whole.outputs[0].token_ids)
    for kept in (False, True):
        given = params(max_tokens=6, stop_token_ids=tokens[2:3], include_stop_str_in_output=kept)
        result = await llm.generate_async(inputs=[5, 6], sampling_params=given)
        assert result.outputs[0].token_ids == tokens[: 3 if kept else 2]
        assert result.outputs[0].stop_reason == tokens[2]
    await asyncio.to_thread(llm.shutdown)


async def test_several_greedy_sequences_and_missing_adapters_are_refused(target: str) -> None:
    from tensorrt_llm.executor import LoRARequest

    with pytest.raises(ValueError, match="Greedy"):
        params(n=2)
    with pytest.raises(ValueError, match="does not exist"):
        LoRARequest("prose", 1)


@pytest.mark.parametrize(
    ("kind", "values", "problem"),
    [
        ("KvCacheConfig", {"free_gpu_memory_fraction": 1.5}, "free_gpu_memory_fraction"),
        ("KvCacheConfig", {"max_attention_window": []}, "max_attention_window"),
        ("PeftCacheConfig", {"lora_prefetch_dir": "x"}, "lora_prefetch_dir"),
        ("NGramDecodingConfig", {"max_matching_ngram_size": 2}, "max_draft_len"),
        (
            "NGramDecodingConfig",
            {"max_draft_len": 3, "max_matching_ngram_size": 0},
            "max_matching_ngram_size",
        ),
        ("DraftTargetDecodingConfig", {"max_draft_len": 3}, "speculative_model"),
    ],
)
def test_configurations_are_validated(
    release: str, kind: str, values: dict[str, Any], problem: str
) -> None:
    made = importlib.import_module("tensorrt_llm._stand_in.strict").made
    with pytest.raises(ValidationError, match=problem):
        made(kind)(**values)


async def test_missing_arguments_are_refused(release: str) -> None:
    from tensorrt_llm import LLM

    with pytest.raises(TypeError, match="model"):
        await asyncio.to_thread(LLM, skip_tokenizer_init=True)
    llm = await constructed()
    with pytest.raises(TypeError, match="inputs"):
        llm.generate_async(sampling_params=params())
    await asyncio.to_thread(llm.shutdown)


async def test_ids_are_cumulative_and_those_of_others_stale(release: str) -> None:
    llm = await constructed()
    given = params(max_tokens=4, n=2, temperature=1.0, seed=3, ignore_eos=True)
    lengths: list[tuple[int, ...]] = []
    stale = 0
    async for step in llm.generate_async(inputs=[5, 6], sampling_params=given, streaming=True):
        before = lengths[-1] if lengths else (0, 0)
        lengths.append(tuple(len(each.token_ids) for each in step.outputs))
        changed = [now > then for now, then in zip(lengths[-1], before, strict=True)]
        assert sum(changed) == 1, "one step concerns one sequence"
        (other,) = [each for each, is_new in zip(step.outputs, changed, strict=True) if not is_new]
        stale += bool(other.token_ids_diff)
    assert lengths[-1] == (4, 4)
    assert stale
    await asyncio.to_thread(llm.shutdown)


async def test_too_many_tokens_are_clamped(release: str) -> None:
    llm = await constructed(max_seq_len=10)
    given = params(max_tokens=500, ignore_eos=True)
    result = await llm.generate_async(inputs=[5, 6], sampling_params=given)
    assert len(result.outputs[0].token_ids) == 8
    assert result.outputs[0].finish_reason == "length"
    await asyncio.to_thread(llm.shutdown)


async def test_each_row_of_statistics_is_given_once(release: str) -> None:
    llm = await constructed(enable_iter_perf_stats=True)
    assert [row async for row in llm.get_stats_async(0.01)] == [], "before the first request"
    await llm.generate_async(inputs=[5, 6], sampling_params=params(max_tokens=5, ignore_eos=True))
    rows = [row["iter"] async for row in llm.get_stats_async(0.2)]
    assert rows == [1, 2, 3, 4, 5]
    assert [row async for row in llm.get_stats_async(0.01)] == []
    await asyncio.to_thread(llm.shutdown)


async def test_a_prompt_for_another_worker_is_not_finished(release: str) -> None:
    from tensorrt_llm.llmapi import CacheTransceiverConfig, DisaggregatedParams

    transfer = CacheTransceiverConfig(backend="UCX")
    llm = await constructed(cache_transceiver_config=transfer, disable_overlap_scheduler=True)
    half = await llm.generate_async(
        inputs=[5, 6],
        sampling_params=params(max_tokens=9, ignore_eos=True),
        disaggregated_params=DisaggregatedParams(request_type="context_only"),
    )
    (output,) = half.outputs
    assert (output.finish_reason, len(output.token_ids)) == ("not_finished", 1)
    assert output.disaggregated_params.first_gen_tokens == output.token_ids
    await asyncio.to_thread(llm.shutdown)


async def test_an_aborted_request_ends_as_cancelled(release: str) -> None:
    llm = await constructed()
    result = llm.generate_async(
        inputs=[5, 6], sampling_params=params(max_tokens=9999, ignore_eos=True), streaming=True
    )
    await anext(result)
    result.abort()
    async for _ in result:
        pass
    assert [each.finish_reason for each in result.outputs] == ["cancelled"]
    await asyncio.to_thread(llm.shutdown)


async def test_a_dead_engine_fails_every_later_use_of_a_result(newer: str) -> None:
    from tensorrt_llm.executor.utils import EngineDeadError

    llm = await constructed()
    result = llm.generate_async(inputs=[5, 6], sampling_params=params(max_tokens=9999))
    await asyncio.to_thread(llm._executor.die)
    for _ in range(2):
        with pytest.raises(EngineDeadError):
            await result
