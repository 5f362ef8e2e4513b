"""Models that stream also answer unary calls, whole; the strict policy refuses those as Triton does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from compat.plain_http import PlainHttp
from compat.test_streams import native_text
from compat.triton import Triton, joined
from e2e.mesh import Mesh, eventually, router_before
from tritonclient.utils import InferenceServerException
from trtmesh.router.doors.triton.models import triton_models
from trtmesh.router.doors.triton.settings import TritonSettings

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT_MODELS = ("ensemble", "tensorrt_llm_bls")
STREAMING_MODELS = (*TEXT_MODELS, "tensorrt_llm")
PROMPT = "What is machine learning?"
MANUAL = {"text_input": PROMPT, "max_tokens": 20, "bad_words": "", "stop_words": ""}
"""The body of the manuals' first request."""
ASK: dict[str, Any] = {"text_input": PROMPT, "max_tokens": 20}
IDS: dict[str, Any] = {"input_ids": [7, 8], "input_lengths": 2, "request_output_len": 9}
ROWS: dict[str, Any] = {
    "text_input": np.array([["one"], ["another"]], np.object_),
    "max_tokens": np.array([[5], [9]], np.int32),
}
NOT_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various"
    " number of responses"
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def strict(workers: Mesh) -> AsyncIterator[Mesh]:
    flags = ("--triton-strict-transaction-policy", "true")
    async with router_before(workers, *flags) as mesh:
        yield mesh


@pytest.mark.parametrize("model", TEXT_MODELS)
async def test_manual_first_commands_work(mesh: Mesh, http: PlainHttp, model: str) -> None:
    new = await native_text(mesh, PROMPT, 20)
    reply = await http.post(f"/v2/models/{model}/generate", MANUAL)
    assert (reply.status, reply.json["text_output"]) == (200, PROMPT + new)
    reply = await http.post(f"/v2/models/{model}/generate_stream", MANUAL | {"stream": True})
    assert "".join(event["text_output"] for event in reply.events) == new


@pytest.mark.parametrize("model", TEXT_MODELS)
async def test_one_text_model_serves_both_calls(mesh: Mesh, triton: Triton, model: str) -> None:
    new = await native_text(mesh, PROMPT, 20)
    assert (await triton.infer(model, ASK)).text == PROMPT + new
    streamed = await triton.stream(model, ASK | {"stream": True}, empty_final=True)
    assert joined(streamed) == new
    assert len(streamed) > 1


async def test_core_model_serves_both_calls(mesh: Mesh, triton: Triton, http: PlainHttp) -> None:
    (item,) = await mesh.client.complete([[7, 8]], max_tokens=9, ignore_end_id=True)
    new = list(item.token_ids)
    whole = await triton.infer("tensorrt_llm", IDS)
    assert whole.outputs["output_ids"].tolist() == [[[7, 8, *new]]]
    assert whole.final is None
    streamed = await triton.stream("tensorrt_llm", IDS | {"streaming": True})
    assert [i for r in streamed for i in r.outputs["output_ids"].ravel().tolist()] == new
    body = {
        "inputs": [
            {"name": name, "datatype": "INT32", "shape": [1, len(values)], "data": values}
            for name, values in (
                ("input_ids", [7, 8]),
                ("input_lengths", [2]),
                ("request_output_len", [9]),
            )
        ]
    }
    reply = await http.post("/v2/models/tensorrt_llm/infer", body)
    outputs = {output["name"]: output["data"] for output in reply.json["outputs"]}
    assert outputs == {"output_ids": [7, 8, *new], "sequence_length": [11]}


async def test_unary_call_stacks_rows_and_a_stream_tells_them_apart(
    mesh: Mesh, triton: Triton, http: PlainHttp
) -> None:
    texts = [
        "one" + await native_text(mesh, "one", 5),
        "another" + await native_text(mesh, "another", 9),
    ]
    whole = await triton.infer("ensemble", ROWS)
    assert whole.outputs["text_output"].tolist() == [text.encode() for text in texts]
    assert "batch_index" not in whole.outputs
    apart = await triton.stream("ensemble", ROWS)
    assert {r.number["batch_index"]: r.text for r in apart} == dict(enumerate(texts))
    body = {"text_input": ["one", "another"], "max_tokens": [5, 9]}
    reply = await http.post("/v2/models/ensemble/generate", body)
    assert (reply.status, reply.json["text_output"]) == (200, texts)


