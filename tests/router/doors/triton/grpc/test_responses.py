"""Serialised responses equal the messages of the protocol."""

from __future__ import annotations

import struct

import pytest
from trtmesh.kserve import grpc_service_pb2 as kserve
from trtmesh.router.doors.triton.grpc.responses import ResponseWriter
from trtmesh.router.doors.triton.tensors import Output, text_data


def text(data: str) -> Output:
    return Output("text_output", "BYTES", (1,), text_data([data]))


def ids(count: int) -> Output:
    return Output("output_ids", "INT32", (1, 1, count), struct.pack(f"<{count}i", *range(count)))


RESPONSES = [
    [],
    [text("")],
    [text("a")],
    [text("ü" * 100_000)],
    [text("b"), ids(3)],
    # A new shape must not reuse the previous head.
    [text("b"), ids(70_000)],
    [ids(0)],
]


@pytest.mark.parametrize("final", [True, False, None])
def test_serialised_response_equals_the_protocol_message(final: bool | None) -> None:
    writer = ResponseWriter("ensemble", "a name, ü")
    for outputs in [*RESPONSES, *RESPONSES]:
        expected = kserve.ModelInferResponse(
            model_name="ensemble", model_version="1", id="a name, ü"
        )
        if final is not None:
            expected.parameters["triton_final_response"].bool_param = final
        for output in outputs:
            expected.outputs.add(name=output.name, datatype=output.data_type, shape=output.shape)
            expected.raw_output_contents.append(output.data)
        if final is None:
            assert kserve.ModelInferResponse.FromString(writer.unary(outputs)) == expected
        else:
            whole = kserve.ModelStreamInferResponse(infer_response=expected)
            streamed = writer.streamed(outputs, final=final)
            assert kserve.ModelStreamInferResponse.FromString(streamed) == whole
            assert len(streamed) == whole.ByteSize()
