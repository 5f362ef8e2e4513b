"""Drafts by a second model with blocks of its own."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any, cast

import pytest
import torch
from engine.torch.conftest import Device
from engine.torch.drafts.drafters import AnyLengths, FixedLengths, draft
from engine.torch.harness import configure, running
from oracle import tiny_models
from transformers import AutoModelForCausalLM
from trtmesh.chassis.errors import ModelUnusable
from trtmesh.chassis.stopping import EndRule
from trtmesh.engine.backends.torch.cpu.device import ORDERING
from trtmesh.engine.backends.torch.drafts import drafting
from trtmesh.engine.backends.torch.drafts.drafter import Wish
from trtmesh.engine.backends.torch.drafts.patience import PatientDrafter
from trtmesh.engine.backends.torch.sampling.choice import Chooser
from trtmesh.engine.backends.torch.sampling.continuation import Continuation
from trtmesh.engine.backends.torch.sampling.token_rules import TokenRules

NEW = 40
CONFIGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "seed": 3},
    {"temperature": 1.3, "top_p": 0.9, "seed": 4},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.01, "seed": 5},
]
"""A model that drafts for itself draws the same tokens under these."""


def configs() -> list[Any]:
    return [configure(max_tokens=NEW, ignore_end_id=True, **values) for values in CONFIGS]


async def test_a_model_that_drafts_for_itself_is_always_right(llama: Path, device: Device) -> None:
    prompts = tiny_models.prompts(len(CONFIGS))
    async with running(llama) as engine:
        alone = [
            (await engine.ended(engine.submit(prompt, config)))[0].token_ids
            for prompt, config in zip(prompts, configs(), strict=True)
        ]
    async with running(llama, **device, drafts="model", draft_model=llama) as engine:
        counts = draft(engine, None, FixedLengths(4)).counts
        with engine.gate.held():
            keys = [
                engine.submit(prompt, config)[0]
                for prompt, config in zip(prompts, configs(), strict=True)
            ]
        streams = await engine.ended(keys)
        assert [stream.token_ids for stream in streams] == alone
        # A near tie may fall otherwise in a batch of another size.
        assert counts.accepted_tokens >= 0.98 * counts.draft_tokens
        # Almost five tokens a step.
        assert counts.drafts < len(CONFIGS) * (NEW // 5 + 3)
        drafter: Any = engine.backend._loaded.engine.drafting
        # After the ends of all sequences.
        drafter.drafter.propose(())
        assert not drafter.drafter.drafter._shadows
        assert len(drafter.drafter.drafter._free) == engine.info.total_blocks


@pytest.mark.parametrize(
    "temperature",
    [pytest.param(0.3, marks=pytest.mark.soak), 1.0, pytest.param(1.5, marks=pytest.mark.soak)],
)
async def test_drafts_hold_as_often_as_by_direct_simulation(
    llama: Path, tmp_path: Path, temperature: float
) -> None:
    """Both models' logits by transformers, and the draws of the sequence from each."""
    # Models of random weights agree on nothing: this one is the other with some noise.
    other = tiny_models.build(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(other)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.02)
    model.save_pretrained(other)
    config = configure(max_tokens=100, ignore_end_id=True, temperature=temperature, seed=2)
    async with running(llama, drafts="model", draft_model=other) as engine:
        counts = draft(engine, None, FixedLengths(1)).counts
        keys = [engine.submit(prompt, config)[0] for prompt in tiny_models.prompts(6)]
        streams = await engine.ended(keys)
    drafted = accepted = 0
    for prompt, stream in zip(tiny_models.prompts(6), streams, strict=True):
        tokens = [*prompt, *stream.token_ids]
        logits = model(torch.tensor([tokens])).logits[0].detach().float()
        place = len(prompt) + 1
        while place < len(tokens) - 1:
            rule = EndRule(config.stopping, (), len(prompt), len(tokens))
            row = Continuation(0, 0, 0, tokens[:place], rule, TokenRules(config))
            choice = Chooser(ORDERING).choose([row], logits[place - 1 : place])
            choice.read()
            held = choice.token_ids[0] == tokens[place]
            drafted, accepted, place = drafted + 1, accepted + held, place + 1 + held
    assert 0.2 < accepted / drafted < 0.98
    assert counts.draft_tokens == pytest.approx(drafted, rel=0.02)
    assert counts.accepted_tokens / counts.draft_tokens == pytest.approx(
        accepted / drafted, abs=0.02
    )


async def test_another_model_with_few_blocks_changes_nothing(
    llama: Path, device: Device, tmp_path: Path
) -> None:
    other = tiny_models.build(tmp_path, seed=7, num_hidden_layers=1)
    prompts = tiny_models.prompts(8)
    config = configure(max_tokens=NEW, ignore_end_id=True, temperature=0.8, seed=2)
    few = device | {"kv_cache_tokens": 192, "tokens_per_block": 4, "max_batch_size": 5}
    async with running(llama) as engine:
        alone = await engine.run(prompts, config)
    async with running(llama, drafts="model", draft_model=other, **few) as engine:
        draft(engine, None, AnyLengths(1))
        assert await engine.run(prompts, config) == alone
        stats = engine.backend.stats()
        assert stats.preemptions
        assert stats.draft_tokens > stats.accepted_draft_tokens
        assert not stats.draft_failures


