"""What runs on a GPU alone prove. `pytest -m gpu --gpu cpu` tries these tests out on a CPU.

Most tests of this folder run on both: those that take the fixture `device`.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from e2e.mesh import ENDLESS, PATIENT, Mesh, running_mesh
from engine.torch.combinations import rows
from engine.torch.conftest import Device, ModelDir
from engine.torch.drafts.drafters import AnyLengths, Knowing, draft
from engine.torch.handoff_lab import workers
from engine.torch.harness import configure, running
from oracle import tiny_models
from transformers import PreTrainedModel
from trtmesh.v1 import generation_pb2 as pb

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

NEW_TOKENS = 12
FREE = configure(max_tokens=NEW_TOKENS, ignore_end_id=True)
ENGINES = ("engine-0", "engine-1")
MESH_TOKENS = 100
ROUNDING = 1.1
"""How much larger an error of rounding may be than one of equally many roundings in another order."""
START_SECONDS = 240.0
"""A start compiles kernels and captures graphs, beside as many tests as the machine has cores."""


@pytest.mark.parametrize("family", ["llama", "gemma3"])
async def test_cached_and_offloaded_prefixes_change_nothing(
    family: str, model_dir: ModelDir, gpu: Device
) -> None:
    folder = model_dir(family)
    prompts = [[*range(10 * stem + 5, 10 * stem + 45), 7 + stem] for stem in range(6)]
    model = tiny_models.reference_model(folder)
    expected = [tiny_models.greedy(model, prompt, NEW_TOKENS) for prompt in prompts]
    small = {"kv_cache_tokens": 160, "tokens_per_block": 4, "host_cache_bytes": 2**20}
    async with running(folder, **gpu, **small) as engine:
        first = [(await engine.run([prompt], FREE))[0] for prompt in prompts]
        assert engine.backend.stats().used_host_blocks > 0
        # The pool holds three, so each that is found again comes back from the host.
        before = engine.backend.stats().reused_blocks
        again = [(await engine.run([prompt], FREE))[0] for prompt in prompts]
        assert engine.backend.stats().reused_blocks > before
        assert first == again == expected


@pytest.mark.parametrize("drafts", ["off", "ngram"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
async def test_handed_over_tokens_are_those_of_generate(
    family: str, drafts: str, model_dir: ModelDir, gpu: Device
) -> None:
    """Also where either side has drafts, of which some hold."""
    folder = model_dir(family)
    prompts = [prompt for prompt in tiny_models.prompts(12) if len(prompt) > 1]
    model = tiny_models.reference_model(folder)
    settings, known = {**gpu, "drafts": drafts}, dict[tuple[int, int], list[int]]()
    async with workers(folder, settings, {**settings, "tokens_per_block": 8}) as pair:
        if drafts != "off":
            for engine in (pair.one, pair.other):
                draft(engine, Knowing(known, 0.7), AnyLengths(3))
        for prompt in prompts:
            known[0, 0] = tiny_models.greedy(model, prompt, NEW_TOKENS)
            lease = await pair.reserve(pair.one, pair.other, len(prompt))
            (before,) = await pair.one.ended(
                pair.one.submit(prompt, FREE, sender_lease_id=lease),
            )
            assert before.end
            assert before.end.reason == pb.FINISH_REASON_HANDOFF
            keys = await pair.decode(pair.other, lease, prompt, before.token_ids, FREE)
            (after,) = await pair.other.ended(keys)
            assert before.token_ids + after.token_ids == known[0, 0]
        assert (drafts == "off") == (not pair.other.backend.stats().accepted_draft_tokens)


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "llama", "mistral", "qwen3"])
async def test_logits_in_bfloat16_are_as_near_to_float32_as_those_of_transformers(
    family: str, model_dir: ModelDir, gpu: Device
) -> None:
    folder = model_dir(family)
    prompts = tiny_models.prompts(17)
    config = configure(max_tokens=NEW_TOKENS, ignore_end_id=True, generation_logits=True)
    async with running(folder, **{**gpu, "dtype": "bfloat16"}) as engine:
        with engine.gate.held():
            keys = [engine.submit(prompt, config)[0] for prompt in prompts]
        streams = await engine.ended(keys)
    reference, theirs = (
        torch.nn.Module.to(tiny_models.reference_model(folder, dtype), gpu["device"])
        for dtype in (torch.float32, torch.bfloat16)
    )
    # The same weights: what differs is the arithmetic.
    for exact, rounded in zip(reference.parameters(), theirs.parameters(), strict=True):
        exact.data.copy_(rounded.data)
    own_error = their_error = 0.0
    for prompt, stream in zip(prompts, streams, strict=True):
        found = np.concatenate(
            [rows(each.generation_logits) for each in stream.details if each.generation_logits]
        )
        expected = logits_after(reference, prompt, stream.token_ids)
        assert found.shape == expected.shape
        own_error += float(np.square(found - expected).sum())
        others = logits_after(theirs, prompt, stream.token_ids)
        their_error += float(np.square(others - expected).sum())
    print(f"{family}: {(own_error / their_error) ** 0.5:.3f} of the error of transformers")
    assert 0 < own_error <= ROUNDING**2 * their_error


def logits_after(
    model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]
) -> np.ndarray[Any, Any]:
    """Those of which the tokens were chosen, [tokens, vocabulary]."""
    ids = torch.tensor([[*prompt, *tokens]], device=model.device)
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits[0, len(prompt) - 1 : -1].float().cpu().numpy()


async def test_killed_process_leaves_its_items_and_its_memory_to_others(
    gpu: Device, tmp_path: Path
) -> None:
    folder = tiny_models.build(tmp_path / "llama", max_position_embeddings=2 * ENDLESS)
    prompts = tiny_models.prompts(6)
    model = tiny_models.reference_model(folder)
    expected = [tiny_models.greedy(model, prompt, MESH_TOKENS) for prompt in prompts]
    flags = (
        *("--model-dir", str(folder), "--torch-device", gpu["device"]),
        *("--torch-dtype", "float32", "--torch-threads", "1"),
        *("--torch-kv-cache-tokens", str(2 * ENDLESS * len(prompts))),
        *("--torch-limits-max-batch-size", str(gpu["max_batch_size"])),
        *("--handoff-transports", "grpc"),  # KV on a device is in no file to share.
    )

    async def two_engines(mesh: Mesh) -> None:
        await mesh.start_tokenizer(folder)
        for name in ENGINES:
            await mesh.start_engine(*flags, "--worker", name)
        await mesh.start_router("--placement-policy", "round_robin", *PATIENT)
        await mesh.ready(workers=2, tokenizers=1, seconds=START_SECONDS)

    async with running_mesh(start=two_engines) as mesh:
        reader = mesh.open(prompts, max_tokens=ENDLESS, ignore_end_id=True)
        await reader.until(lambda r: all(r.tokens(index) > 10 for index in range(len(prompts))))
        mesh.engines[0].signal(signal.SIGKILL)
        await mesh.counted("moved_sequences", len(prompts) / len(ENGINES))
        for item, ids in zip(await reader.stopped_at(MESH_TOKENS), expected, strict=True):
            assert item.error is None
            assert list(item.token_ids[:MESH_TOKENS]) == ids
        killed = mesh.engines[0]
        await killed.wait()
        port = int(killed.address.rpartition(":")[2])
        await mesh.start_engine(*flags, "--worker", "engine-again", port=port)
        await mesh.only_ready("engine-again", ENGINES[1], seconds=START_SECONDS)
        items = await mesh.client.complete(prompts, max_tokens=MESH_TOKENS, ignore_end_id=True)
        assert [list(item.token_ids) for item in items] == expected
        workers_of = {item.started.worker for item in items if item.started}
        assert workers_of == {"engine-again", ENGINES[1]}
