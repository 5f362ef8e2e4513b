"""tritonclient.http against models without decoupling."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import tritonclient.http as triton_http
from compat.plain_http import PlainHttp
from compat.test_server import MODELS
from compat.triton import UINT64, Triton, array
from e2e.mesh import Mesh, eventually, router_before, scrape
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 12
INFER = "/v2/models/{}/infer"


class Http:
    """The client, off the event loop."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def use(self, call: Callable[[Any], Any]) -> Any:
        """Runs `call` with a client in a thread."""

        def used() -> Any:
            client = triton_http.InferenceServerClient(self._address)
            try:
                return call(client)
            finally:
                client.close()

        return await asyncio.to_thread(used)

    async def ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        """What one method of a client returns."""
        return await self.use(lambda client: getattr(client, method)(*arguments, **options))

    async def infer(self, model: str, tensors: Mapping[str, Any], **more: Any) -> Any:
        inputs = make_inputs(tensors, binary=more.pop("binary", True))
        return await self.ask("infer", model, inputs, **more)


def make_inputs(tensors: Mapping[str, Any], *, binary: bool) -> list[Any]:
    inputs = []
    for name, value in tensors.items():
        data = array(value, np.uint64 if name in UINT64 else None)
        given = triton_http.InferInput(name, data.shape, np_to_triton_dtype(data.dtype))
        given.set_data_from_numpy(data, binary_data=binary)
        inputs.append(given)
    return inputs


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(workers: Mesh) -> AsyncIterator[Mesh]:
    async with router_before(workers, "--triton-decoupled", "") as mesh:
        yield mesh


@pytest.fixture(scope="module")
def http(mesh: Mesh) -> Http:
    return Http(mesh.router.http_address)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain(mesh: Mesh) -> AsyncIterator[PlainHttp]:
    async with PlainHttp(mesh.router.http_address) as plain:
        yield plain


async def test_health_and_readiness(http: Http) -> None:
    assert await http.ask("is_server_live")
    await eventually(lambda: http.ask("is_server_ready"))
    for model in MODELS:
        assert await http.ask("is_model_ready", model)
        assert await http.ask("is_model_ready", model, "1")
        assert not await http.ask("is_model_ready", model, "2")
    assert not await http.ask("is_model_ready", "nothing")


@pytest.mark.parametrize("model", MODELS)
async def test_http_descriptions_equal_grpc(http: Http, triton: Triton, model: str) -> None:
    """With 64-bit numbers as numbers, where protobuf's JSON has texts."""
    metadata = await http.ask("get_model_metadata", model, "1")
    of_grpc = await triton.client.get_model_metadata(model, as_json=True)
    assert _numbers(of_grpc) == metadata
    config = await http.ask("get_model_config", model)
    of_grpc = (await triton.client.get_model_config(model, as_json=True))["config"]
    of_grpc = _numbers(of_grpc)
    assert config["max_batch_size"] == 128
    for kind in ("input", "output"):
        assert [_told(tensor) for tensor in config[kind]] == of_grpc[kind]


def _numbers(value: Any) -> Any:
    """Numbers written as texts by protobuf's JSON."""
    return json.loads(json.dumps(value), object_hook=_shapes_as_numbers)


def _shapes_as_numbers(message: dict[str, Any]) -> dict[str, Any]:
    for key in ("shape", "dims"):
        if isinstance(message.get(key), list):
            message[key] = [int(extent) for extent in message[key]]
    return message


def _told(tensor: dict[str, Any]) -> dict[str, Any]:
    """Differences from protobuf's JSON, which omits defaults."""
    defaults: tuple[Any, ...] = ("FORMAT_NONE", False, "", [])
    return {
        key: {} if key == "reshape" else value
        for key, value in tensor.items()
        if key == "reshape" or value not in defaults
    }


async def test_the_server_describes_itself(http: Http) -> None:
    metadata = await http.ask("get_server_metadata")
    assert metadata["name"] == "trtmesh"
    assert {"binary_tensor_data", "generate", "statistics"} <= set(metadata["extensions"])
    index = await http.ask("get_model_repository_index")
    assert index == [{"name": model, "version": "1", "state": "READY"} for model in MODELS]


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
async def test_http_infer_returns_text(mesh: Mesh, http: Http, model: str, binary: bool) -> None:
    outputs = [
        triton_http.InferRequestedOutput(name, binary_data=binary)
        for name in ("text_output", "num_output_tokens")
    ]
    tensors = {"text_input": "def f(é", "max_tokens": TOKENS, "return_num_output_tokens": True}
    result = await http.infer(model, tensors, binary=binary, outputs=outputs, request_id="mine")
    (item,) = await mesh.client.complete(["def f(é"], max_tokens=TOKENS)
    assert result.as_numpy("text_output").tolist() == [
        ("def f(é" + item.text).encode() if binary else "def f(é" + item.text
    ]
    assert result.as_numpy("num_output_tokens").tolist() == [[TOKENS]]
    response = result.get_response()
    assert (response["id"], response["model_name"]) == ("mine", model)
    assert ("binary_data_size" in response["outputs"][0].get("parameters", {})) == binary
    assert ("parameters" in response) == (model == "ensemble")


