"""`num_draft_tokens` of `tensorrt_llm_bls`: a second model of the mesh drafts, seen in the metrics alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from compat.triton import Response, Triton
from e2e.mesh import DEMO_DRAFT, PATIENT, Mesh, eventually, running_mesh
from safetensors.torch import load_file, save_file
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.asyncio(loop_scope="module")

DRAFT = "guesses"
"""The model's name."""
NOISE = 0.1
"""Of its weights, as a share of their deviation: it guesses some tokens and misses others."""
TOKENS = 30
ASKED = {"text_input": "def fibonacci(n):\n    ", "max_tokens": TOKENS, "end_id": -1}
DRAFTED = {"num_draft_tokens": 4, "return_perf_metrics": True}
MODELS = {
    "ensemble": {"template": "ensemble"},
    "tensorrt_llm": {"template": "tensorrt_llm"},
    "tensorrt_llm_bls": {"template": "tensorrt_llm_bls", "draft_model": DRAFT},
    "lost_bls": {"template": "tensorrt_llm_bls", "draft_model": "nobody"},
}


def noisy(folder: Path) -> Path:
    """A model near the one that it drafts for."""
    for file in DEMO_DRAFT.iterdir():
        if file.name != "model.safetensors":
            (folder / file.name).symlink_to(file)
    generator = torch.Generator().manual_seed(0)
    weights = load_file(DEMO_DRAFT / "model.safetensors")
    for weight in weights.values():
        noise = torch.randn(weight.shape, generator=generator)
        weight.add_(noise, alpha=NOISE * float(weight.std()))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    draft = tmp_path_factory.mktemp("models") / DRAFT
    draft.mkdir()
    models = (DEMO_DRAFT, noisy(draft))

    async def start(mesh: Mesh) -> None:
        flags = (
            *("--torch-threads", "1", "--torch-batch-invariant", "true"),
            *("--torch-kv-cache-tokens", "4096"),
        )
        await asyncio.gather(
            *(mesh.start_tokenizer(model) for model in models),
            *(mesh.start_engine("--model-dir", str(model), *flags) for model in models),
        )
        names = ",".join(model.name for model in models)
        served = ("--models", names, "--triton-models", json.dumps(MODELS))
        await mesh.start_router(*PATIENT, *served)
        await mesh.ready(2, 2)

    async with running_mesh(start=start) as mesh:
        yield mesh
        await mesh.idle()


def rate_of(response: Response) -> float:
    """The share of the drafts that held, as told."""
    number = response.number
    drafts, accepted = number["total_draft_tokens"], number["total_accepted_draft_tokens"]
    assert number["acceptance_rate"] == pytest.approx(accepted / drafts)
    return float(number["acceptance_rate"])


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"top_k": 50, "temperature": 0.8, "seed": 3},
        pytest.param(
            {"top_p": 0.9, "temperature": 1.3, "seed": 4, "repetition_penalty": 1.2},
            marks=pytest.mark.soak,
        ),
        {"stop_words": ["return"], "bad_words": [" if"], "min_tokens": 9},
        {"top_k": 50, "temperature": 0.7, "guided_decoding_guide_type": "regex"}
        | {"guided_decoding_guide": "([A-Z][0-9]){9,200}"},
    ],
    ids=["greedy", "drawn", "penalised", "words", "guided"],
)
async def test_nothing_changes_but_the_number_of_steps(
    triton: Triton, values: dict[str, Any]
) -> None:
    asked = {**ASKED, "return_log_probs": True, "return_num_output_tokens": True, **values}
    expected = await triton.infer("tensorrt_llm_bls", asked)
    found = await triton.infer("tensorrt_llm_bls", asked | DRAFTED)
    for name, value in expected.outputs.items():
        if value.dtype == np.float32:
            assert value == pytest.approx(found.outputs[name], abs=1e-4)
        else:
            assert value.tolist() == found.outputs[name].tolist()
    # Drafts follow the guide as well: without, a quarter of them would hold.
    least = 0.5 if "guided_decoding_guide" in values else 0
    assert least < rate_of(found) < 1


async def test_logits_of_drafts_decide_by_the_seed(triton: Triton) -> None:
    """A stream has one response, as upstream's."""
    asked = {**ASKED, "top_k": 50, "temperature": 0.8, "seed": 5, "use_draft_logits": True}
    asked |= {"return_num_output_tokens": True, **DRAFTED}
    first = await triton.infer("tensorrt_llm_bls", asked)
    again, end = await triton.stream("tensorrt_llm_bls", asked, empty_final=True)
    assert first.text == again.text
    assert end.final
    assert first.number["num_output_tokens"] == TOKENS
    assert 0.3 < rate_of(first) <= 1


async def test_a_lost_model_for_drafts_means_no_drafts(mesh: Mesh, triton: Triton) -> None:
    expected = await triton.infer("ensemble", ASKED)
    found = await triton.infer("lost_bls", ASKED | DRAFTED)
    assert found.text == expected.text
    assert found.number["total_draft_tokens"] == 0
    await mesh.counted("bls_draft_failures", 1)


async def test_an_item_fails_as_without_drafts(triton: Triton) -> None:
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "[a-z]{9}"}
    errors = []
    for drafts in ({}, DRAFTED):
        with pytest.raises(InferenceServerException) as failed:
            await triton.infer("tensorrt_llm_bls", {**ASKED, **guide, **drafts})
        errors.append(failed.value.message())
    assert "together leave no token to choose" in errors[0]
    assert errors[1] == errors[0]


@pytest.mark.parametrize("values", [{"beam_width": 2}, {"num_return_sequences": 2}])
async def test_several_sequences_are_refused_by_name(
    triton: Triton, values: dict[str, Any]
) -> None:
    (response, *_) = await triton.stream("tensorrt_llm_bls", {**ASKED, **DRAFTED, **values})
    assert response.error.startswith("num_draft_tokens is for a single sequence")


async def test_a_stop_ends_the_rounds(mesh: Mesh, triton: Triton) -> None:
    asked = {**ASKED, "max_tokens": 2000, **DRAFTED, "return_num_output_tokens": True}
    running = asyncio.create_task(triton.stream("tensorrt_llm_bls", asked, request_id="long"))

    async def is_live() -> bool:
        return (await mesh.gauges())["live_requests"] > 0

    await eventually(is_live)
    stop = {"stop": True}
    while not running.done():
        await triton.stream("tensorrt_llm_bls", stop, request_id="long")
        await asyncio.sleep(0.05)
    response = (await running)[0]
    assert not response.error
    assert response.number["num_output_tokens"] < 2000
