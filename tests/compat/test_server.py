"""Server calls besides inference."""

from __future__ import annotations

import base64
from typing import Any

import grpc
import numpy as np
import pytest
from compat.plain_http import PlainHttp
from compat.triton import Triton
from e2e.mesh import Mesh, eventually
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tritonclient.utils import InferenceServerException
from trtmesh.kserve import grpc_service_pb2 as kserve
from trtmesh.router.doors.triton.grpc.door import DESCRIPTIONS, UNSUPPORTED

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODELS = ["ensemble", "tensorrt_llm_bls", "tensorrt_llm", "preprocessing", "postprocessing"]


async def test_server_is_live_and_ready(triton: Triton) -> None:
    client = triton.client
    assert await client.is_server_live()
    # Health follows the fleet within a tenth of a second.
    await eventually(client.is_server_ready)
    for model in MODELS:
        assert await client.is_model_ready(model)
        assert await client.is_model_ready(model, "1")
        assert not await client.is_model_ready(model, "2")
    assert not await client.is_model_ready("nothing")
    index = await client.get_model_repository_index()
    assert [(model.name, model.state) for model in index.models] == [(m, "READY") for m in MODELS]
    metadata = await client.get_server_metadata()
    assert metadata.name == "trtmesh"
    assert "statistics" in metadata.extensions


async def test_reflection_describes_the_service(mesh: Mesh) -> None:
    """As grpcurl asks before a call."""
    ask = reflection_pb2.ServerReflectionRequest(
        file_containing_symbol="inference.GRPCInferenceService"
    )
    async with grpc.aio.insecure_channel(mesh.router.address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask]))
        answer = (await call.read()).file_descriptor_response
    files = [FileDescriptorProto.FromString(data) for data in answer.file_descriptor_proto]
    (service,) = [service for file in files for service in file.service]
    assert {"ModelInfer", "ModelStreamInfer"} <= {method.name for method in service.method}
    assert "ModelConfig" in {message.name for file in files for message in file.message_type}


@pytest.mark.parametrize("model", MODELS)
async def test_metadata_and_configuration_agree(triton: Triton, model: str) -> None:
    metadata = await triton.client.get_model_metadata(model)
    config = (await triton.client.get_model_config(model)).config
    assert [given.name for given in metadata.inputs] == [given.name for given in config.input]
    assert [out.name for out in metadata.outputs] == [out.name for out in config.output]
    assert [list(i.shape) for i in metadata.inputs] == [[-1, *i.dims] for i in config.input]
    assert config.max_batch_size == 128
    streams = model in ("ensemble", "tensorrt_llm_bls", "tensorrt_llm")
    assert config.model_transaction_policy.decoupled == streams
    steps = [step.model_name for step in config.ensemble_scheduling.step]
    assert steps == (
        ["preprocessing", "tensorrt_llm", "postprocessing"] if model == "ensemble" else []
    )


async def test_core_model_reshapes_scalars(triton: Triton) -> None:
    config = (await triton.client.get_model_config("tensorrt_llm")).config
    inputs = {given.name: given for given in config.input}
    assert inputs["input_lengths"].HasField("reshape")
    assert not inputs["input_lengths"].reshape.shape
    assert not inputs["input_ids"].HasField("reshape")
    assert inputs["input_ids"].allow_ragged_batch


async def test_statistics_count_requests(triton: Triton) -> None:
    before = (await triton.client.get_inference_statistics("postprocessing")).model_stats[0]
    good = {
        "TOKENS_BATCH": np.array([[[5, 6]]], np.int32),
        "SEQUENCE_LENGTH": np.array([[2]], np.int32),
    }
    await triton.infer("postprocessing", good)
    with pytest.raises(InferenceServerException, match="below 0"):
        await triton.infer("postprocessing", good | {"SEQUENCE_LENGTH": np.array([[-1]], np.int32)})
    after = (await triton.client.get_inference_statistics("postprocessing")).model_stats[0]
    assert after.inference_stats.success.count == before.inference_stats.success.count + 1
    assert after.inference_stats.fail.count == before.inference_stats.fail.count + 1
    assert after.inference_count == before.inference_count + 1
    everything = (await triton.client.get_inference_statistics()).model_stats
    assert [stats.name for stats in everything] == MODELS


