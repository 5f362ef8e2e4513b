"""Sequences of several adapters in one batch equal PEFT, each with its adapter alone."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.torch.harness import Stream, running
from oracle.adapters import (
    BASE,
    FAMILIES,
    NEW_TOKENS,
    NUMBERS,
    ON,
    PROMPTS,
    Adapted,
    answer,
    asking,
    load,
    load_all,
    named,
)
from trtmesh.chassis.adapter_content import FILE_NAMES, number_of
from trtmesh.chassis.errors import (
    AdapterNotFound,
    AdaptersFull,
    BackendFailed,
    InvalidField,
    InvalidRequest,
    ModelUnusable,
    UnsupportedField,
)
from trtmesh.chassis.vocabulary import Adapter, Lora, Tensor
from trtmesh.engine.adapters.lora import Place, Update
from trtmesh.engine.backend import AdapterLoad, BlocksStored
from trtmesh.engine.backends.torch.cpu import device
from trtmesh.engine.backends.torch.model.lora_layers import DeviceAdapters
from trtmesh.v1 import engine_pb2 as epb
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


ASKED = [(index % (1 + len(NUMBERS)), prompt) for index, prompt in enumerate(PROMPTS)]
"""Each prompt with the number of its adapter."""


async def mixed_batch(each: Adapted, settings: dict[str, Any], **options: Any) -> Sequence[Stream]:
    """Runs all of ASKED in one batch."""
    async with running(each.model_dir, **ON, **settings) as harness:
        await load_all(harness, each)
        with harness.gate.held():
            keys = [
                harness.submit(prompt, asking(each.by_number(number), **options))[0]
                for number, prompt in ASKED
            ]
        streams = await harness.ended(keys)
        pauses = harness.backend.stats().preemptions
    assert bool(pauses) == ("kv_cache_tokens" in settings)
    return streams


def in_settings(first: int) -> pytest.MarkDecorator:
    """Every family in one of the settings, and in all of them in `make soak`."""
    return pytest.mark.parametrize(
        ("family", "settings"),
        [
            pytest.param(
                family,
                settings,
                id=f"{family}-{name}",
                marks=[] if (turn - place - first) % len(SETTINGS) == 0 else pytest.mark.soak,
            )
            for turn, family in enumerate(FAMILIES)
            for place, (name, settings) in enumerate(
                zip(("whole", "chunks", "pauses"), SETTINGS, strict=True)
            )
        ],
    )


@in_settings(1)
async def test_mixed_batch_equals_peft(
    adapted: Callable[[str], Adapted], family: str, settings: dict[str, Any]
) -> None:
    each = adapted(family)
    streams = await mixed_batch(each, settings)
    expected = [each.greedy(number, prompt) for number, prompt in ASKED]
    assert [stream.token_ids for stream in streams] == expected
    differing = [each.greedy(BASE, prompt) for _, prompt in ASKED]
    assert sum(a != b for a, b in zip(expected, differing, strict=True)) >= len(ASKED) // 2


@in_settings(0)
async def test_logits_of_a_mixed_batch_equal_peft(
    adapted: Callable[[str], Adapted], family: str, settings: dict[str, Any]
) -> None:
    each = adapted(family)
    streams = await mixed_batch(each, settings, context_logits=True, generation_logits=True)
    for (number, prompt), stream in zip(ASKED, streams, strict=True):
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
        await load_all(other, each)
        for emitted in range(1, NEW_TOKENS):
            keys = other.submit(prompt, asking(each.by_number(2)), emitted=expected[:emitted])
            (stream,) = await other.ended(keys)
            assert expected[:emitted] + stream.token_ids == expected
        await load(one, 2, each.contents[2])
        (stream,) = await one.ended(one.submit(prompt, asking(each.by_number(2))))
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
        await load(harness, 1, each.contents[1])
        beams = await harness.ended(
            harness.submit(prompt, asking(each.by_number(1), beam_width=3, num_return_sequences=3))
        )
        several = await harness.ended(
            harness.submit(prompt, asking(each.by_number(1), num_return_sequences=2))
        )
    assert sorted(stream.token_ids for stream in beams) == sorted(expected)
    assert [stream.token_ids for stream in several] == [each.greedy(1, prompt)] * 2


async def test_prefixes_are_reused_within_an_adapter_only(
    adapted: Callable[[str], Adapted],
) -> None:
    each, prompt = adapted("llama"), PROMPTS[1]
    async with running(each.model_dir, **ON, tokens_per_block=4) as harness:
        await load_all(harness, each)

        async def cached(lora: Lora | None) -> int:
            (stream,) = await harness.ended(harness.submit(prompt, asking(lora)))
            assert stream.end is not None
            return stream.end.cached_prompt_tokens

        assert [await cached(each.by_number(number)) for number in (0, 1, 2)] == [0, 0, 0]
        most = len(prompt) - 1
        assert [await cached(each.by_number(number)) for number in (0, 1, 2)] == [most] * 3
        # A new version under a number shares nothing with the old.
        await load(harness, 1, each.contents[3])
        assert await cached(named(1, each.contents[3])) == 0
        assert await cached(each.by_number(1)) == most
    stored = [e for o in harness.outputs for e in o.kv_events if isinstance(e, BlocksStored)]
    names = {(e.adapter.id, e.adapter.version) if e.adapter else None for e in stored}
    versions = {number: each.contents[number].version for number in NUMBERS}
    assert names == {None, (1, versions[1]), (2, versions[2]), (1, versions[3])}


async def test_new_version_leaves_running_sequences_alone(
    adapted: Callable[[str], Adapted],
) -> None:
    each, prompt = adapted("llama"), PROMPTS[4]
    async with running(each.model_dir, **ON) as harness:
        await load_all(harness, each)
        await load(harness, 1, each.contents[2])
        with harness.gate.held():
            old = harness.submit(prompt, asking(each.by_number(1)))
            new = harness.submit(prompt, asking(named(1, each.contents[2])))
            harness.backend.unload_adapter(1, each.contents[1].version, unpin=False)
        streams = await harness.ended([*old, *new])
        assert [s.token_ids for s in streams] == [each.greedy(n, prompt) for n in (1, 2)]
        await harness.until(lambda: len(harness.backend.adapters()) == len(NUMBERS))
        held = [state.adapter for state in harness.backend.adapters()]
        assert Adapter(1, version=each.contents[1].version) not in held


async def test_more_adapters_than_slots_wait_for_each_other(
    adapted: Callable[[str], Adapted],
) -> None:
    each = adapted("llama")
    asked = [(1 + index % 3, prompt) for index, prompt in enumerate(PROMPTS)]
    async with running(each.model_dir, **ON, max_batch_adapters=1) as harness:
        await load_all(harness, each)
        with harness.gate.held():
            keys = [harness.submit(prompt, asking(each.by_number(n)))[0] for n, prompt in asked]
        streams = await harness.ended(keys)
        assert [s.token_ids for s in streams] == [each.greedy(n, prompt) for n, prompt in asked]
        stats = harness.backend.stats()
        assert (stats.adapter_slots, stats.free_adapter_slots) == (1, 0)


async def test_longest_unused_is_evicted_and_told_to_be_absent(
    adapted: Callable[[str], Adapted],
) -> None:
    each = adapted("llama")
    content = each.contents[1]
    async with running(each.model_dir, adapters_host_bytes=1 << 30) as harness:
        one = (await answer(harness, 1, content)).size_bytes
    async with running(each.model_dir, adapters_host_bytes=3 * one) as harness:
        for number in (1, 2, 3):
            await load(harness, number, content)
        await harness.ended(harness.submit([3], asking(named(1, content))))
        await load(harness, 4, content)
        assert [held.adapter.id for held in harness.backend.adapters()] == [3, 1, 4]
        with pytest.raises(AdapterNotFound) as unknown:
            harness.submit([3], asking(named(2, content)))
        assert (unknown.value.field, unknown.value.value) == ("lora.id", "2")
        told = [held for output in harness.outputs for held in output.adapters]
        absent = [held.adapter.id for held in told if held.place == epb.ADAPTER_PLACE_ABSENT]
        assert absent == [2]


async def test_adapters_in_use_are_never_evicted(adapted: Callable[[str], Adapted]) -> None:
    each = adapted("llama")
    content = each.contents[1]
    async with running(each.model_dir, adapters_host_bytes=1 << 30) as harness:
        one = (await answer(harness, 1, content)).size_bytes
    async with running(each.model_dir, adapters_host_bytes=one) as harness:
        await load(harness, 1, content)
        with harness.gate.held():
            running_on = harness.submit(PROMPTS[1], asking(named(1, content)))
            harness.backend.load_adapter(AdapterLoad(Adapter(2, version=content.version), content))
        (kept,) = await harness.ended(running_on)
        assert kept.token_ids == each.greedy(1, PROMPTS[1])
        told = [held for output in harness.outputs for held in output.adapters]
        (refused,) = [held.error for held in told if held.adapter.id == 2]
        assert isinstance(refused, AdaptersFull)
        assert refused.limit_field == "adapters.host_bytes"
        # Free again once its item has ended.
        await load(harness, 2, content)
        (later,) = await harness.ended(harness.submit(PROMPTS[1], asking(named(2, content))))
        assert later.token_ids == each.greedy(1, PROMPTS[1])


async def test_unusable_adapters_leave_nothing_behind(adapted: Callable[[str], Adapted]) -> None:
    each, prompt = adapted("llama"), PROMPTS[1]
    good, rows = each.contents[1], each.contents[3]
    nan = bytearray(good.weights)
    nan[-4:] = b"\0\0\xc0\x7f"
    dora = json.dumps(json.loads(good.config) | {"use_dora": True}).encode()
    bad = {
        "nan": replace(good, weights=bytes(nan)),
        "truncated": replace(good, weights=good.weights[:-1]),
        "wrong_rank": replace(good, config=good.config.replace(b'"r": 4', b'"r": 5')),
        "dora": replace(good, config=dora),
        "arrays": replace(rows, config=rows.config[:-4] + bytes(4)),
        "format": replace(good, format=pb.ADAPTER_FORMAT_ARRAYS),
    }
    async with running(each.model_dir, **ON) as harness:
        await load(harness, 1, good)
        with harness.gate.held():
            fine = harness.submit(prompt, asking(named(1, good)))
        for number, (name, content) in enumerate(bad.items(), start=10):
            state = await answer(harness, number, content)
            assert isinstance(state.error, InvalidRequest | UnsupportedField), name
            assert state.error.field
            assert state.place == epb.ADAPTER_PLACE_ABSENT
        (stream,) = await harness.ended(fine)
        assert stream.token_ids == each.greedy(1, prompt)
        assert [held.adapter.id for held in harness.backend.adapters()] == [1]


async def test_weights_beyond_the_type_of_the_activations_are_refused_by_layer(
    adapted: Callable[[str], Adapted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In slots, an infinite weight spoils the rows of other adapters: 0 times infinity is NaN."""
    each, prompt = adapted("llama"), PROMPTS[1]
    good = each.contents[1]
    large = replace(good, weights=good.weights[:-4] + struct.pack("<f", 1e5))
    monkeypatch.setattr(device, "lacks_instructions", lambda _: False)
    async with running(each.model_dir, **ON, dtype="float16") as harness:
        await load(harness, 1, good)
        alone = (await harness.ended(harness.submit(prompt, asking(named(1, good)))))[0].token_ids
        error = (await answer(harness, 2, large)).error
        assert isinstance(error, InvalidRequest)
        assert error.field.startswith("adapter.layer_")
        assert error.limit == "finite in float16"
        (again,) = await harness.ended(harness.submit(prompt, asking(named(1, good))))
        assert again.token_ids == alone
        assert [held.adapter.id for held in harness.backend.adapters()] == [1]
    async with running(each.model_dir, **ON) as harness:
        await load(harness, 2, large)


