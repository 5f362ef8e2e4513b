"""Errors in the words of Triton's clients: in names of tensors and rows, in Triton's own sentences."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import grpc
import numpy as np
import pytest
from compat.conftest import FLAGS
from compat.plain_http import PlainHttp
from compat.triton import Triton
from e2e.mesh import PATIENT, Mesh, running_mesh
from tritonclient.utils import InferenceServerException
from trtmesh.kserve import grpc_service_pb2 as kserve

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS: dict[str, Any] = {"input_ids": [5, 6], "input_lengths": 2, "request_output_len": 5}
TEXT: dict[str, Any] = {"text_input": "x", "max_tokens": 5}
TABLE = np.ones((1, 2, 3), np.float16)
NO_WORKER = "not supported by any worker of model demo; leave it out"
PICTURE = np.ones((1, 1, 2, 2, 3), np.uint8)
RANGES = {
    "retention_token_range_starts": [0],
    "retention_token_range_ends": [9],
    "retention_token_range_priorities": [200],
    "retention_token_range_durations_ms": [-1],
}
NO_DRAFT_MODEL = (
    "cannot perform speculative decoding without draft model: num_draft_tokens " + NO_WORKER
)
CASES: list[tuple[str, Mapping[str, Any], str]] = [
    ("tensorrt_llm", {"lora_task_id": 7}, "lora_task_id " + NO_WORKER),
    ("ensemble", {"prompt_embedding_table": TABLE}, "prompt_embedding_table " + NO_WORKER),
    ("ensemble", {"beam_width": 2, "length_penalty": 2.0}, "length_penalty " + NO_WORKER),
    ("tensorrt_llm", {"beam_width": 2, "len_penalty": 2.0}, "len_penalty " + NO_WORKER),
    (
        "ensemble",
        {"embedding_bias_words": "x", "embedding_bias_weights": 1.0},
        "embedding_bias_words, embedding_bias_weights " + NO_WORKER,
    ),
    ("tensorrt_llm", {"runtime_top_p": 3.0}, "runtime_top_p is 3.0 but must be in [0, 1]"),
    ("ensemble", {"top_p": 3.0}, "top_p is 3.0 but must be in [0, 1]"),
    ("ensemble", {"top_p": 3.0, "beam_width": 2}, "top_p is 3.0 but must be in [0, 1]"),
    ("tensorrt_llm", {"end_id": 60_000}, "end_id is 60000 but must be"),
    ("tensorrt_llm", RANGES, "retention_token_range_priorities is 200 but must be in [0, 100]"),
    ("tensorrt_llm_bls", {"image_bytes_input": PICTURE}, "image_bytes_input " + NO_WORKER),
    ("tensorrt_llm_bls", {"num_draft_tokens": 4}, NO_DRAFT_MODEL),
    (
        "tensorrt_llm_bls",
        {"num_draft_tokens": 4, "stream": True},
        "streaming is not supported with speculative decoding",
    ),
    (
        "tensorrt_llm_bls",
        {"num_draft_tokens": 4, "return_context_logits": True},
        "context logits are not supported with speculative decoding",
    ),
    (
        "tensorrt_llm_bls",
        {"num_draft_tokens": 4, "image_bytes_input": PICTURE},
        "Multimodal and speculative decoding is not currently supported",
    ),
]


@pytest.mark.parametrize(("model", "tensors", "text"), CASES)
async def test_error_names_the_tensor_sent(
    triton: Triton, model: str, tensors: Mapping[str, Any], text: str
) -> None:
    needed = TOKENS if model == "tensorrt_llm" else TEXT
    response = (await triton.stream(model, {**needed, **tensors}))[-1]
    assert text in response.error
    assert "row" not in response.error


REASONS: list[tuple[str, Mapping[str, Any], str]] = [
    ("ensemble", {"text_input": "x " * 9000}, "PROMPT_TOO_LONG"),
    ("tensorrt_llm", {"input_ids": [5] * 9000, "input_lengths": 9000}, "PROMPT_TOO_LONG"),
    ("narrow", {"beam_width": 3}, "INVALID_FIELD"),
    ("narrow", {"stream": True}, "INVALID_REQUEST"),
    ("ensemble", {"lora_task_id": 7}, "ADAPTER_NOT_FOUND"),
    ("tensorrt_llm_bls", {"num_draft_tokens": 4}, "UNSUPPORTED_FIELD"),
    ("tensorrt_llm_bls", {"num_draft_tokens": 4, "return_context_logits": True}, "UNSUPPORTED"),
]
NARROW = {"template": "ensemble", "decoupled": False, "max_beam_width": 2}


async def test_errors_under_tritons_status_keep_their_reason() -> None:
    """INTERNAL means that the software is at fault, which is wrong where the client is."""
    models = {name: {"template": name} for name, _, _ in REASONS if name != "narrow"}
    router_flags = ("--triton-models", json.dumps(models | {"narrow": NARROW}))
    engine_flags = (*FLAGS, "--simulated-adapters-slots", "1")
    async with running_mesh(
        engine_flags=engine_flags, router_flags=(*PATIENT, *router_flags)
    ) as mesh:
        async with PlainHttp(mesh.router.http_address) as http:
            for model, tensors, reason in REASONS:
                needed = TOKENS if model == "tensorrt_llm" else TEXT
                reply = await http.post(f"/v2/models/{model}/generate", {**needed, **tensors})
                assert reply.status == 500
                assert reply.headers["trtmesh-error-reason"] == reason, reply.json
        infer: Any = mesh.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        asked = message_of("ensemble", {**TEXT, "text_input": "x " * 9000})
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await infer(asked.SerializeToString())
        assert refused.value.code() is grpc.StatusCode.INTERNAL
        metadata = dict(refused.value.trailing_metadata() or ())
        assert metadata["trtmesh-error-reason"] == "PROMPT_TOO_LONG"


def message_of(model: str, tensors: Mapping[str, Any]) -> kserve.ModelInferRequest:
    sent = kserve.ModelInferRequest(model_name=model)
    for name, value in tensors.items():
        kind = "BYTES" if isinstance(value, str) else "INT32"
        given = sent.inputs.add(name=name, datatype=kind, shape=(1, 1)).contents
        if isinstance(value, str):
            given.bytes_contents.append(value.encode())
        else:
            given.int_contents.append(value)
    return sent


async def test_error_names_the_request_parameter(triton: Triton) -> None:
    (response,) = await triton.stream("tensorrt_llm", TOKENS, parameters={"request_type": "both"})
    assert response.error.startswith("parameter 'request_type' is 'both' but must be one of ")


def rows(**columns: list[Any]) -> dict[str, np.ndarray]:
    types = {int: np.int32, str: np.object_, float: np.float32}
    return {
        name: np.array([[value] for value in values], types[type(values[0])])
        for name, values in columns.items()
    }


THREE: dict[str, list[Any]] = {"text_input": ["a", "b", "c"], "max_tokens": [3, 3, 3]}


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"max_tokens": [3, 0, 3]}, "row 1: max_tokens must be a single value > 0, not 0"),
        ({"top_p": [1.0, 1.0, 3.0]}, "row 2: top_p is 3.0 but must be in [0, 1]"),
        ({"num_draft_tokens": [0, 2, 0]}, "Speculative decoding does not support batch size > 1."),
    ],
)
async def test_error_of_a_row_names_the_row(
    triton: Triton, more: dict[str, list[Any]], text: str
) -> None:
    tensors = rows(**(THREE | more))
    responses = await triton.stream("tensorrt_llm_bls", tensors)
    assert [response.error for response in responses if response.error] == [text]
    others = {response.number["batch_index"] for response in responses if response.outputs}
    assert others == ({0, 1, 2} - {int(text[4])} if text.startswith("row") else set())
    # A single response has either the outputs or the error.
    with pytest.raises(InferenceServerException) as refused:
        await triton.infer("tensorrt_llm_bls", tensors)
    assert refused.value.message() == text


async def test_event_stream_with_a_bad_row_has_the_other_rows(mesh: Mesh) -> None:
    """The good rows make the status."""
    body = {"text_input": ["a", "b", "c"], "max_tokens": [0, 3, 3]}
    path = "/v2/models/ensemble/generate_stream"
    async with PlainHttp(mesh.router.http_address) as http:
        reply = await http.post(path, body)
        assert reply.status == 200
        errors = [event["error"] for event in reply.events if "error" in event]
        assert errors == ["row 0: max_tokens must be a single value > 0, not 0"]
        assert sorted(e["batch_index"] for e in reply.events if "error" not in e) == [1, 2]
        reply = await http.post(path, body | {"max_tokens": [0, 0, 0]})
        assert reply.status == 400


@pytest.mark.parametrize("model", ["tensorrt_llm", "tensorrt_llm_bls"])
async def test_row_refused_by_the_worker_leaves_the_others(triton: Triton, model: str) -> None:
    end_ids = [1, 60_000, 1]
    tensors = rows(**THREE, end_id=end_ids)
    if model == "tensorrt_llm":
        columns = {"input_ids": [5, 6, 7], "input_lengths": [1, 1, 1]}
        tensors = rows(**columns, request_output_len=[3, 3, 3], end_id=end_ids)
    responses = await triton.stream(model, tensors)
    (error,) = [response.error for response in responses if response.error]
    assert error.startswith("row 1: end_id is 60000 but must be")
    whole = [response.number["batch_index"] for response in responses if response.outputs]
    assert sorted(whole) == [0, 2]


async def test_stacked_response_fails_with_its_failed_row() -> None:
    """The error has the executor's words."""
    flags = (*FLAGS, "--simulated-faults-fail-item", "2")
    async with (
        running_mesh(engine_flags=flags, router_flags=(*PATIENT, "--triton-decoupled", "")) as mesh,
        Triton(mesh.router.address) as triton,
    ):
        (response,) = await triton.stream("ensemble", rows(**THREE), request_id="mine")
        assert response.error.startswith("row ")
        row, words = response.error.removeprefix("row ").split(": ", 1)
        assert int(row) in range(3)
        assert words == (
            "Executor failed process requestId mine due to the following error: the item failed because"
            " simulated.faults.fail_item says so"
        )
        assert (await triton.infer("ensemble", rows(**THREE))).outputs["text_output"].size == 3


@pytest.mark.parametrize("missing", ["output_ids", "sequence_length"])
async def test_core_model_requires_its_two_outputs(triton: Triton, missing: str) -> None:
    left = {"output_ids", "sequence_length", "cum_log_probs"} - {missing}
    (response,) = await triton.stream("tensorrt_llm", TOKENS, outputs=sorted(left))
    assert response.error == f"{missing} tensor must be present in list of output tensors"
