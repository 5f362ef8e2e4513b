"""The messages of the KServe protocol, beside those of Triton's client."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor
from tritonclient.grpc import model_config_pb2 as triton_config
from tritonclient.grpc import service_pb2 as triton_service
from trtmesh.kserve import grpc_service_pb2, model_config_pb2

OURS, TRITON = "trtmesh.kserve.grpc_service_pb2", "tritonclient.grpc.service_pb2"
EXCHANGE = """
import sys
from importlib import import_module
modules = {name: import_module(name) for name in sys.argv[1:]}
for name, other in zip(sys.argv[1:], reversed(sys.argv[1:])):
    sent = modules[name].ModelInferRequest(model_name="m", raw_input_contents=[b"x"])
    sent.parameters["p"].double_param = 0.5
    read = modules[other].ModelInferRequest.FromString(sent.SerializeToString())
    assert read.parameters["p"].double_param == 0.5 and read.raw_input_contents == [b"x"]
assert modules[name].ModelInferRequest is not modules[other].ModelInferRequest
"""


@pytest.mark.parametrize("order", [(OURS, TRITON), (TRITON, OURS)])
def test_both_sets_of_messages_share_a_process(order: tuple[str, str]) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", EXCHANGE, *order], check=True)


@pytest.mark.parametrize(
    ("ours", "tritons"),
    [
        (grpc_service_pb2.DESCRIPTOR, triton_service.DESCRIPTOR),
        (model_config_pb2.DESCRIPTOR, triton_config.DESCRIPTOR),
    ],
    ids=["grpc_service", "model_config"],
)
def test_messages_are_those_of_tritons_client(
    ours: FileDescriptor, tritons: FileDescriptor
) -> None:
    """Fields that a later release adds may be missing here; nothing may differ."""
    given, expected = dict(_elements(ours)), dict(_elements(tritons))
    assert {name: expected.get(name) for name in given} == given
    assert len(given) > 100


def _elements(file: FileDescriptor) -> Iterator[tuple[str, object]]:
    """Name and meaning on the wire of each field, enum value and method."""
    for message in file.message_types_by_name.values():
        yield from _message(message)
    for enum in file.enum_types_by_name.values():
        yield from _enum(enum)
    for service in file.services_by_name.values():
        for method in service.methods:
            streams = (method.client_streaming, method.server_streaming)
            yield (
                method.full_name,
                (method.input_type.full_name, method.output_type.full_name, streams),
            )


def _message(message: Descriptor) -> Iterator[tuple[str, object]]:
    for field in message.fields:
        yield field.full_name, _field(field)
    for enum in message.enum_types:
        yield from _enum(enum)
    for nested in message.nested_types:
        yield from _message(nested)


def _enum(enum: EnumDescriptor) -> Iterator[tuple[str, object]]:
    for value in enum.values:
        yield f"{enum.full_name}.{value.name}", value.number


def _field(field: FieldDescriptor) -> object:
    kind = field.message_type or field.enum_type
    of = "" if kind is None else kind.full_name
    choice = "" if field.containing_oneof is None else field.containing_oneof.name
    return field.number, field.type, field.is_repeated, field.is_packed, of, choice