async def test_both_models_share_the_memory_for_kv(llama: Path) -> None:
    async with running(llama, kv_cache_bytes=2**20) as engine:
        alone = engine.info.total_blocks
    async with running(llama, kv_cache_bytes=2**20, drafts="model", draft_model=llama) as engine:
        assert engine.info.total_blocks == alone // 2


class Hanging:
    """Implements Drafter: hangs until told to go on."""

    is_free = False
    seconds_apart = 0.0

    def __init__(self) -> None:
        self.asked = 0
        self.go_on = Event()

    def propose(self, wishes: Sequence[Wish]) -> list[list[int]]:
        self.asked += 1
        self.go_on.wait(60)
        return [[1]] * len(wishes)

    def forget(self, sequence: Any) -> None:
        """Nothing is kept."""


async def test_steps_do_not_wait_for_a_drafter_that_hangs(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "PAUSE_STEPS", 3)
    config = configure(max_tokens=NEW, ignore_end_id=True)
    prompts = tiny_models.prompts(2)
    async with running(llama) as engine:
        alone = await engine.run(prompts, config)
    async with running(llama, drafts="ngram") as engine:
        hanging = Hanging()
        patient = PatientDrafter(hanging, seconds=0.01)
        draft(engine, patient, FixedLengths(2))
        assert await engine.run(prompts, config) == alone
        assert (hanging.asked, engine.backend.stats().draft_failures) == (1, 1)
        hanging.go_on.set()
        await asyncio.to_thread(patient._asked.result)
        # On a busy machine no answer is as quick.
        patient._seconds = 60.0
        assert await engine.run(prompts, config) == alone
        stats = engine.backend.stats()
        assert stats.draft_tokens
        assert stats.draft_failures == 1


class Followed:
    """A sequence, as far as a patient drafter looks."""

    def __init__(self, key: int) -> None:
        self.key = key


async def test_a_drafter_that_hangs_keeps_no_later_sequences() -> None:
    hanging = Hanging()
    drafter = PatientDrafter(hanging, seconds=0.01)
    followed, *later = [cast(Any, Followed(key)) for key in range(100)]
    with pytest.raises(TimeoutError):
        drafter.propose([(followed, 1)])
    kept = [weakref.ref(each) for each in (followed, *later)]
    for each in (followed, *later):
        assert drafter.propose([(each, 1)]) == [()]
        drafter.forget(each)
    del each, followed, later
    assert [ref() is not None for ref in kept] == [True] + [False] * 99
    hanging.go_on.set()


PANIC = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
"""As libraries written in Rust raise them: no Exception."""


class Panicking(Hanging):
    """Implements Drafter: panics at the first guess, and at the end of every sequence."""

    def propose(self, wishes: Sequence[Wish]) -> list[list[int]]:
        self.asked += 1
        if self.asked == 1:
            raise PANIC("as planned")
        return [[1]] * len(wishes)

    def forget(self, sequence: Any) -> None:
        raise PANIC("as planned")


@pytest.mark.parametrize("apart", [False, True])
async def test_drafts_survive_a_panic_of_a_library(
    llama: Path, apart: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the thread of drafts and in the engine's: it is counted and logged, and drafts come again after a pause."""
    monkeypatch.setattr(drafting, "PAUSE_STEPS", 3)
    config = configure(max_tokens=NEW, ignore_end_id=True)
    prompts = tiny_models.prompts(2)
    async with running(llama) as engine:
        alone = await engine.run(prompts, config)
    async with running(llama, drafts="ngram") as engine:
        panicking = Panicking()
        draft(engine, PatientDrafter(panicking, 60) if apart else panicking, FixedLengths(2))
        assert await engine.run(prompts, config) == alone
        ends = 0 if apart else len(prompts)
        stats = engine.backend.stats()
        assert stats.draft_failures == 1 + ends
        assert stats.draft_tokens
        assert panicking.asked > 2
        assert await engine.run(prompts, config) == alone
        assert engine.backend.stats().draft_failures == 1 + 2 * ends
    told = [each.getMessage() for each in caplog.records if each.exc_info]
    assert sum("no drafts for 3 steps" in each for each in told) == 1
    assert any("failed at the end of a sequence" in each for each in told)


async def test_another_tokenizer_is_refused(llama: Path, tmp_path: Path) -> None:
    other = tiny_models.build(tmp_path)
    page = json.loads((other / "tokenizer.json").read_text("utf-8"))
    vocabulary = page["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(page), "utf-8")
    with pytest.raises(ModelUnusable, match="another tokenizer"):
        async with running(llama, drafts="model", draft_model=other):
            pass
