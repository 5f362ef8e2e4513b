"""What the models' parameters change: accumulation, and the prompt in the output."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from compat.triton import Response, Triton, joined
from e2e.mesh import Mesh, router_before

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 30
MODELS: dict[str, dict[str, Any]] = {
    name: {"template": name} for name in ("ensemble", "tensorrt_llm", "tensorrt_llm_bls")
}
MODELS["tensorrt_llm_bls"]["accumulate_tokens"] = True
SETTINGS = ("--triton-models", json.dumps(MODELS), "--triton-exclude-input-in-output", "true")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(workers: Mesh) -> AsyncIterator[Mesh]:
    async with router_before(workers, *SETTINGS) as mesh:
        yield mesh


async def native_text(mesh: Mesh, prompt: str, max_tokens: int = TOKENS) -> str:
    (item,) = await mesh.client.complete([prompt], max_tokens=max_tokens)
    return item.text


def grows(responses: list[Response], whole: str) -> None:
    """Each text extends the previous text; the last is the whole."""
    texts = [response.text for response in responses if response.outputs]
    for text, longer in pairwise(texts):
        assert longer.startswith(text)
    assert texts[-1] == whole


async def test_bls_accumulates_texts(mesh: Mesh, triton: Triton) -> None:
    tensors = {"text_input": "grow", "max_tokens": TOKENS, "stream": True}
    text, longer = await triton.growing("tensorrt_llm_bls", tensors | {"max_tokens": 8000})
    assert longer.startswith(text)
    responses = await triton.stream("tensorrt_llm_bls", tensors, empty_final=True)
    whole = await native_text(mesh, "grow")
    grows(responses, whole)
    assert [r.final for r in responses] == [False] * (len(responses) - 1) + [True]
    assert not responses[-1].outputs
    assert joined(await triton.stream("ensemble", tensors)) == whole
    config = (await triton.client.get_model_config("tensorrt_llm_bls")).config
    assert config.parameters["accumulate_tokens"].string_value == "true"


async def test_rows_and_sequences_accumulate_their_own_texts(mesh: Mesh, triton: Triton) -> None:
    prompts = ["one", "another"]
    tensors = {
        "text_input": np.array([[prompt] for prompt in prompts], dtype=np.object_),
        "max_tokens": np.array([[8], [TOKENS]], dtype=np.int32),
        "stream": np.ones((2, 1), bool),
    }
    responses = await triton.stream("tensorrt_llm_bls", tensors)
    for row, (prompt, tokens) in enumerate(zip(prompts, (8, TOKENS), strict=True)):
        own = [response for response in responses if response.number["batch_index"] == row]
        grows(own, await native_text(mesh, prompt, tokens))
    options: dict[str, Any] = {"num_return_sequences": 2, "top_k": 40, "seed": 3}
    responses = await triton.stream(
        "tensorrt_llm_bls", {"text_input": "x", "max_tokens": TOKENS, "stream": True, **options}
    )
    (item,) = await mesh.client.complete(["x"], max_tokens=TOKENS, **options)
    for index, sequence in enumerate(item.sequences):
        own = [response for response in responses if response.number["sequence_index"] == index]
        grows(own, sequence.text)


async def test_a_stop_word_ends_an_accumulated_text(mesh: Mesh, triton: Triton) -> None:
    whole = await native_text(mesh, "stop", 60)
    word = whole[30:36]
    responses = await triton.stream(
        "tensorrt_llm_bls",
        {"text_input": "stop", "max_tokens": 5000, "stream": True, "stop_words": ["zz", word]},
    )
    grows(responses, whole[: whole.index(word) + len(word)])
    await mesh.idle()


async def test_accumulation_refuses_beams(triton: Triton) -> None:
    tensors = {"text_input": "x", "max_tokens": 3, "stream": True, "beam_width": 2}
    (response,) = await triton.stream("tensorrt_llm_bls", tensors)
    assert response.error == "Accumulation of tokens is only implemented for beam width = 1"


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
async def test_request_overrides_exclude_input_of_texts(
    mesh: Mesh, triton: Triton, model: str
) -> None:
    """The tensor overrides the model's parameter, true here."""
    tensors = {"text_input": "The capital", "max_tokens": 9}
    text = await native_text(mesh, "The capital", 9)
    for given, prompt in (({}, ""), ({"exclude_input_in_output": True}, "")):
        responses = await triton.stream(model, tensors | given)
        assert joined(responses) == prompt + text
    responses = await triton.stream(model, tensors | {"exclude_input_in_output": False})
    assert joined(responses) == "The capital" + text
    # Chunks never have it.
    streamed = tensors | {"exclude_input_in_output": False, "stream": True}
    last = (await triton.stream(model, streamed))[-1]
    assert not last.text.startswith("The capital")


async def test_request_overrides_exclude_input_of_ids(mesh: Mesh, triton: Triton) -> None:
    tensors = {"input_ids": [7, 8], "input_lengths": 2, "request_output_len": 5}
    (item,) = await mesh.client.complete([[7, 8]], max_tokens=5, ignore_end_id=True)
    new = list(item.token_ids)
    for given, ids in (
        ({}, new),
        ({"exclude_input_in_output": True}, new),
        ({"exclude_input_in_output": False}, [7, 8, *new]),
        ({"exclude_input_in_output": False, "streaming": True}, new),
    ):
        responses = await triton.stream("tensorrt_llm", tensors | given)
        told = [i for r in responses for i in r.outputs["output_ids"].ravel().tolist()]
        assert told == ids
        assert sum(r.number["sequence_length"] for r in responses) == len(ids)
    config = (await triton.client.get_model_config("tensorrt_llm")).config
    assert config.parameters["exclude_input_in_output"].string_value == "true"
