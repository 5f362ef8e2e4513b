"""SageMaker's and Vertex AI's paths: readiness and inference of one model, off unless set."""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from compat.plain_http import PlainHttp
from compat.test_streams import native_text
from e2e.mesh import Mesh, eventually, router_before
from processes import run_to_exit, service_process
from trtmesh.chassis.errors import SettingsError

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "def f("
ASK = {"text_input": PROMPT, "max_tokens": 9}
INPUTS = [
    {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": [PROMPT]},
    {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [9]},
]
SAGEMAKER = {"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "ensemble"}
SAGEMAKER_BINARY = "application/vnd.sagemaker-triton.binary+json;json-header-size="
PREDICT = "/v1/endpoints/7/deployedModels/8:predict"
HEALTH = "/v1/endpoints/7/deployedModels/8"
VERTEX = {"AIP_PREDICT_ROUTE": PREDICT, "AIP_HEALTH_ROUTE": HEALTH}
VERTEX_BINARY = "application/vnd.vertex-ai-triton.binary+json;json-header-size="
REDIRECT = "X-Vertex-Ai-Triton-Redirect"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(workers: Mesh) -> AsyncIterator[Mesh]:
    async with router_before(workers) as mesh:
        yield mesh


@asynccontextmanager
async def router(
    mesh: Mesh, environment: Mapping[str, str], *flags: str
) -> AsyncIterator[PlainHttp]:
    """One more router of the mesh, with a platform's environment."""
    peers = ("--engines", mesh.engines[0].address, "--tokenizers", mesh.tokenizers[0].address)
    started = await mesh.start("router", "--port", "0", *peers, *flags, env=environment)
    async with PlainHttp(started.http_address) as http:
        await eventually(http.is_ready)
        yield http
    await started.stop()


async def test_platform_paths_are_off_by_default(mesh: Mesh) -> None:
    async with PlainHttp(mesh.router.http_address) as http:
        assert (await http.get("/ping")).status == 404
        for path in ("/invocations", PREDICT):
            assert (await http.post(path, ASK)).status == 404


async def test_sagemaker_paths_follow_the_variables_of_triton(mesh: Mesh) -> None:
    whole = PROMPT + await native_text(mesh, PROMPT, 9)
    async with router(mesh, SAGEMAKER) as http:
        ping = await http.get("/ping")
        assert (ping.status, ping.body) == (200, b"")
        reply = await http.post("/invocations", {"inputs": INPUTS})
        assert (reply.status, reply.content_type) == (200, "application/json")
        assert reply.json["outputs"][0]["data"] == [whole]
        reply = await http.post("/models", {"model_name": "x", "url": "/opt/ml/models/x"})
        assert reply.status == 501
        assert "does not serve loading and unloading of models" in reply.json["error"]
        assert (await http.post("/invocations", {"inputs": []})).status == 400
    generating = SAGEMAKER | {"SAGEMAKER_TRITON_INFERENCE_TYPE": "generate_stream"}
    async with router(mesh, generating) as http:
        reply = await http.post("/invocations", ASK | {"stream": True})
        assert PROMPT + "".join(event["text_output"] for event in reply.events) == whole


async def test_ping_may_tell_life_alone() -> None:
    environment = SAGEMAKER | {"SAGEMAKER_TRITON_PING_MODE": "live"}
    for given, status in ((SAGEMAKER, 400), (environment, 200)):
        flags = ("--port", "0", "--engines", "127.0.0.1:1")
        async with (
            service_process("router", *flags, env=given) as started,
            PlainHttp(started.http_address) as http,
        ):
            assert (await http.get("/ping")).status == status


@pytest.mark.parametrize(
    ("environment", "path", "binary"),
    [(SAGEMAKER, "/invocations", SAGEMAKER_BINARY), (VERTEX, PREDICT, VERTEX_BINARY)],
)
async def test_platform_names_the_length_of_the_json_in_the_content_type(
    mesh: Mesh, environment: Mapping[str, str], path: str, binary: str
) -> None:
    text = PROMPT.encode()
    data = struct.pack("<I", len(text)) + text
    given: dict[str, Any] = {"name": "text_input", "datatype": "BYTES", "shape": [1, 1]}
    given["parameters"] = {"binary_data_size": len(data)}
    outputs = [{"name": "text_output", "parameters": {"binary_data": True}}]
    head = json.dumps({"inputs": [given, INPUTS[1]], "outputs": outputs}).encode()
    flags = ("--http-vertex-ai-model", "ensemble")
    async with router(mesh, environment, *flags) as http:
        headers = {"Content-Type": f"{binary}{len(head)}"}
        reply = await http.post(path, head + data, headers=headers)
        assert reply.status == 200, reply.body
        assert reply.content_type.startswith(binary)
        length = int(reply.content_type.removeprefix(binary))
        (output,) = json.loads(reply.body[:length])["outputs"]
        told = reply.body[length:]
        assert output["parameters"]["binary_data_size"] == len(told)
        assert told[4:].decode() == PROMPT + await native_text(mesh, PROMPT, 9)
        headers = {"Content-Type": f"{binary}many"}
        assert (await http.post(path, head + data, headers=headers)).status == 400


async def test_vertex_paths_follow_the_variables_of_the_platform(mesh: Mesh) -> None:
    new = await native_text(mesh, PROMPT, 9)
    async with router(mesh, VERTEX, "--http-vertex-ai-model", "ensemble") as http:
        health = await http.get(HEALTH)
        assert (health.status, health.body) == (200, b"")
        reply = await http.post(PREDICT, {"inputs": INPUTS})
        assert reply.json["outputs"][0]["data"] == [PROMPT + new]

        async def redirected(target: str, body: Any) -> Any:
            return await http.post(PREDICT, body, headers={REDIRECT: target})

        reply = await redirected("v2/models/tensorrt_llm_bls/generate", ASK)
        assert reply.json["text_output"] == PROMPT + new
        reply = await redirected(
            "v2/models/ensemble/versions/1/generate_stream", ASK | {"stream": True}
        )
        assert "".join(event["text_output"] for event in reply.events) == new
        reply = await redirected("v2/models/nothing/infer", {"inputs": INPUTS})
        assert reply.status == 404
        reply = await redirected("v2/repository/index", {})
        assert (reply.status, REDIRECT in reply.json["error"]) == (400, True)


async def test_vertex_predicts_with_the_only_model(mesh: Mesh) -> None:
    only = json.dumps({"chat": {"template": "ensemble"}})
    async with router(mesh, VERTEX, "--triton-models", only) as http:
        reply = await http.post(PREDICT, {"inputs": INPUTS})
        assert reply.json["model_name"] == "chat"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (VERTEX, "router.http.vertex_ai.model is '' but must name a Triton model: ensemble, "),
        (
            {"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "gpt"},
            "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME is 'gpt' but must name a Triton model: ensemble, ",
        ),
        ({"AIP_PREDICT_ROUTE": PREDICT}, "AIP_HEALTH_ROUTE and AIP_PREDICT_ROUTE are ['', '/v1/"),
        (VERTEX | {"AIP_HEALTH_ROUTE": "x"}, "AIP_PREDICT_ROUTE are ['x', '/v1/"),
        (
            SAGEMAKER | {"SAGEMAKER_TRITON_INFERENCE_TYPE": "chat"},
            "SAGEMAKER_TRITON_INFERENCE_TYPE is 'chat' but must be one of infer, generate, ",
        ),
    ],
)
async def test_router_does_not_start_with_a_wrong_variable_of_a_platform(
    environment: Mapping[str, str], message: str
) -> None:
    ended = await run_to_exit(
        *("router", "--port", "0", "--http-port", "0", "--engines", "127.0.0.1:1"), env=environment
    )
    assert ended.status == SettingsError.exit_status
    assert message in ended.stderr
