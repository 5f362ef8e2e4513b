"""Sequences of several adapters in one batch equal PEFT, each with its adapter alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine.torch.harness import running
from oracle.adapters import (
    BASE,
    FAMILIES,
    NEW_TOKENS,
    NUMBERS,
    ON,
    PROMPTS,
    Adapted,
    asking,
    by_number,
    load,
)
from trtmesh.chassis.errors import AdapterNotFound, AdaptersFull, InvalidField, InvalidRequest
from trtmesh.chassis.vocabulary import Lora, Tensor
from trtmesh.engine.backend import BlocksStored
from trtmesh.v1 import generation_pb2 as pb

# PEFT reads a name that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def values(tensor: Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return torch.frombuffer(bytearray(tensor.data), dtype=torch.float32).view(tensor.shape)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_step_tokens": 5, "tokens_per_block": 4},
    # Small enough for sequences to be paused and recomputed.
    {"kv_cache_tokens": 80, "tokens_per_block": 4, "max_step_tokens": 7},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=["whole", "chunks", "pauses"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_mixed_batch_equals_peft(
    adapted: Callable[[str], Adapted], family: str, settings: dict[str, Any]
) -> None:
    each = adapted(family)
    asked = [(index % (1 + len(NUMBERS)), prompt) for index, prompt in enumerate(PROMPTS)]
    async with running(each.model_dir, **ON, **settings) as harness:
        await load(harness, each)
        with harness.gate.held():
            keys = [
                harness.submit(prompt, asking(by_number(number)))[0] for number, prompt in asked
            ]
        streams = await harness.ended(keys)
    expected = [each.greedy(number, prompt) for number, prompt in asked]
    assert [stream.token_ids for stream in streams] == expected
    differing = [each.greedy(BASE, prompt) for _, prompt in asked]
    assert sum(a != b for a, b in zip(expected, differing, strict=True)) >= len(asked) // 2


@pytest.mark.parametrize("settings", SETTINGS, ids=["whole", "chunks", "pauses"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_logits_of_a_mixed_batch_equal_peft(
    adapted: Callable[[str], Adapted], family: str, settings: dict[str, Any]
) -> None:
    each = adapted(family)
    asked = [(index % (1 + len(NUMBERS)), prompt) for index, prompt in enumerate(PROMPTS)]
    async with running(each.model_dir, **ON, **settings) as harness:
        await load(harness, each)
        with harness.gate.held():
            keys = [
                harness.submit(
                    prompt,
                    asking(by_number(number), context_logits=True, generation_logits=True),
                )[0]
                for number, prompt in asked
            ]
        streams = await harness.ended(keys)
        paused = harness.backend.stats().preemptions
    assert bool(paused) == ("kv_cache_tokens" in settings)
    for (number, prompt), stream in zip(asked, streams, strict=True):
        expected = each.logits(number, [*prompt, *stream.token_ids])[:-1]
        given = [part.context_logits for part in stream.prompts]
        given += [details.generation_logits for details in stream.details]
        found = torch.cat([values(tensor) for tensor in given])
        # The last row of the prompt chooses the first token, and comes with both.
        rows = [*range(len(prompt)), *range(len(prompt) - 1, len(expected))]
        torch.testing.assert_close(found, expected[rows], rtol=1e-5, atol=1e-5)


async def test_migration_between_two_workers_keeps_the_tokens(
    adapted: Callable[[str], Adapted],
) -> None:
    each, prompt = adapted("llama"), PROMPTS[1]
    expected = each.greedy(2, prompt)
    async with running(each.model_dir, **ON) as one, running(each.model_dir, **ON) as other:
        await load(other, each)
        for emitted in range(1, NEW_TOKENS):
            keys = other.submit(prompt, asking(by_number(2)), emitted=expected[:emitted])
            (stream,) = await other.ended(keys)
            assert expected[:emitted] + stream.token_ids == expected
        (stream,) = await one.ended(one.submit(prompt, asking(each.arrays[2])))
    assert stream.token_ids == expected


async def test_beams_and_several_sequences_use_the_adapter(
    adapted: Callable[[str], Adapted],
) -> None:
    each, prompt = adapted("llama"), PROMPTS[3]
    each.choose(1)
    generate: Any = each.model.generate
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), num_beams=3, num_return_sequences=3,
            max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=1,
        )  # fmt: skip
    expected = found[:, len(prompt) :].tolist()
    async with running(each.model_dir, **ON) as harness:
        beams = await harness.ended(
            harness.submit(prompt, asking(each.arrays[1], beam_width=3, num_return_sequences=3))
        )
        several = await harness.ended(
            harness.submit(prompt, asking(by_number(1), num_return_sequences=2))
        )
    assert sorted(stream.token_ids for stream in beams) == sorted(expected)
    assert [stream.token_ids for stream in several] == [each.greedy(1, prompt)] * 2


async def test_prefixes_are_reused_within_an_adapter_only(
    adapted: Callable[[str], Adapted],
) -> None:
    each, prompt = adapted("llama"), PROMPTS[1]
    async with running(each.model_dir, **ON, tokens_per_block=4) as harness:
        await load(harness, each)

        async def cached(lora: Lora | None) -> int:
            (stream,) = await harness.ended(harness.submit(prompt, asking(lora)))
            assert stream.end is not None
            return stream.end.cached_prompt_tokens

        assert [await cached(by_number(number)) for number in (0, 1, 2)] == [0, 0, 0]
        most = len(prompt) - 1
        assert [await cached(by_number(number)) for number in (0, 1, 2)] == [most] * 3
        # A new version under a number shares nothing with the old.
        assert await cached(replace(each.arrays[3], id=1)) == 0
        assert await cached(replace(each.arrays[1], id=1)) == most
    stored = [e for o in harness.outputs for e in o.kv_events if isinstance(e, BlocksStored)]
    assert {event.adapter.id if event.adapter else 0 for event in stored} == {BASE, *NUMBERS}


async def test_new_version_leaves_running_sequences_alone(
    adapted: Callable[[str], Adapted],
) -> None:
    each, prompt = adapted("llama"), PROMPTS[4]
    async with running(each.model_dir, **ON) as harness:
        await load(harness, each)
        with harness.gate.held():
            old = harness.submit(prompt, asking(by_number(1)))
            new = harness.submit(prompt, asking(replace(each.arrays[2], id=1)))
            later = harness.submit(prompt, asking(by_number(1)))
        streams = await harness.ended([*old, *new, *later])
        assert [s.token_ids for s in streams] == [each.greedy(n, prompt) for n in (1, 2, 2)]
        held = [each.adapter for each in harness.backend.adapters()]
    (two,) = [adapter.version for adapter in held if adapter.id == 2]
    assert len([adapter for adapter in held if adapter.id == 1]) == 2
    assert two in [adapter.version for adapter in held if adapter.id == 1]


async def test_more_adapters_than_a_step_takes_wait_for_each_other(
    adapted: Callable[[str], Adapted],
) -> None:
    each = adapted("llama")
    asked = [(1 + index % 3, prompt) for index, prompt in enumerate(PROMPTS)]
    async with running(each.model_dir, **ON, max_batch_adapters=1) as harness:
        await load(harness, each)
        with harness.gate.held():
            keys = [harness.submit(prompt, asking(by_number(n)))[0] for n, prompt in asked]
        streams = await harness.ended(keys)
    assert [s.token_ids for s in streams] == [each.greedy(n, prompt) for n, prompt in asked]


async def test_longest_unused_is_evicted_and_told_to_be_absent(
    adapted: Callable[[str], Adapted],
) -> None:
    each = adapted("llama")
    first = {number: replace(each.arrays[1], id=number) for number in range(1, 6)}
    async with running(each.model_dir, adapters_bytes=1 << 30) as harness:
        await harness.ended(harness.submit([3], asking(first[1])))
        one = harness.backend._loaded.adapters.size_bytes
    async with running(each.model_dir, adapters_bytes=3 * one) as harness:
        for number in (1, 2, 3):
            await harness.ended(harness.submit([3], asking(first[number])))
        await harness.ended(harness.submit([3], asking(by_number(1))))
        await harness.ended(harness.submit([3], asking(first[4])))
        assert [held.adapter.id for held in harness.backend.adapters()] == [3, 1, 4]
        with pytest.raises(AdapterNotFound) as unknown:
            harness.submit([3], asking(by_number(2)))
        assert (unknown.value.field, unknown.value.value) == ("lora.id", "2")


async def test_adapters_in_use_are_never_evicted(adapted: Callable[[str], Adapted]) -> None:
    each = adapted("llama")
    async with running(each.model_dir, adapters_bytes=1 << 30) as harness:
        await harness.ended(harness.submit([3], asking(each.arrays[1])))
        one = harness.backend._loaded.adapters.size_bytes
    async with running(each.model_dir, adapters_bytes=one) as harness:
        await harness.ended(harness.submit([3], asking(each.arrays[1])))
        with harness.gate.held():
            running_on = harness.submit(PROMPTS[1], asking(by_number(1)))
            other = harness.submit([3], asking(replace(each.arrays[1], id=2)))
        (kept,) = await harness.ended(running_on)
        (refused,) = await harness.ended(other)
        assert kept.token_ids == each.greedy(1, PROMPTS[1])
        assert refused.end is not None
        assert isinstance(refused.end.error, AdaptersFull)
        assert refused.end.error.limit_field == "adapters.bytes"
        # Free again once its item has ended.
        (later,) = await harness.ended(
            harness.submit(PROMPTS[1], asking(replace(each.arrays[1], id=2)))
        )
        assert later.token_ids == each.greedy(1, PROMPTS[1])


async def test_unusable_adapters_end_their_item_alone(adapted: Callable[[str], Adapted]) -> None:
    each, prompt = adapted("llama"), PROMPTS[1]
    good = each.arrays[1]
    assert good.weights is not None
    assert good.config is not None
    spoiled = bytearray(good.weights.data)
    spoiled[:4] = b"\0\0\xc0\x7f"
    bad = {
        "nan": replace(good, weights=replace(good.weights, data=bytes(spoiled))),
        "shape": replace(good, weights=replace(good.weights, shape=(1, len(spoiled) // 4))),
        "other_model": replace(
            good, config=replace(good.config, data=good.config.data.replace(b"\4", b"\7"))
        ),
    }
    async with running(each.model_dir, **ON) as harness:
        with harness.gate.held():
            fine = harness.submit(prompt, asking(good))
            keys = {
                name: harness.submit([3], asking(replace(lora, id=9))) for name, lora in bad.items()
            }
        for name, key in keys.items():
            (stream,) = await harness.ended(key)
            assert stream.end is not None, name
            assert isinstance(stream.end.error, InvalidRequest), name
        (stream,) = await harness.ended(fine)
        assert stream.token_ids == each.greedy(1, prompt)
        assert [held.adapter.id for held in harness.backend.adapters()] == [1]


@pytest.mark.parametrize(
    ("lora", "field"),
    [
        (Lora(name="unit-tests"), "lora.id"),
        (Lora(id=1, config=Tensor(pb.DATA_TYPE_INT32, (1, 3), bytes(12))), "lora.config"),
        (Lora(id=1, weights=Tensor(pb.DATA_TYPE_FP16, (1, 2), bytes(4))), "lora.weights"),
        (
            Lora(1, None, Tensor(pb.DATA_TYPE_INT32, (1, 1), bytes(4)),
                 Tensor(pb.DATA_TYPE_INT32, (1, 3), bytes(12))),
            "lora.weights.data_type",
        ),
    ],
    ids=["name", "config_alone", "weights_alone", "type"],
)  # fmt: skip
async def test_incomplete_adapters_are_refused_at_once(
    adapted: Callable[[str], Adapted], lora: Lora, field: str
) -> None:
    async with running(adapted("llama").model_dir, **ON) as harness:
        with pytest.raises(InvalidField) as refused:
            harness.submit([3], asking(lora))
        assert refused.value.field == field


async def test_rank_above_the_limit_is_refused(adapted: Callable[[str], Adapted]) -> None:
    each = adapted("llama")
    async with running(each.model_dir, **ON, max_rank=8) as harness:
        (stream,) = await harness.ended(harness.submit([3], asking(each.arrays[2])))
        assert stream.end is not None
        assert isinstance(stream.end.error, InvalidField)
        assert stream.end.error.limit_field == "adapters.max_rank"


async def test_stop_while_an_adapter_loads_releases_it(adapted: Callable[[str], Adapted]) -> None:
    each = adapted("llama")
    async with running(each.model_dir, **ON) as harness:
        with harness.gate.held():
            keys = harness.submit([3], asking(each.arrays[3]))
            harness.backend.stop(keys, pb.FINISH_REASON_CANCELLED)
        await harness.ended(keys)
        # Waits behind the load.
        await harness.ended(harness.submit([3], asking(by_number(3))))
        (current,) = harness.backend._loaded.adapters._held.values()
        assert current.holders == 0
