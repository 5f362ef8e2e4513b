"""A fault ends its own item; a broken model ends the backend with a reason.

The faults are real: a module that raises for an input, an impossible allocation, NaN weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.torch.conftest import Device
from engine.torch.harness import Harness, configure, module_of, running
from log_lines import LogLine
from oracle import tiny_models
from trtmesh.chassis.errors import BackendFailed, WorkerLost
from trtmesh.chassis.stopping import End, EndRule
from trtmesh.engine.backend import StepOutput
from trtmesh.engine.backends.torch.beams.decoding import BeamDecoding
from trtmesh.engine.backends.torch.sampling import choice
from trtmesh.engine.backends.torch.sampling.choice import adjusted
from trtmesh.engine.backends.torch.sequence import Sequence
from trtmesh.v1 import generation_pb2 as pb

MARKED = 250
SHORT = configure(max_tokens=6, ignore_end_id=True)
READ = configure(max_tokens=6, ignore_end_id=True, prompt_log_probs=True)
"""On every device, a prompt that is read is computed operation by operation, where the faults of `raising` are met."""
PROMPTS = [[token for token in prompt if token != MARKED] for prompt in tiny_models.prompts(5)]


def internals(engine: Harness) -> Any:
    return engine.backend._loaded.engine


@contextmanager
def raising(engine: Harness, fault: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Lets `fault` see the token ids of every forward before they are embedded."""
    module = module_of(engine).get_input_embeddings()

    def hook(_: Any, positional: tuple[torch.Tensor]) -> None:
        fault(positional[0])

    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def all_is_free(engine: Harness) -> bool:
    stats, scheduler = engine.backend.stats(), internals(engine).scheduler
    return (
        stats.used_blocks == stats.running_sequences == stats.waiting_sequences == 0
        and stats.pending_prompt_tokens == 0
        and not scheduler.has_work
        and scheduler.tables.free_slots == engine.info.max_batch_size
        and not scheduler.tables.rows.any()
    )


def refuse_marked(ids: torch.Tensor) -> None:
    if (ids == MARKED).any():
        raise RuntimeError("this input is too much")


def take_all_memory(ids: torch.Tensor) -> None:
    if (ids == MARKED).any():
        torch.empty(2**61, dtype=torch.uint8, device=ids.device)


@pytest.mark.parametrize(
    ("fault", "words"), [(refuse_marked, "this input is too much"), (take_all_memory, "memory")]
)
@pytest.mark.parametrize("position", [0, 3])
async def test_a_fault_of_one_input_ends_that_item_alone(
    llama: Path, fault: Callable[[torch.Tensor], None], words: str, position: int, device: Device
) -> None:
    bad = [7] * position + [MARKED, 5]
    async with running(llama, max_step_tokens=12, kv_cache_tokens=512, **device) as engine:
        expected = await engine.run(PROMPTS, SHORT)
        with raising(engine, fault):
            keys = [engine.submit(prompt, SHORT)[0] for prompt in PROMPTS[:3]]
            (failing,) = engine.submit(bad, READ)
            keys += [engine.submit(prompt, SHORT)[0] for prompt in PROMPTS[3:]]
            assert [stream.token_ids for stream in await engine.ended(keys)] == expected
            (failed,) = await engine.ended([failing])
            assert failed.end
            assert failed.end.reason == pb.FINISH_REASON_ERROR
            assert isinstance(failed.end.error, BackendFailed)
            assert words in str(failed.end.error)
            assert not failed.token_ids
        assert all_is_free(engine)
        assert engine.failures == []


def without_memory_for_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(sequences: list[Sequence], logits: torch.Tensor) -> torch.Tensor:
        if any(sequence.tokens[0] == MARKED for sequence in sequences):
            torch.empty(2**61, dtype=torch.uint8)
        return adjusted(sequences, logits)

    monkeypatch.setattr(choice, "adjusted", fault)


def without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    end_after = EndRule.end_after

    def fault(rule: EndRule, tokens: list[int]) -> End | None:
        if tokens[0] == MARKED and len(tokens) >= 5:
            raise RuntimeError("no end can be found")
        return end_after(rule, tokens)

    monkeypatch.setattr(EndRule, "end_after", fault)


def without_telling(monkeypatch: pytest.MonkeyPatch) -> None:
    deliver = BeamDecoding.deliver

    def fault(decoding: BeamDecoding, output: StepOutput) -> None:
        if decoding.first.tokens[0] == MARKED:
            raise RuntimeError("nothing can be delivered")
        deliver(decoding, output)

    monkeypatch.setattr(BeamDecoding, "deliver", fault)


