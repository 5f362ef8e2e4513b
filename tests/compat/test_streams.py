"""Decoupled models: a stream of responses for each request."""

from __future__ import annotations

import asyncio

import pytest
from compat.triton import SyncStream, Triton, joined, request
from e2e.mesh import Mesh
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 40


async def native_text(mesh: Mesh, prompt: str, max_tokens: int = TOKENS) -> str:
    (item,) = await mesh.client.complete([prompt], max_tokens=max_tokens)
    return item.text


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
async def test_a_stream_of_tokens(mesh: Mesh, triton: Triton, model: str) -> None:
    prompt = "def fibonacci(n):"
    responses = await triton.stream(
        model,
        {"text_input": prompt, "max_tokens": TOKENS, "stream": True},
        request_id="one",
        empty_final=True,
    )
    assert joined(responses) == await native_text(mesh, prompt)
    assert len(responses) > 2
    assert [response.final for response in responses] == [False] * (len(responses) - 1) + [True]
    assert {response.request_id for response in responses} == {"one"}
    assert bool(responses[-1].outputs) == (model == "ensemble")
    await mesh.idle()


async def test_an_empty_final_response_comes_only_where_asked_for(triton: Triton) -> None:
    tensors = {"text_input": "x", "max_tokens": 3, "stream": True}
    responses = await triton.stream("tensorrt_llm_bls", tensors)
    assert all(response.outputs and not response.final for response in responses)


async def test_not_streaming_gives_one_response_with_the_prompt(mesh: Mesh, triton: Triton) -> None:
    prompt = "The capital"
    (response,) = await triton.stream("ensemble", {"text_input": prompt, "max_tokens": TOKENS})
    assert response.final
    assert response.text == prompt + await native_text(mesh, prompt)


async def test_the_synchronous_client(mesh: Mesh) -> None:
    """Many requests on one stream, closed for writing before their responses are here."""
    stream = SyncStream(mesh.router.address)
    prompts = [f"prompt {index}" for index in range(8)]
    for prompt in prompts:
        tensors = {"text_input": prompt, "max_tokens": TOKENS, "stream": True}
        stream.send("ensemble", tensors, request_id=prompt)
    responses = await asyncio.to_thread(stream.half_close)
    stream.close()
    for prompt in prompts:
        own = [response for response in responses if response.request_id == prompt]
        assert joined(own) == await native_text(mesh, prompt)
        assert [response.final for response in own].count(True) == 1


async def test_a_failed_request_ends_nothing_else(mesh: Mesh, triton: Triton) -> None:
    good = {"text_input": "good", "max_tokens": TOKENS, "stream": True}
    responses = await triton.stream_all(
        [
            request("ensemble", good, request_id="good"),
            request("nothing", good, request_id="no model"),
            request("ensemble", {"max_tokens": 3}, request_id="no text"),
        ]
    )
    errors = [response.error for response in responses if response.error]
    assert len(errors) == 2
    assert any("Request for unknown model: 'nothing' is not found" in text for text in errors)
    assert any("missing required input(s) ['text_input']" in text for text in errors)
    assert joined(responses) == await native_text(mesh, "good")


async def test_a_decoupled_model_has_no_unary_call(triton: Triton) -> None:
    with pytest.raises(InferenceServerException) as caught:
        await triton.infer("ensemble", {"text_input": "x", "max_tokens": 3})
    assert caught.value.status() == "StatusCode.UNIMPLEMENTED"
    assert caught.value.message() == (
        "ModelInfer RPC doesn't support models with decoupled transaction policy"
    )
