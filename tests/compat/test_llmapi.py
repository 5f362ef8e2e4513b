"""The llmapi flavour of `tensorrt_llm`: no batch dimension, other names, accumulating texts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from compat.plain_http import PlainHttp
from compat.triton import Response, SyncStream, Triton
from e2e.mesh import SIMULATED, WIDE_TOKENS, Mesh, router_before
from tritonclient.utils import InferenceServerException
from trtmesh.router.doors.triton.models import describe_config, triton_models
from trtmesh.router.doors.triton.settings import TritonSettings
from trtmesh.tools.triton.requests import TritonModel

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODELS = {
    "tensorrt_llm": {"template": "llmapi"},
    "whole": {"template": "llmapi", "decoupled": False},
    "deltas": {"template": "llmapi", "decoupled": True, "accumulate_tokens": False},
}
FLAGS = (*SIMULATED, *WIDE_TOKENS, "--simulated-limits-max-sequence-tokens", "8192")
PROMPT = "def fibonacci(n):"


def text(*values: str) -> np.ndarray:
    return np.array(values, np.object_)


def one(value: Any, dtype: Any = np.int32) -> np.ndarray:
    return np.array([value], dtype)


def flag(value: bool = True) -> np.ndarray:
    return np.array([value], np.bool_)


ASK = {"text_input": text(PROMPT), "sampling_param_max_tokens": one(20)}
STREAM = {"streaming": flag()}
ADAPTER_BY_HALVES = "lora_id, lora_name, and lora_path must all be provided together"
STOP = {"text_input": text(""), "stop": flag()}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(workers: Mesh) -> AsyncIterator[Mesh]:
    flags = ("--triton-models", json.dumps(MODELS))
    async with router_before(workers, *flags) as mesh:
        yield mesh


async def native_text(mesh: Mesh, max_tokens: int = 20) -> str:
    (item,) = await mesh.client.complete([PROMPT], max_tokens=max_tokens)
    return item.text


async def test_llmapi_answers_once(mesh: Mesh, triton: Triton) -> None:
    response = await triton.infer("tensorrt_llm", ASK)
    assert response.text == PROMPT + await native_text(mesh)
    assert list(response.outputs) == ["text_output"]
    bare = {"sampling_param_exclude_input_from_output": flag()}
    assert (await triton.infer("tensorrt_llm", ASK | bare)).text == await native_text(mesh)


async def test_default_max_tokens_is_that_of_the_library(mesh: Mesh, triton: Triton) -> None:
    bare = {"sampling_param_exclude_input_from_output": flag()}
    response = await triton.infer("tensorrt_llm", {"text_input": text(PROMPT)} | bare)
    assert response.text == await native_text(mesh, 32)


async def test_texts_accumulate(mesh: Mesh, triton: Triton) -> None:
    whole = await native_text(mesh)
    more = {"return_finish_reason": flag()}
    responses = await triton.stream("tensorrt_llm", ASK | STREAM | more)
    texts = [response.text for response in responses]
    assert texts[-1] == whole
    assert all(whole.startswith(each) for each in texts)
    long = {"sampling_param_max_tokens": one(8000)}
    text, longer = await triton.growing("tensorrt_llm", ASK | STREAM | long)
    assert longer.startswith(text)
    reasons = [response.outputs["finish_reason"].tolist() for response in responses]
    assert reasons == [[b"None"]] * (len(responses) - 1) + [[b"length"]]
    assert [response.final for response in responses] == [False] * (len(responses) - 1) + [True]
    deltas = await triton.stream("deltas", ASK | STREAM)
    assert "".join(response.text for response in deltas) == whole
    with pytest.raises(InferenceServerException, match="only supported in decoupled mode"):
        await triton.infer("whole", ASK | STREAM)


async def test_llmapi_details_on_request(mesh: Mesh, triton: Triton) -> None:
    asked = {
        "return_finish_reason": flag(),
        "return_stop_reason": flag(),
        "sampling_param_return_perf_metrics": flag(),
    }
    response = await triton.infer("tensorrt_llm", ASK | asked)
    declared = await triton.client.get_model_metadata("tensorrt_llm")
    # The simulated engine has no log-probabilities.
    names = {out.name for out in declared.outputs}
    assert set(response.outputs) == names - {"cumulative_logprob"}
    assert response.outputs["finish_reason"].tolist() == [b"length"]
    assert response.outputs["stop_reason"].tolist() == [b"None"]
    types = {out.name: out.datatype for out in declared.outputs}
    numbers = {name: value for name, value in response.outputs.items() if types[name] != "BYTES"}
    assert all(value.shape == (1,) for value in numbers.values())
    assert numbers["last_token_time_ns"] >= numbers["first_token_time_ns"] > 0
    assert numbers["kv_cache_alloc_total_blocks"] > 0
    response = await triton.infer("tensorrt_llm", ASK | asked, outputs=["text_output"])
    assert list(response.outputs) == ["text_output"]


async def test_a_stop_text_ends_the_text_before_it(mesh: Mesh, triton: Triton) -> None:
    whole = await native_text(mesh)
    word = whole[8:12]
    more = {
        "sampling_param_stop": text("never there", word),
        "sampling_param_exclude_input_from_output": flag(),
        "return_stop_reason": flag(),
        "return_finish_reason": flag(),
    }
    response = await triton.infer("tensorrt_llm", ASK | more)
    assert response.text == whole[: whole.index(word)]
    assert response.outputs["stop_reason"].tolist() == [word.encode()]
    assert response.outputs["finish_reason"].tolist() == [b"stop"]


async def test_llmapi_shapes_have_no_batch_dimension(triton: Triton) -> None:
    metadata = await triton.client.get_model_metadata("tensorrt_llm")
    assert {tuple(given.shape) for given in metadata.inputs} == {(1,), (-1,)}
    config = (await triton.client.get_model_config("tensorrt_llm")).config
    assert config.max_batch_size == 0
    with pytest.raises(InferenceServerException, match=r"Expected \[-1\], got \[1,1\]"):
        await triton.infer("tensorrt_llm", {"text_input": np.array([["x"]], np.object_)})
    with pytest.raises(InferenceServerException, match="has 2 texts but the model takes one"):
        await triton.infer("tensorrt_llm", {"text_input": text("x", "y")})


async def test_a_stop_request_is_answered_as_cancelled(mesh: Mesh, triton: Triton) -> None:
    """As upstream's own test wants it: known, unknown or over, and the next request of the name is served."""
    for _ in range(2):
        with pytest.raises(InferenceServerException) as caught:
            await triton.infer("tensorrt_llm", STOP, request_id="name")
        assert caught.value.status() == "StatusCode.CANCELLED"
        assert caught.value.message() == "Request cancelled by client"
        assert (await triton.infer("tensorrt_llm", ASK, request_id="name")).text
    with pytest.raises(InferenceServerException, match="A request id must be provided"):
        await triton.infer("tensorrt_llm", STOP)