async def test_log_and_trace_settings(triton: Triton) -> None:
    client = triton.client
    settings = await client.get_log_settings(as_json=True)
    assert "log_verbose_level" in settings["settings"]
    changed = await client.update_log_settings({"log_verbose_level": 1})
    assert changed.settings["log_verbose_level"].uint32_param == 1
    assert changed.settings["log_info"].bool_param
    await client.update_log_settings({"log_verbose_level": 0})
    with pytest.raises(InferenceServerException, match="log_file"):
        await client.update_log_settings({"log_file": "x"})
    trace = await client.get_trace_settings()
    assert list(trace.settings["trace_level"].value) == ["OFF"]
    with pytest.raises(InferenceServerException, match="does not trace"):
        await client.update_trace_settings(settings={"trace_level": "TENSOR"})


NO_SHARED_MEMORY = "this server does not serve shared memory; send tensors in the request"
NO_MODEL_CONTROL = (
    "this server does not serve loading and unloading of models; the router's setting triton.models names the served"
    " models"
)
REFUSED: list[tuple[str, tuple[Any, ...], str, str, str]] = [
    ("get_system_shared_memory_status", (), "GET", "systemsharedmemory/status", NO_SHARED_MEMORY),
    ("register_system_shared_memory", ("r", "/k", 8), "POST",
     "systemsharedmemory/region/r/register", NO_SHARED_MEMORY),
    ("unregister_system_shared_memory", (), "POST", "systemsharedmemory/unregister",
     NO_SHARED_MEMORY),
    ("get_cuda_shared_memory_status", (), "GET", "cudasharedmemory/status", NO_SHARED_MEMORY),
    ("register_cuda_shared_memory", ("r", base64.b64encode(b"h"), 0, 8), "POST",
     "cudasharedmemory/region/r/register", NO_SHARED_MEMORY),
    ("unregister_cuda_shared_memory", (), "POST", "cudasharedmemory/unregister", NO_SHARED_MEMORY),
    ("load_model", ("ensemble",), "POST", "repository/models/ensemble/load", NO_MODEL_CONTROL),
    ("unload_model", ("ensemble",), "POST", "repository/models/ensemble/unload", NO_MODEL_CONTROL),
]  # fmt: skip


@pytest.mark.parametrize(("method", "arguments", "verb", "path", "sentence"), REFUSED)
async def test_unsupported_feature_is_refused_alike_by_both_doors(
    mesh: Mesh,
    triton: Triton,
    method: str,
    arguments: tuple[Any, ...],
    verb: str,
    path: str,
    sentence: str,
) -> None:
    with pytest.raises(InferenceServerException) as caught:
        await getattr(triton.client, method)(*arguments)
    assert caught.value.status() == "StatusCode.UNIMPLEMENTED"
    assert caught.value.message() == sentence
    async with PlainHttp(mesh.router.http_address) as http:
        reply = await http.call(verb, f"/v2/{path}")
    assert (reply.status, reply.json) == (501, {"error": sentence})


async def test_every_method_of_the_service_has_an_answer() -> None:
    methods = kserve.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    assert set(methods) == {"ModelInfer", "ModelStreamInfer", *DESCRIPTIONS, *UNSUPPORTED}


async def test_unknown_model_is_not_found(triton: Triton) -> None:
    for ask in (
        triton.client.get_model_metadata,
        triton.client.get_model_config,
        triton.client.get_inference_statistics,
    ):
        with pytest.raises(InferenceServerException) as caught:
            await ask("nothing")
        assert caught.value.status() == "StatusCode.NOT_FOUND"
        assert caught.value.message() == "Request for unknown model: 'nothing' is not found"