@pytest.mark.parametrize(
    ("fault", "width"),
    [
        (without_memory_for_logits, 1),
        (without_memory_for_logits, 3),
        (without_an_end, 1),
        (without_an_end, 3),
        (without_telling, 3),
    ],
)
async def test_a_fault_after_the_model_ends_that_item_alone(
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None],
    width: int,
) -> None:
    config = configure(max_tokens=6, ignore_end_id=True, beam_width=width, repetition_penalty=1.1)
    async with running(llama, kv_cache_tokens=1024) as engine:
        expected = await engine.run(PROMPTS[:2], config) + await engine.run(PROMPTS[:2], SHORT)
        fault(monkeypatch)
        keys = [engine.submit(prompt, config)[0] for prompt in PROMPTS[:2]]
        failing = engine.submit([MARKED, 5, 6], config)
        keys += [engine.submit(prompt, SHORT)[0] for prompt in PROMPTS[:2]]
        assert [stream.token_ids for stream in await engine.ended(keys)] == expected
        for failed in await engine.ended(failing):
            assert failed.end
            assert failed.end.reason == pb.FINISH_REASON_ERROR
            assert isinstance(failed.end.error, BackendFailed)
            assert failed.end.generated_tokens == len(failed.token_ids) < 6
        assert engine.failures == []
        assert all_is_free(engine)
        monkeypatch.undo()
        assert await engine.run(PROMPTS[:2], config) == expected[:2]


async def test_log_lines_of_a_failed_item_have_its_request_id(
    llama: Path, monkeypatch: pytest.MonkeyPatch, logged: Callable[[], list[LogLine]]
) -> None:
    async with running(llama, kv_cache_tokens=512) as engine:
        engine.submit([5], SHORT)
        with raising(engine, refuse_marked):
            await engine.ended([*engine.submit([7, MARKED], SHORT)])
        without_an_end(monkeypatch)
        await engine.ended([*engine.submit([MARKED], SHORT, batch_index=2)])
    about_one = [line for line in logged() if line.message.startswith("item")]
    assert about_one == [
        LogLine("request-1", "item 0: the model failed"),
        LogLine("request-2", "item 2: the item cannot continue"),
    ]


async def test_inputs_that_fail_one_after_another_do_not_end_the_engine(llama: Path) -> None:
    async with running(llama, kv_cache_tokens=512) as engine:
        expected = await engine.run(PROMPTS[:1], SHORT)
        with raising(engine, refuse_marked):
            for _ in range(5):
                (failed,) = await engine.ended(engine.submit([MARKED], SHORT))
                assert failed.end
                assert failed.end.reason == pb.FINISH_REASON_ERROR
            assert await engine.run(PROMPTS[:1], SHORT) == expected
        assert engine.failures == []
        assert all_is_free(engine)
        # The check of the model has restored the null block.
        assert not engine.backend._loaded.cache.pool[0].any()


async def test_a_step_too_large_for_the_memory_is_computed_in_parts(llama: Path) -> None:
    async with running(llama, kv_cache_tokens=512) as engine:
        expected = await engine.run(PROMPTS, SHORT)
        longest = max(len(prompt) for prompt in PROMPTS)

        def fault(ids: torch.Tensor) -> None:
            if ids.numel() > longest:
                torch.empty(2**61, dtype=torch.uint8)

        with raising(engine, fault):
            assert await engine.run(PROMPTS, SHORT) == expected
        assert engine.failures == []


@pytest.mark.parametrize("kind", [RuntimeError, BaseException])
async def test_broken_model_ends_all_sequences_and_reports_once(
    kind: type[BaseException], llama: Path
) -> None:
    """A panic of a library in Rust is no Exception."""

    def fault(_: torch.Tensor) -> None:
        raise kind("the device is gone")

    async with running(llama, max_batch_size=2) as engine:
        with raising(engine, fault):
            with engine.gate.held():
                keys = [engine.submit([5], SHORT)[0] for _ in range(7)]
            for stream in await engine.ended(keys):
                assert stream.end
                assert stream.end.reason == pb.FINISH_REASON_ERROR
                # Not BackendFailed, the items' own fault: another worker may continue them.
                assert isinstance(stream.end.error, WorkerLost)
                assert "the device is gone" in str(stream.end.error)
            await engine.until(lambda: engine.failures)
        assert len(engine.failures) == 1
        with pytest.raises(WorkerLost):
            engine.submit([5], SHORT)
        assert all_is_free(engine)


async def test_weights_turned_nan_end_all_sequences(llama: Path, device: Device) -> None:
    async with running(llama, **device) as engine:
        await engine.run(PROMPTS[:2], SHORT)
        with torch.inference_mode():
            module_of(engine).get_input_embeddings().weight.fill_(torch.nan)
        with engine.gate.held():
            keys = [engine.submit(prompt, SHORT)[0] for prompt in PROMPTS]
        for stream in await engine.ended(keys):
            assert stream.end
            assert stream.end.reason == pb.FINISH_REASON_ERROR
            assert isinstance(stream.end.error, WorkerLost)
            assert not stream.token_ids
        await engine.until(lambda: engine.failures)
        assert all_is_free(engine)