async def test_stopped_request_ends_with_its_text_so_far(mesh: Mesh, triton: Triton) -> None:
    ask = {"text_input": text(PROMPT), "sampling_param_max_tokens": one(8000)}
    with SyncStream(mesh.router.address) as stream:
        stream.send(
            "tensorrt_llm", ask | STREAM | {"return_finish_reason": flag()}, request_id="long"
        )
        assert (await asyncio.to_thread(stream.next)).outputs
        stream.send("tensorrt_llm", STOP, request_id="long")
        responses = await asyncio.to_thread(stream.half_close)
    errors = [response for response in responses if response.error]
    assert [error.error for error in errors] == ["Request cancelled by client"]
    last: Response = next(response for response in responses if response.final)
    assert last.outputs["finish_reason"].tolist() == [b"cancelled"]
    await mesh.idle()


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ({"lora_id": one(1, np.uint64)}, ADAPTER_BY_HALVES),
        ({"lora_name": text("a")}, ADAPTER_BY_HALVES),
        ({"lora_name": text("a"), "lora_path": text("/a")}, ADAPTER_BY_HALVES),
        (
            {"lora_id": one(1, np.uint64), "lora_name": text("a")},
            "lora_id, lora_name not supported by any worker of model demo",
        ),
        (
            {"lora_id": one(1, np.uint64), "lora_name": text("a"), "lora_path": text("/a")},
            "names a path, which this server never reads",
        ),
        ({"image_url": text("https://example.org/a.png")}, "image_url not supported"),
        ({"sampling_param_best_of": one(2)}, "best_of"),
        ({"sampling_param_logits_post_processor_name": text("a")}, "logits_post_processor"),
        ({"sampling_param_max_tokens": one(0)}, "sampling_param_max_tokens must be"),
    ],
)
async def test_unsupported_llmapi_inputs_are_named(
    triton: Triton, tensors: dict[str, np.ndarray], complaint: str
) -> None:
    with pytest.raises(InferenceServerException, match=complaint):
        await triton.infer("tensorrt_llm", ASK | tensors)


async def test_values_without_an_effect_are_accepted(mesh: Mesh, triton: Triton) -> None:
    more = {
        "sampling_param_best_of": one(1),
        "sampling_param_logits_post_processor_name": text(""),
        "sampling_param_exclude_input_from_output": flag(),
        "sampling_param_temperature": one(0.0, np.float32),
    }
    assert (await triton.infer("tensorrt_llm", ASK | more)).text == await native_text(mesh)


async def test_llmapi_over_http(mesh: Mesh) -> None:
    """Plain JSON says no shapes, so here is where the missing batch dimension shows."""
    body = {
        "text_input": PROMPT,
        "sampling_param_max_tokens": 20,
        "sampling_param_stop": ["zz", "yy"],
    }
    whole = await native_text(mesh)
    async with PlainHttp(mesh.router.http_address) as http:
        reply = await http.post("/v2/models/tensorrt_llm/generate", body)
        told = {"model_name": "tensorrt_llm", "model_version": "1", "text_output": PROMPT + whole}
        assert (reply.status, reply.json) == (200, told)
        streaming = "/v2/models/tensorrt_llm/generate_stream"
        reply = await http.post(streaming, body | {"streaming": True})
        assert reply.events[-1]["text_output"] == whole
        stop = {"text_input": "", "stop": True, "id": "name"}
        for path in ("/v2/models/tensorrt_llm/generate", streaming):
            reply = await http.post(path, stop)
            assert (reply.status, reply.json) == (400, {"error": "Request cancelled by client"})
        several = {"text_input": ["x", "y"], "sampling_param_max_tokens": [3, 4]}
        reply = await http.post(streaming, several)
        assert (reply.status, "'sampling_param_max_tokens' to tensor" in reply.json["error"]) == (
            400,
            True,
        )


@pytest.mark.parametrize("says", [None, True, False])
@pytest.mark.parametrize("template", ["llmapi", "tensorrt_llm_bls"])
async def test_triton_infer_knows_whether_texts_accumulate(
    template: str, says: bool | None
) -> None:
    models = {"m": {"template": template, "accumulate_tokens": says}}
    model = triton_models(TritonSettings.model_validate({"models": models}))["m"]
    config = describe_config(model)
    assert TritonModel.of(config).accumulates == model.accumulate_tokens
    # Triton's models lack the parameter; only llmapi accumulates.
    config.parameters.clear()
    assert TritonModel.of(config).accumulates == (template == "llmapi")
