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
