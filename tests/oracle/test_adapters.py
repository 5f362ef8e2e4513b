"""Sequences of several adapters in one batch equal PEFT, each with its adapter alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.torch.harness import Harness, configure, running
from oracle import tiny_models
from peft import LoraConfig, PeftModel, get_peft_model
from trtmesh.chassis.errors import AdapterNotFound, AdaptersFull, InvalidField, InvalidRequest
from trtmesh.chassis.vocabulary import GenerationConfig, Lora, Tensor
from trtmesh.engine.adapters.arrays import write_arrays
from trtmesh.engine.adapters.lora import Lora as Weights
from trtmesh.engine.adapters.peft import read_peft
from trtmesh.engine.backend import BlocksStored
from trtmesh.v1 import generation_pb2 as pb

# PEFT reads a name that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

NEW_TOKENS = 10
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: Mapping[str, list[str]] = {
    "llama": LAYERS,
    "qwen2": LAYERS,
    "gemma2": LAYERS,
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
}
RANKS = {1: 4, 2: 16, 3: 64}
"""By the number of the adapter."""
PROMPTS = tiny_models.prompts(8)
BASE = 0
ON: dict[str, Any] = {"adapters_bytes": 1 << 30}


class Adapted:
    """A model with adapters, in PEFT and as Triton's clients send them."""

    def __init__(self, model_dir: Path, family: str, folder: Path) -> None:
        self.model_dir = model_dir
        self.base = tiny_models.reference_model(model_dir)
        model: Any = None
        self.arrays: dict[int, Lora] = {}
        for number, rank in RANKS.items():
            config = LoraConfig(
                r=rank, lora_alpha=2 * rank, target_modules=TARGETS[family], task_type="CAUSAL_LM",
                use_rslora=number == 2, fan_in_fan_out=family == "gpt2",
            )  # fmt: skip
            if model is None:
                model = get_peft_model(
                    tiny_models.reference_model(model_dir), config, adapter_name=_name(number)
                )
            else:
                model.add_adapter(_name(number), config)
        generator = torch.Generator().manual_seed(7)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) / 16
        model.save_pretrained(folder)
        for number in RANKS:
            weights = read_peft(folder / _name(number), 1 << 30)
            self.arrays[number] = sent(number, weights)
        self.model: PeftModel = model.eval()

    def greedy(self, number: int, prompt: Sequence[int]) -> list[int]:
        if number == BASE:
            return tiny_models.greedy(self.base, list(prompt), NEW_TOKENS)
        self.model.set_adapter(_name(number))
        model: Any = self.model
        return tiny_models.greedy(model, list(prompt), NEW_TOKENS)

    def logits(self, number: int, tokens: Sequence[int]) -> torch.Tensor:
        self.model.set_adapter(_name(number))
        with torch.inference_mode():
            rows: torch.Tensor = self.model(torch.tensor([list(tokens)])).logits[0]
        return rows


def _name(number: int) -> str:
    # Not the number: PEFT then takes it for that of a layer.
    return f"adapter{number}"


def sent(number: int, weights: Weights) -> Lora:
    """An adapter with its weights, as Triton's clients send it."""
    rows, config = write_arrays(weights, torch.float32)
    return Lora(
        id=number,
        weights=Tensor(pb.DATA_TYPE_FP32, tuple(rows.shape), rows.numpy().tobytes()),
        config=Tensor(pb.DATA_TYPE_INT32, tuple(config.shape), config.numpy().tobytes()),
    )


def by_number(number: int) -> Lora | None:
    return Lora(id=number) if number != BASE else None


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Adapted]:
    """The adapted model of a family."""

    def build(family: str) -> Adapted:
        model_dir = tiny_models.build(tmp_path_factory.mktemp(family), family)
        return Adapted(model_dir, family, tmp_path_factory.mktemp(f"{family}-lora"))

    return cache(build)


def asking(lora: Lora | None, **options: Any) -> GenerationConfig:
    return replace(configure(max_tokens=NEW_TOKENS, ignore_end_id=True, **options), lora=lora)


async def load(harness: Harness, each: Adapted) -> None:
    """Sends every adapter once."""
    for lora in each.arrays.values():
        (stream,) = await harness.ended(harness.submit([3], asking(lora)))
        assert stream.end is not None
        assert stream.end.error is None, stream.end.error


SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_step_tokens": 5, "tokens_per_block": 4},
    # Small enough for sequences to be paused and recomputed.
    {"kv_cache_tokens": 80, "tokens_per_block": 4, "max_step_tokens": 7},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=["whole", "chunks", "pauses"])
@pytest.mark.parametrize("family", TARGETS)
async def test_mixed_batch_equals_peft(
    adapted: Callable[[str], Adapted], family: str, settings: dict[str, Any]
) -> None:
    each = adapted(family)
    asked = [(index % (1 + len(RANKS)), prompt) for index, prompt in enumerate(PROMPTS)]
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
    each.model.set_adapter(_name(1))
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
    assert {event.adapter.id if event.adapter else 0 for event in stored} == {0, 1, 2, 3}


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