async def test_adapter_whose_copy_to_the_device_fails(
    adapted: Callable[[str], Adapted], monkeypatch: pytest.MonkeyPatch
) -> None:
    each, prompt, copy = adapted("llama"), PROMPTS[1], DeviceAdapters.load
    broken, fails = each.contents[2], True

    def failing(device: DeviceAdapters, slot: int, updates: Mapping[Place, Update]) -> None:
        if fails and max(update.rank for update in updates.values()) == 16:
            raise RuntimeError("out of memory")
        copy(device, slot, updates)

    monkeypatch.setattr(DeviceAdapters, "load", failing)
    async with running(each.model_dir, **ON, max_batch_adapters=1) as harness:
        # Ahead of its items, it takes the only slot and gives it back.
        await load(harness, 2, broken)
        await load(harness, 1, each.contents[1])
        with harness.gate.held():
            lost = harness.submit(prompt, asking(named(2, broken)))
            fine = harness.submit(prompt, asking(named(1, each.contents[1])))
        failed, kept = await harness.ended([*lost, *fine])
        assert failed.end is not None
        assert isinstance(failed.end.error, BackendFailed)
        assert "out of memory" in failed.end.error.message
        assert kept.token_ids == each.greedy(1, prompt)
        fails = False
        (later,) = await harness.ended(harness.submit(prompt, asking(named(2, broken))))
        assert later.token_ids == each.greedy(2, prompt)


