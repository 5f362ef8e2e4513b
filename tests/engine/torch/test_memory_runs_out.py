"""Memory that runs out while a model loads, or in a step: one error that says what to lower, and the rest goes on."""

from __future__ import annotations

import re
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.short_names import by_short_names
from engine.torch.conftest import ModelDir
from engine.torch.harness import Harness, configure, running
from engine.torch.test_engine_isolation import all_is_free
from oracle import tiny_models
from torch import Tensor
from trtmesh.chassis.errors import BackendFailed, ModelUnusable
from trtmesh.engine.backends.torch import loading
from trtmesh.engine.backends.torch.accelerator import (
    FRACTION,
    KINDS_OF_STEPS,
    WORKSPACES,
    Accelerator,
)
from trtmesh.engine.backends.torch.backend import TorchBackend
from trtmesh.engine.backends.torch.compute.device import Compute, Forward
from trtmesh.engine.backends.torch.compute.memory_probe import StepSize, probe
from trtmesh.engine.backends.torch.compute.paged_attention import PagedAttention
from trtmesh.engine.backends.torch.compute.runner import Runner
from trtmesh.engine.backends.torch.cpu.device import ORDERING, Cpu, fused_is_faster
from trtmesh.engine.backends.torch.memory.kvcache import BlockTables, KvCache
from trtmesh.engine.backends.torch.model.model import Model, load_model
from trtmesh.engine.backends.torch.sampling.choice import Chooser, LogitsChoice
from trtmesh.engine.backends.torch.sampling.continuation import Continuation
from trtmesh.engine.backends.torch.sequence import Chunk
from trtmesh.engine.backends.torch.settings import TorchSettings
from trtmesh.v1 import generation_pb2 as pb

CONFIGS = [
    configure(max_tokens=9, ignore_end_id=True),
    configure(max_tokens=9, ignore_end_id=True, temperature=1.2, seed=5),
    configure(max_tokens=9, ignore_end_id=True, repetition_penalty=1.3, log_probs=True),
]
PROMPTS = [prompt[:10] for prompt in tiny_models.prompts(7)]
# Keys and values of the tiny llama: 2 layers with 2 heads of 16 numbers, 4 bytes each.
BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4
SETTINGS: dict[str, Any] = {"kv_cache_tokens": 1024, "tokens_per_block": 4}


def out_of_memory(asked: str) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 8 GiB of which 1 MiB is free."
        " Process 7 has the rest."
    )