@pytest.mark.parametrize("way_in", [None, "gzip", "deflate"])
@pytest.mark.parametrize("way_out", [None, "gzip", "deflate"])
async def test_bodies_and_responses_may_be_compressed(
    http: Http, way_in: str | None, way_out: str | None
) -> None:
    more = {
        "request_compression_algorithm": way_in,
        "response_compression_algorithm": way_out,
    }
    result = await http.infer("ensemble", {"text_input": "x " * 500, "max_tokens": 3}, **more)
    plain = await http.infer("ensemble", {"text_input": "x " * 500, "max_tokens": 3})
    assert result.as_numpy("text_output") == plain.as_numpy("text_output")


async def test_http_steps_equal_the_ensemble(http: Http) -> None:
    prompts = np.array([["one"], ["another prompt"]], np.object_)
    lengths = np.array([[4], [7]], np.int32)
    pre = await http.infer("preprocessing", {"QUERY": prompts, "REQUEST_OUTPUT_LEN": lengths})
    core = await http.infer(
        "tensorrt_llm",
        {
            "input_ids": pre.as_numpy("INPUT_ID"),
            "input_lengths": pre.as_numpy("REQUEST_INPUT_LEN"),
            "request_output_len": pre.as_numpy("REQUEST_OUTPUT_LEN"),
            "end_id": pre.as_numpy("OUT_END_ID"),
        },
    )
    post = await http.infer(
        "postprocessing",
        {
            "TOKENS_BATCH": core.as_numpy("output_ids"),
            "SEQUENCE_LENGTH": core.as_numpy("sequence_length"),
        },
    )
    whole = await http.infer("ensemble", {"text_input": prompts, "max_tokens": lengths})
    assert post.as_numpy("OUTPUT").tolist() == whole.as_numpy("text_output").tolist()


async def test_concurrent_http_requests(http: Http) -> None:
    inputs = make_inputs({"text_input": "x", "max_tokens": TOKENS}, binary=True)

    def all_at_once(client: Any) -> list[Any]:
        pending = [client.async_infer("ensemble", inputs, request_id=str(i)) for i in range(8)]
        return [each.get_result() for each in pending]

    results = await http.use(all_at_once)
    assert [result.get_response()["id"] for result in results] == [str(i) for i in range(8)]
    assert len({result.as_numpy("text_output").item() for result in results}) == 1


async def test_statistics_and_settings(http: Http) -> None:
    async def counts() -> Any:
        return (await http.ask("get_inference_statistics", "ensemble"))["model_stats"][0]

    before = await counts()
    await http.infer("ensemble", {"text_input": "x", "max_tokens": 3})
    after = await counts()
    assert after["inference_count"] == before["inference_count"] + 1
    assert after["inference_stats"]["success"]["ns"] > before["inference_stats"]["success"]["ns"]
    everything = await http.ask("get_inference_statistics")
    assert [stats["name"] for stats in everything["model_stats"]] == MODELS

    changed = await http.ask("update_log_settings", {"log_verbose_level": 1})
    assert (changed["log_verbose_level"], changed["log_info"]) == (1, True)
    await http.ask("update_log_settings", {"log_verbose_level": 0})
    settings = await http.ask("get_log_settings")
    assert settings["log_verbose_level"] == 0
    for model in ("ensemble", None):
        trace = await http.ask("get_trace_settings", model)
        assert trace == {"trace_level": ["OFF"]}
    with pytest.raises(InferenceServerException, match="does not trace") as caught:
        await http.ask("update_trace_settings", settings={"trace_level": "TENSOR"})
    assert caught.value.status() == "501"


