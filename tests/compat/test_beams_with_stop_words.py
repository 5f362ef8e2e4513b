"""Stop words take part in a beam search: distinct beams, best first, with their own sums, on every door."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from compat.triton import Triton
from e2e.mesh import PATIENT, SMALL, Mesh, running_mesh
from trtmesh.client import FinishReason, ItemResult

pytestmark = pytest.mark.asyncio(loop_scope="module")

CASES = [
    ("def f(a, b):\n    return a +", ["+ a", "self"], 2),
    ("import os\n", ["."], 4),
    ("for i in range(", [" 0"], 3),
    ("def area(", ["def", "class", "import"], 4),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[Mesh]:
    flags = (*SMALL, "--torch-dtype", "float32", "--torch-threads", "1")
    async with running_mesh(engine_flags=flags, router_flags=PATIENT) as mesh:
        yield mesh
        await mesh.idle()


async def native(mesh: Mesh, prompt: str, words: list[str], width: int, **more: Any) -> ItemResult:
    options: dict[str, Any] = {"max_tokens": 24, "beam_width": width, "log_probs": True}
    options |= {"stop_texts": words, "include_stop_text": True} | more
    (item,) = await mesh.open([prompt], **options).result()
    assert item.error is None
    return item


@pytest.mark.parametrize(
    ("prompt", "words", "width"),
    [*CASES[:2], *(pytest.param(*each, marks=pytest.mark.soak) for each in CASES[2:])],
)
async def test_beams_end_at_stop_words(
    mesh: Mesh, prompt: str, words: list[str], width: int
) -> None:
    item = await native(mesh, prompt, words, width)
    texts = [sequence.text for sequence in item.sequences]
    assert len(set(texts)) == width
    assert any(sequence.reason is FinishReason.STOP_WORD for sequence in item.sequences)
    sums = [s.finished.cumulative_log_prob or 0.0 for s in item.sequences if s.finished]
    assert sums == sorted(sums, reverse=True)
    for sequence, total in zip(item.sequences, sums, strict=True):
        assert sum(sequence.log_probs) == pytest.approx(total, abs=1e-4)
        assert len(sequence.log_probs) == len(sequence.token_ids)
        stopped = sequence.reason is FinishReason.STOP_WORD
        assert stopped == any(word in sequence.text for word in words)
        if stopped:
            assert any(sequence.text.endswith(word) for word in words)
    whole = await native(mesh, prompt, words, width, stream=False, include_stop_text=False)
    for sequence, other in zip(item.sequences, whole.sequences, strict=True):
        assert other.token_ids == sequence.token_ids
        assert other.text == sequence.text.removesuffix(_end(sequence.text, words))


def _end(text: str, words: list[str]) -> str:
    return next((word for word in words if text.endswith(word)), "")


@pytest.mark.parametrize(("prompt", "words", "width"), CASES[2:3])
async def test_ensemble_and_bls_have_the_beams_of_the_native_api(
    mesh: Mesh, triton: Triton, prompt: str, words: list[str], width: int
) -> None:
    item = await native(mesh, prompt, words, width)
    request = {
        "text_input": prompt,
        "max_tokens": 24,
        "beam_width": width,
        "stop_words": words,
        "return_log_probs": True,
        "exclude_input_in_output": True,
    }
    sums = [s.finished.cumulative_log_prob or 0.0 for s in item.sequences if s.finished]
    for model in ("ensemble", "tensorrt_llm_bls"):
        for stream in (False, True):
            responses = await triton.stream(model, request | {"stream": stream})
            outputs = [response.outputs for response in responses if response.outputs][-1]
            texts = [text.decode() for text in outputs["text_output"].tolist()]
            assert texts == [sequence.text for sequence in item.sequences]
            np.testing.assert_allclose(outputs["cum_log_probs"], [sums], atol=1e-4)