async def test_unary_call_returns_all_sequences(triton: Triton) -> None:
    more = {"num_return_sequences": 2, "top_k": 40, "seed": 3}
    whole = await triton.infer("ensemble", ASK | more)
    assert whole.outputs["text_output"].shape == (2,)
    assert "sequence_index" not in whole.outputs
    apart = await triton.stream("ensemble", ASK | more)
    told = {r.number["sequence_index"]: r.text.encode() for r in apart}
    assert dict(enumerate(whole.outputs["text_output"].tolist())) == told


ONE_RESPONSE = "is true but a unary call has one response; use ModelStreamInfer or generate_stream"


async def test_unary_call_refuses_streaming(triton: Triton, http: PlainHttp) -> None:
    for model, asked, name in (("ensemble", ASK, "stream"), ("tensorrt_llm", IDS, "streaming")):
        with pytest.raises(InferenceServerException) as caught:
            await triton.infer(model, asked | {name: True})
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
        assert f"{name} {ONE_RESPONSE}" in caught.value.message()
        reply = await http.post(f"/v2/models/{model}/generate", asked | {name: True})
        assert (reply.status, f"{name} {ONE_RESPONSE}" in reply.json["error"]) == (400, True)


@pytest.mark.parametrize("model", STREAMING_MODELS)
async def test_configuration_says_that_a_stream_has_several_responses(
    triton: Triton, model: str
) -> None:
    config = (await triton.client.get_model_config(model)).config
    assert config.model_transaction_policy.decoupled


@pytest.mark.parametrize("model", STREAMING_MODELS)
async def test_strict_model_refuses_unary_calls(strict: Mesh, model: str) -> None:
    async with Triton(strict.router.address) as triton:
        with pytest.raises(InferenceServerException) as caught:
            await triton.infer(model, IDS if model == "tensorrt_llm" else ASK)
    assert caught.value.status() == "StatusCode.UNIMPLEMENTED"
    assert caught.value.message() == (
        "ModelInfer RPC doesn't support models with decoupled transaction policy"
    )
    async with PlainHttp(strict.router.http_address) as http:
        reply = await http.post(f"/v2/models/{model}/infer", {"inputs": []})
    assert (reply.status, reply.json) == (
        501,
        {"error": "HTTP end point doesn't support models with decoupled transaction policy"},
    )


@pytest.mark.parametrize(
    "more", [{"stream": True}, {"text_input": ["x", "y"], "max_tokens": [3, 4]}]
)
async def test_strict_generate_refuses_several_responses(
    strict: Mesh, more: dict[str, Any]
) -> None:
    async with PlainHttp(strict.router.http_address) as http:
        await eventually(http.is_ready)
        body = {"text_input": "long", "max_tokens": 8000} | more
        reply = await http.post("/v2/models/ensemble/generate", body)
        assert (reply.status, reply.json) == (500, {"error": NOT_ONE})
        reply = await http.post(
            "/v2/models/ensemble/generate", {"text_input": "x", "max_tokens": 3}
        )
        assert reply.status == 200
    await strict.idle()


async def test_model_overrides_the_policy_of_the_door() -> None:
    models = {"own": {"template": "ensemble", "strict_transaction_policy": False}}
    for door in (True, False):
        settings = {
            "strict_transaction_policy": door,
            "models": models | {"as_door": {"template": "ensemble"}},
        }
        made = triton_models(TritonSettings.model_validate(settings))
        assert not made["own"].refuses_unary_calls
        assert made["as_door"].refuses_unary_calls == door
    whole = TritonSettings.model_validate({"strict_transaction_policy": True, "decoupled": []})
    assert not triton_models(whole)["ensemble"].refuses_unary_calls