async def test_adapter_of_another_model_is_refused(adapted: Callable[[str], Adapted]) -> None:
    async with running(adapted("gpt2").model_dir, **ON) as harness:
        state = await answer(harness, 1, adapted("llama").contents[1])
        assert isinstance(state.error, InvalidRequest)
        assert harness.backend.adapters() == []


async def test_rank_above_the_limit_is_refused(adapted: Callable[[str], Adapted]) -> None:
    each = adapted("llama")
    async with running(each.model_dir, **ON, max_rank=8) as harness:
        state = await answer(harness, 2, each.contents[2])
        assert isinstance(state.error, InvalidField)
        assert state.error.limit_field == "adapters.max_rank"


async def test_stopped_sequences_release_the_adapter(adapted: Callable[[str], Adapted]) -> None:
    each = adapted("llama")
    async with running(each.model_dir, **ON, max_batch_adapters=1) as harness:
        await load_all(harness, each)
        with harness.gate.held():
            first = harness.submit([3], asking(each.by_number(1)))
            waiting = harness.submit([3], asking(each.by_number(2)))
            harness.backend.stop([*first, *waiting], pb.FINISH_REASON_CANCELLED)
        await harness.ended([*first, *waiting])
        for number in NUMBERS:
            harness.backend.unload_adapter(number, "", unpin=False)
        await harness.until(lambda: not harness.backend.adapters())


