"""Raw and typed elements of inputs, and refusals."""

from __future__ import annotations

import struct
import tracemalloc
from contextlib import suppress
from typing import Any

import pytest
from compat.triton import asked
from leaks import alive, without_collector
from trtmesh.chassis.errors import InvalidRequest
from trtmesh.kserve import grpc_service_pb2 as kserve
from trtmesh.router.doors.triton import calls
from trtmesh.router.doors.triton.calls import read_call
from trtmesh.router.doors.triton.models import triton_models
from trtmesh.router.doors.triton.settings import TritonSettings
from trtmesh.router.doors.triton.templates.template import Call
from trtmesh.router.doors.triton.tensors import MOST_TEXTS

ENSEMBLE = triton_models(TritonSettings())["ensemble"]
CORE = triton_models(TritonSettings())["tensorrt_llm"]
RAW = {
    "text_input": ("BYTES", struct.pack("<I", 2) + b"hi"),
    "max_tokens": ("INT32", struct.pack("<i", 7)),
    "seed": ("UINT64", struct.pack("<Q", 2**63)),
    "top_p": ("FP32", struct.pack("<f", 0.5)),
    "return_log_probs": ("BOOL", b"\1"),
}
TYPED = {
    "text_input": ("bytes_contents", b"hi"),
    "max_tokens": ("int_contents", 7),
    "seed": ("uint64_contents", 2**63),
    "top_p": ("fp32_contents", 0.5),
    "return_log_probs": ("bool_contents", True),
}


def raw_request() -> Any:
    request = kserve.ModelInferRequest(model_name="ensemble")
    for name, (data_type, data) in RAW.items():
        request.inputs.add(name=name, datatype=data_type, shape=(1, 1))
        request.raw_input_contents.append(data)
    return request


def typed_request() -> Any:
    request = kserve.ModelInferRequest(model_name="ensemble")
    for name, (field, value) in TYPED.items():
        given = request.inputs.add(name=name, datatype=RAW[name][0], shape=(1, 1))
        getattr(given.contents, field).append(value)
    return request


def test_raw_and_typed_contents_give_equal_requests() -> None:
    raw, typed = (
        asked(read_call(ENSEMBLE, request)) for request in (raw_request(), typed_request())
    )
    assert raw == typed
    (item,) = raw.items
    assert (item.prompt.text, item.config.stopping.max_tokens) == ("hi", 7)
    assert (item.config.sampling.seed, item.config.sampling.top_p) == (2**63, 0.5)
    assert item.config.output.log_probs


def refused(request: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        asked(read_call(ENSEMBLE, request))
    return caught.value.message


def test_mixed_raw_and_typed_contents_are_refused() -> None:
    request = typed_request()
    request.raw_input_contents.append(b"")
    assert "contents field must not be specified when using raw_input_contents" in refused(request)


@pytest.mark.parametrize(
    ("index", "data", "message"),
    [
        (1, b"\0", "input byte size mismatch for input 'max_tokens'"),
        (0, b"\5\0\0\0hi", "incomplete string length indicator or data"),
        (0, b"", "unexpected number of string elements 0 for inference input 'text_input'"),
        (0, struct.pack("<I", 1) + b"\xff", "text_input is not valid UTF-8"),
    ],
)
def test_malformed_raw_contents_are_refused(index: int, data: bytes, message: str) -> None:
    request = raw_request()
    request.raw_input_contents[index] = data
    assert message in refused(request)


def test_surplus_raw_contents_are_refused() -> None:
    request = raw_request()
    request.raw_input_contents.append(b"more")
    assert "raw_input_contents has 1 more entries" in refused(request)


def test_contents_of_another_type_are_refused() -> None:
    request = typed_request()
    request.inputs[1].contents.fp32_contents.append(1.0)
    assert "unexpected explicit tensor data for input tensor 'max_tokens'" in refused(request)


def test_repeated_input_is_refused() -> None:
    request = typed_request()
    request.inputs.append(request.inputs[0])
    assert "input 'text_input' already exists in request" in refused(request)


def test_shared_memory_is_refused() -> None:
    request = raw_request()
    request.inputs[0].parameters["shared_memory_region"].string_param = "x"
    assert "is in shared memory" in refused(request)


def with_parameters(count: int) -> Any:
    request = raw_request()
    for number in range(count):
        request.parameters[str(number)].int64_param = number
    return request


def with_outputs(count: int) -> Any:
    request = raw_request()
    for _ in range(count):
        request.outputs.add(name="text_output")
    return request


def with_id(length: int) -> Any:
    request = raw_request()
    request.id = "i" * length
    return request


def with_texts(count: int) -> Any:
    request = raw_request()
    request.inputs.add(name="stop_words", datatype="BYTES", shape=(1, count))
    request.raw_input_contents.append(bytes(4 * count))
    return request


def with_typed_words(ids: int) -> Any:
    request = kserve.ModelInferRequest(model_name="tensorrt_llm")
    given = request.inputs.add(name="stop_words_list", datatype="INT32", shape=(1, 2, ids))
    given.contents.int_contents.extend([1] * 2 * ids)
    return request


@pytest.mark.parametrize(
    ("build", "most"),
    [
        (with_parameters, calls.MOST_PARAMETERS),
        (with_outputs, calls.MOST_OUTPUTS),
        (with_id, calls.MOST_ID_CHARACTERS),
        (with_texts, MOST_TEXTS),
    ],
)
def test_parts_are_counted_before_they_are_copied(build: Any, most: int) -> None:
    read_call(ENSEMBLE, build(most))
    with pytest.raises(InvalidRequest, match=f"has {most + 1} .*but must have at most {most}"):
        read_call(ENSEMBLE, build(most + 1))


def test_dimensions_are_counted_before_they_are_copied() -> None:
    request, count = raw_request(), 2**17
    request.inputs[0].shape[:] = [1] * count
    tracemalloc.start()
    try:
        with pytest.raises(
            InvalidRequest, match=f"has {count} dimensions but must have at most 16"
        ):
            read_call(ENSEMBLE, request)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < count


def test_typed_elements_are_counted_before_they_are_converted() -> None:
    with pytest.raises(InvalidRequest, match="has 1048578 typed elements"):
        read_call(CORE, with_typed_words(calls.MOST_TYPED_ELEMENTS // 2 + 1))


def test_elements_of_a_row_are_counted_before_they_are_copied() -> None:
    """Contents of another size are not even looked at."""
    count = 2**20 + 1
    request = kserve.ModelInferRequest(model_name="tensorrt_llm")
    request.inputs.add(name="input_ids", datatype="INT32", shape=(1, count))
    request.raw_input_contents.append(b"")
    with pytest.raises(InvalidRequest, match=f"has {count} elements but must have at most {2**20}"):
        read_call(CORE, request)


def test_refused_rows_keep_no_call() -> None:
    """Services rarely collect garbage."""
    request = raw_request()
    request.raw_input_contents[3] = struct.pack("<f", 9)
    with without_collector():
        with suppress(InvalidRequest):
            asked(read_call(ENSEMBLE, request))
        assert not alive(Call)


def test_names_are_echoed_in_part() -> None:
    request = raw_request()
    request.inputs.add(name="x" * 2**20, datatype="INT32", shape=(1, 1))
    assert len(refused(request)) < 1000