@pytest.mark.parametrize(
    ("model", "tensors", "status", "message"),
    [
        ("nothing", {}, "404", "Request for unknown model: 'nothing' is not found"),
        ("ensemble", {"max_tokens": 3}, "400", "missing required input"),
        ("ensemble", {"nothing": 3}, "400", "unexpected inference input 'nothing'"),
        ("ensemble", {"text_input": "x", "max_tokens": 3.5}, "400", "data-type is 'FP32', but"),
        ("ensemble", {"text_input": ["x", "y"], "max_tokens": 3}, "400", "unexpected shape for"),
        (
            "ensemble",
            {"text_input": "x", "max_tokens": 3, "stream": True},
            "500",
            "Streaming is only supported if model is deployed using decoupled mode.",
        ),
        ("tensorrt_llm", {"input_lengths": 1, "request_output_len": 3}, "500", "is not present"),
    ],
)
async def test_http_errors_have_status_and_reason(
    http: Http, model: str, tensors: Mapping[str, Any], status: str, message: str
) -> None:
    with pytest.raises(InferenceServerException) as caught:
        await http.infer(model, tensors)
    assert (caught.value.status(), message in caught.value.message()) == (status, True)


TEXT = {"name": "text_input", "datatype": "BYTES", "shape": [1, 1]}
COUNT = {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [3]}
BAD_BODIES: list[tuple[Any, Mapping[str, str], str]] = [
    ({"inputs": 3}, {}, "Unable to parse 'inputs'"),
    ({"inputs": [3]}, {}, "Unable to parse 'inputs'"),
    ({"inputs": [TEXT | {"name": 3}]}, {}, "Unable to parse 'name'"),
    ({"inputs": [TEXT | {"shape": ["1"]}]}, {}, "Unable to parse 'shape'"),
    ({"inputs": [TEXT]}, {}, "But no field is set"),
    (
        {"inputs": [TEXT | {"data": ["x"], "parameters": {"binary_data_size": 5}}]},
        {},
        "But set 'data' 'binary_data_size'",
    ),
    ({"inputs": [TEXT | {"data": ["x", "y"]}]}, {}, "Shape does not match true shape of 'data'"),
    (
        {"inputs": [TEXT | {"parameters": {"binary_data_size": 5}}]},
        {},
        "unexpected size for input 'text_input', expecting 5 additional bytes for model 'ensemble'",
    ),
    (
        {"inputs": [TEXT | {"parameters": {"shared_memory_region": "r"}}]},
        {},
        "is in shared memory, which this server does not support",
    ),
    ({"parameters": {"triton_x": 1}}, {}, "are reserved for Triton usage"),
    ({"outputs": [{"name": "nothing"}]}, {}, "unexpected inference output 'nothing'"),
    (
        {"outputs": [{"name": "text_output", "parameters": {"classification": 2}}]},
        {},
        "asks for shared memory or classification",
    ),
    ({}, {"Inference-Header-Content-Length": "x"}, "Unable to parse Inference-Header-Content-"),
    (
        {},
        {"Inference-Header-Content-Length": "99"},
        "inference header size should be in range (0, 2], got: 99",
    ),
    ({}, {"Inference-Header-Content-Length": "0"}, "Raw request must only have 1 input"),
    (b"{}xyz", {"Inference-Header-Content-Length": "2"}, "3 bytes belong to no input"),
]


@pytest.mark.parametrize(("body", "headers", "message"), BAD_BODIES)
async def test_bodies_that_are_refused(
    plain: PlainHttp, body: Any, headers: Mapping[str, str], message: str
) -> None:
    reply = await plain.post(INFER.format("ensemble"), body, headers=headers)
    assert (reply.status, reply.content_type) == (400, "application/json")
    assert message in reply.json["error"]


async def test_binary_output_follows_plain_json(plain: PlainHttp) -> None:
    text = TEXT | {"data": [["x"]]}
    body = {"inputs": [text, COUNT], "parameters": {"binary_data_output": True, "any": 1.5}}
    reply = await plain.post(INFER.format("ensemble"), body)
    assert reply.content_type == "application/octet-stream"
    length = int(reply.headers["Inference-Header-Content-Length"])
    (output,) = json.loads(reply.body[:length])["outputs"]
    data = reply.body[length:]
    assert output["parameters"]["binary_data_size"] == len(data)
    body["parameters"] = {}
    reply = await plain.post(INFER.format("ensemble"), body)
    assert reply.content_type == "application/json"
    assert "Inference-Header-Content-Length" not in reply.headers
    (output,) = reply.json["outputs"]
    assert output == {
        "name": "text_output",
        "datatype": "BYTES",
        "shape": [1],
        "data": [data[4:].decode()],
    }


async def test_disconnect_cancels_the_request(mesh: Mesh, plain: PlainHttp) -> None:
    body = {"inputs": [TEXT | {"data": ["long"]}, COUNT | {"data": [8000]}]}
    asking = asyncio.create_task(plain.post(INFER.format("ensemble"), body))
    await eventually(mesh.used_blocks)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)

    async def cancelled() -> bool:
        samples = await scrape(mesh.router, reason="cancelled")
        return samples.get("trtmesh_router_items_finished_total") == 1

    await eventually(cancelled)
    await mesh.idle()