async def test_absent_prefetch_directory_fails_the_start_by_name(
    adapted: Callable[[str], Adapted], tmp_path: Path
) -> None:
    with pytest.raises(ModelUnusable, match=r"adapters.prefetch_directory .*absent"):
        async with running(
            adapted("llama").model_dir, **ON, prefetch_directory=tmp_path / "absent"
        ):
            pass


async def test_prefetched_adapters_are_there_at_start(
    adapted: Callable[[str], Adapted], tmp_path: Path
) -> None:
    each, prompt = adapted("llama"), PROMPTS[1]
    for name, number in (("7", 1), ("prose", 3)):
        content = each.contents[number]
        (tmp_path / name).mkdir()
        files = FILE_NAMES[content.format]
        (tmp_path / name / files.config).write_bytes(content.config)
        (tmp_path / name / files.weights).write_bytes(content.weights)
    (tmp_path / "broken").mkdir()
    prose = FILE_NAMES[each.contents[3].format]
    for name in (str(2**64), "spoiled"):
        shutil.copytree(tmp_path / "prose", tmp_path / name)
    (tmp_path / "spoiled" / prose.config).write_bytes(b"\x93NUMPY\x01\x00\x02\x00({")
    async with running(each.model_dir, **ON, prefetch_directory=tmp_path) as harness:
        states = {held.adapter.name: held for held in harness.backend.adapters()}
        assert states["7"].adapter == Adapter(7, "7", each.contents[1].version)
        assert states["prose"].adapter.id == number_of("prose")
        for name in ("broken", "spoiled", str(2**64)):
            assert states[name].error is not None
        (stream,) = await harness.ended(harness.submit(prompt, asking(named(7, each.contents[1]))))
        assert stream.token_ids == each.greedy(1, prompt)