class NarrowRunner(Runner):
    """Has memory for steps of a few tokens, and, as graphs do, gives the logits of all steps in the same place."""

    def __init__(self, most_tokens: int, rows: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        model: Model = arguments[0]
        self.failed = 0
        self.released = 0
        self._most_tokens = most_tokens
        self._logits = torch.zeros(rows, model.vocabulary_size)
        own: Chooser = arguments[4]

        def choose(sequences: SequenceOf[Continuation], logits: Tensor) -> LogitsChoice:
            return own.choose(sequences, logits.clone())

        self.choose = choose
        self.release_memory = self._release

    def forward(
        self, chunks: SequenceOf[Chunk], written: Callable[[int], None] | None = None
    ) -> Forward:
        if sum(chunk.count for chunk in chunks) > self._most_tokens:
            self.failed += 1
            raise out_of_memory("2.00 GiB")
        forward = super().forward(chunks, written)
        place = self._logits[: len(forward.logits)]
        place.copy_(forward.logits)
        return Forward(forward.completing, place, forward.given)

    def _release(self) -> None:
        self.released += 1


class NarrowCpu(Cpu):
    """A CPU whose steps have memory for a few tokens."""

    def __init__(self, settings: TorchSettings, most_tokens: int) -> None:
        super().__init__(settings)
        self._most_tokens = most_tokens

    def compute(
        self,
        model: Model,
        cache: KvCache,
        tables: BlockTables,
        most_tokens: int,
        *,
        drafts: bool = False,
    ) -> Compute:
        if len(tables.rows) == 2:
            # The check of the model, which keeps the logits of several steps.
            return super().compute(model, cache, tables, most_tokens)
        attention = PagedAttention(
            cache, tables, model.compute_dtype, decode_copy_bytes=0, uses_fused=fused_is_faster
        )
        return NarrowRunner(
            self._most_tokens,
            len(tables.rows),
            *(model, cache, tables, attention, Chooser(ORDERING), lambda: None),
        )


def runner_of(engine: Harness) -> NarrowRunner:
    compute = engine.backend._loaded.engine._compute
    assert isinstance(compute, NarrowRunner)
    return compute


@pytest.mark.parametrize("most_tokens", [10, 23, 40])
async def test_a_step_without_memory_is_computed_in_parts(
    llama: Path, most_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts overwrite each other's logits, and still every sequence gets its own tokens."""
    configs = [CONFIGS[place % len(CONFIGS)] for place in range(len(PROMPTS))]

    async def run(engine: Harness) -> list[list[int]]:
        with engine.gate.held():
            keys = [
                engine.submit(prompt, config)[0]
                for prompt, config in zip(PROMPTS, configs, strict=True)
            ]
        return [stream.token_ids for stream in await engine.ended(keys)]

    async with running(llama, **SETTINGS) as engine:
        expected = await run(engine)
    monkeypatch.setattr(loading, "_device", lambda settings: NarrowCpu(settings, most_tokens))
    async with running(llama, **SETTINGS) as engine:
        assert await run(engine) == expected
        assert runner_of(engine).failed > 0
        assert runner_of(engine).released == runner_of(engine).failed
        assert engine.failures == []
        assert all_is_free(engine)


async def test_a_decoding_batch_without_memory_goes_on_in_parts(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(llama, **SETTINGS, max_step_tokens=2) as engine:
        expected = await engine.run(PROMPTS, CONFIGS[0])
    monkeypatch.setattr(loading, "_device", lambda settings: NarrowCpu(settings, 3))
    async with running(llama, **SETTINGS, max_step_tokens=2) as engine:
        assert await engine.run(PROMPTS, CONFIGS[0]) == expected
        assert runner_of(engine).failed > 0


async def test_a_sequence_without_memory_fails_alone_and_says_what_to_lower(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = list(range(10, 60))
    async with running(llama, **SETTINGS) as engine:
        expected = await engine.run(PROMPTS, CONFIGS[0])
    monkeypatch.setattr(loading, "_device", lambda settings: NarrowCpu(settings, 25))
    async with running(llama, **SETTINGS) as engine:
        for _ in range(3):
            with engine.gate.held():
                keys = [engine.submit(prompt, CONFIGS[0])[0] for prompt in PROMPTS[:4]]
                (failing,) = engine.submit(long, CONFIGS[0])
                keys += [engine.submit(prompt, CONFIGS[0])[0] for prompt in PROMPTS[4:]]
            assert [stream.token_ids for stream in await engine.ended(keys)] == expected
            (failed,) = await engine.ended([failing])
            assert failed.end
            assert failed.end.reason == pb.FINISH_REASON_ERROR
            assert isinstance(failed.end.error, BackendFailed)
            assert str(failed.end.error) == (
                "the model failed for lack of memory: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a"
                " total capacity of 8 GiB of which 1 MiB is free; lower the size of engine.torch.kv_cache,"
                " engine.torch.batching.max_step_tokens or engine.torch.limits.max_batch_size"
            )
        assert engine.failures == []
        assert all_is_free(engine)


async def refused(llama: Path, **settings: Any) -> str:
    """The problem with which a start fails."""
    backend = TorchBackend(llama, by_short_names(TorchSettings, threads=1, **settings))
    with pytest.raises(ModelUnusable) as caught:
        await backend.start(lambda _: None, lambda _: None)
    await backend.close()
    return str(caught.value)


async def test_a_cache_without_memory_names_its_settings(llama: Path) -> None:
    text = await refused(llama, kv_cache_tokens=64, host_cache_bytes=2**60)
    blocks = 2**60 // (16 * BYTES_PER_TOKEN)
    assert text.startswith(
        f"a KV cache of 4 blocks, and {blocks} on the host, does not fit into memory: "
    )
    assert text.endswith(
        "; lower engine.torch.kv_cache.tokens, bytes or free_memory_fraction, or engine.torch.host_cache.bytes"
    )


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("fit", "the model does not fit into memory: .*; lower .* another device, dtype or model"),
        ("default_cache_bytes", "a step does not fit .*; lower engine.torch.batching.max_step_tok"),
        ("compute", "what steps need beside the KV cache .*; lower engine.torch.kv_cache"),
    ],
)
async def test_a_load_without_memory_says_what_to_lower(
    llama: Path, method: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = getattr(Cpu, method)

    def fails(*arguments: Any, **_named: Any) -> Any:
        # The check of the model computes first, with two sequences.
        if method == "compute" and len(arguments[-2].rows) == 2:
            return own(*arguments)
        raise out_of_memory("2.00 GiB")

    monkeypatch.setattr(Cpu, method, fails)
    text = await refused(llama)
    assert re.match(words, text), text
    assert "Tried to allocate 2.00 GiB" in text


def loaded(folder: Path) -> tuple[Model, Cpu]:
    device = Cpu(by_short_names(TorchSettings, threads=1))
    return load_model(folder, torch.float32, device.name, device.fit), device


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_a_probed_step_has_the_logits_of_a_step(family: str, model_dir: ModelDir) -> None:
    model, device = loaded(model_dir(family))
    for tokens, rows in ((37, 5), (3, 8)):
        logits = probe(model, StepSize(tokens, rows), device.name)
        assert logits.shape == (min(tokens, rows), model.vocabulary_size)
        assert bool(torch.isfinite(logits).all())


class MeasuredDevice(Accelerator):
    """A device with a given amount of free memory, on which a token of a step takes 1 MiB."""

    free = 8 * 2**30

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.steps: list[StepSize] = []

    def peak_of(self, compute: Callable[[], object]) -> int:
        (size,) = [each for each in compute.args if isinstance(each, StepSize)]  # type: ignore[attr-defined]  # a partial
        self.steps.append(size)
        return int(size.tokens) << 20

    def free_memory(self) -> int:
        return self.free


def test_the_cache_leaves_what_steps_take(llama: Path) -> None:
    model, _ = loaded(llama)
    device = MeasuredDevice()
    spare = device.free - KINDS_OF_STEPS * 100 * 2**20 - WORKSPACES
    assert device.spare_memory(model, StepSize(100, 7)) == spare
    assert device.default_cache_bytes(model, StepSize(100, 7)) == int(FRACTION * spare)
    device.free -= spare
    words = "the model leaves 812 MiB free on cpu, and steps take 812 MiB, .*; lower engine.torch.batching"
    with pytest.raises(ModelUnusable, match=words):
        device.spare_memory(model, StepSize(100, 7))


def test_the_largest_step_has_a_token_of_every_sequence_besides(llama: Path) -> None:
    model, _ = loaded(llama)
    device = MeasuredDevice()
    names = {"max_step_tokens": 300, "max_batch_size": 20, "kv_cache_free_memory_fraction": 0.5}
    settings = by_short_names(TorchSettings, **names)
    sizes = loading.size(settings, model, device)
    assert device.steps == [StepSize(320, 20)]
    spare = device.free - KINDS_OF_STEPS * 320 * 2**20 - WORKSPACES
    assert sizes.blocks == spare // 2 // BYTES_PER_TOKEN // 16


def test_a_cache_of_a_set_size_is_not_measured(llama: Path) -> None:
    model, _ = loaded(llama)
    device = MeasuredDevice()
    sizes = loading.size(by_short_names(TorchSettings, kv_cache_tokens=64), model, device)
    assert (sizes.blocks, device.steps) == (4, [])
