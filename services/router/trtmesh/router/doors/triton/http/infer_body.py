"""Bodies of `infer`: JSON with tensor data inside or, by the binary tensor data extension, appended."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trtmesh.chassis.errors import InvalidRequest
from trtmesh.chassis.logs import rebind_request_id
from trtmesh.chassis.parsing import MAX_DIMENSIONS
from trtmesh.chassis.quoting import cut
from trtmesh.kserve import grpc_service_pb2 as kserve
from trtmesh.router.doors.http.answers import to_json
from trtmesh.router.doors.http.bodies import Body
from trtmesh.router.doors.http.json_bodies import JSON_COST, parse_json
from trtmesh.router.doors.triton.http.json_tensors import flatten, read_elements, values
from trtmesh.router.doors.triton.models import MODEL_VERSION
from trtmesh.router.doors.triton.templates.template import Model
from trtmesh.router.doors.triton.tensors import Contents, Output

T = TypeVar("T")

HEADER_LENGTH = "Inference-Header-Content-Length"
RESERVED_PREFIX = "triton_"
MOST_PARAMETERS = 256
"""Most parameters of a request."""
MOST_LENGTH_DIGITS = 10
BINARY_SIZE = "binary_data_size"
WORDS: Mapping[type, str] = {str: "string", bool: "boolean", dict: "object", list: "array"}
"""JSON's words for types."""


@dataclass(slots=True)
class BinaryOutputs:
    default: bool = False
    named: dict[str, bool] = field(default_factory=dict)

    def __contains__(self, name: object) -> bool:
        return self.named.get(str(name), self.default)


@dataclass(slots=True)
class Asked:
    """The request of a body: a ModelInferRequest with separate raw contents, since parts of the body need no copy."""

    request: Any
    raw: list[Contents] = field(default_factory=list)
    binary: BinaryOutputs = field(default_factory=BinaryOutputs)


def begin_request(model: Model, message: Mapping[str, Any]) -> Asked:
    """A ModelInferRequest with an id alone, for the log lines of its refusal. Raises InvalidRequest."""
    request = kserve.ModelInferRequest(model_name=model.name, id=_value(message, "id", str, ""))
    rebind_request_id(request.id)
    return Asked(request)


def read_infer(model: Model, header_length: str | None, most_json_bytes: int, body: Body) -> Asked:
    """Parses a body; its JSON has `header_length` bytes, None without binary data. Raises InvalidRequest."""
    length = _header_length(model, header_length, len(body))
    whole = memoryview(body)
    message = parse_json(whole[:length], most_json_bytes)
    asked = begin_request(model, message)
    parameters = _value(message, "parameters", dict, {})
    for name, value in parameters.items():
        if name == "binary_data_output":
            asked.binary.default = _value(parameters, name, bool)
        else:
            set_parameter(asked.request, name, value)
    rest = whole[length:]
    for given in _value(message, "inputs", list, []):
        rest = _read_input(asked, given, rest)
    if rest:
        raise InvalidRequest(
            f"unexpected additional input data for model '{model.name}': {len(rest)} bytes belong to no input"
        )
    for wanted in _value(message, "outputs", list, []):
        _read_output(asked.request, wanted, asked.binary)
    return asked


def write_infer(
    model: Model, request_id: str, outputs: Sequence[Output], binary: BinaryOutputs
) -> tuple[bytes, int | None]:
    """The body of a response, and the length of the JSON if binary data follow."""
    told = []
    data: list[bytes] = []
    for output in outputs:
        described: dict[str, Any] = {
            "name": output.name,
            "datatype": output.data_type,
            "shape": list(output.shape),
        }
        if output.name in binary:
            described["parameters"] = {BINARY_SIZE: len(output.data)}
            data.append(output.data)
        else:
            described["data"] = values(output)
        told.append(described)
    message: dict[str, Any] = {"id": request_id} if request_id else {}
    message |= {"model_name": model.name, "model_version": MODEL_VERSION}
    if parameters := response_parameters(model):
        message["parameters"] = parameters
    head = to_json(message | {"outputs": told}, json_cost(outputs))
    return b"".join((head, *data)), len(head) if data else None


def json_cost(outputs: Sequence[Output]) -> int:
    """Bytes of a protobuf message that take as long as the JSON of outputs."""
    return sum(len(output.data) for output in outputs) * JSON_COST


def response_parameters(model: Model) -> dict[str, Any]:
    """The parameters in every response of Triton's ensembles, although there is no sequence."""
    return (
        {"sequence_id": 0, "sequence_start": False, "sequence_end": False}
        if model.is_ensemble
        else {}
    )


def set_parameter(request: Any, name: str, value: Any) -> None:
    """Sets a parameter of a ModelInferRequest. Raises InvalidRequest."""
    if name.startswith(RESERVED_PREFIX):
        raise InvalidRequest(
            f"parameter '{name}': parameter keys starting with '{RESERVED_PREFIX}' are reserved for Triton usage and"
            " should not be specified."
        )
    if name not in request.parameters and len(request.parameters) == MOST_PARAMETERS:
        raise InvalidRequest(
            f"parameter '{name}': a request must have at most {MOST_PARAMETERS} parameters"
        )
    if not _put(request.parameters[name], value):
        raise InvalidRequest(
            f"parameter '{name}' has invalid type. It should be either 'int', 'bool', 'double', or 'string'."
        )


def _put(parameter: Any, value: Any) -> bool:
    """Sets an InferParameter; False for a value of another type."""
    match value:
        case bool():
            parameter.bool_param = value
        case int() if -(2**63) <= value < 2**63:
            parameter.int64_param = value
        case float():
            parameter.double_param = value
        case str():
            parameter.string_param = value
        case _:
            return False
    return True


def _value(message: Mapping[str, Any], key: str, kind: type[T], default: T | None = None) -> T:
    """A value of a JSON object. Raises InvalidRequest for another type, or without a value and a default."""
    value = message.get(key, default)
    if not isinstance(value, kind):
        word = WORDS[kind]
        raise InvalidRequest(
            f"Unable to parse '{key}': attempt to access JSON non-{word} as {word}"
        )
    return value


def _header_length(model: Model, given: str | None, body_length: int) -> int:
    if given is None:
        return body_length
    if not given.isascii() or not given.isdecimal() or len(given) > MOST_LENGTH_DIGITS:
        raise InvalidRequest(f"Unable to parse {HEADER_LENGTH}, got: {cut(given)}")
    length = int(given)
    if length == 0:
        # The body would be the data of an only input, but these models have several inputs.
        raise InvalidRequest(
            f"Raw request must only have 1 input (found 1) to be deduced but got {len(model.inputs)} inputs in"
            f" '{model.name}' model configuration"
        )
    if length > body_length:
        raise InvalidRequest(
            f"inference header size should be in range (0, {body_length}], got: {length}"
        )
    return length


def _read_input(asked: Asked, given: Any, rest: memoryview) -> memoryview:
    """Adds an input, with binary data from `rest`; returns the remaining bytes."""
    if not isinstance(given, dict):
        raise InvalidRequest("Unable to parse 'inputs': each must be a JSON object")
    name, data_type = _value(given, "name", str), _value(given, "datatype", str)
    shape = given.get("shape")
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_DIMENSIONS
        or not all(type(n) is int and abs(n) < 2**31 for n in shape)
    ):
        raise InvalidRequest(
            f"Unable to parse 'shape': input '{name}' must have a list of at most {MAX_DIMENSIONS} numbers"
        )
    tensor = asked.request.inputs.add(name=name, datatype=data_type, shape=shape)
    parameters = _value(given, "parameters", dict, {})
    _check_one_content(given, parameters)
    for key, value in parameters.items():
        if key != BINARY_SIZE and not _put(tensor.parameters[key], value):
            raise InvalidRequest(f"parameter '{key}' of input '{name}' has invalid type.")
    if "data" in given:
        elements = flatten(given["data"])
        if len(elements) != math.prod(shape):
            raise InvalidRequest(
                f"Unable to parse 'data': Shape does not match true shape of 'data' field: input '{name}' has"
                f" {len(elements)} elements but shape {shape}"
            )
        asked.raw.append(read_elements(name, data_type, elements))
        return rest
    size = parameters.get(BINARY_SIZE, 0)
    if type(size) is not int or size < 0:
        raise InvalidRequest(f"Unable to parse '{BINARY_SIZE}' of input '{name}'")
    if size > len(rest):
        raise InvalidRequest(
            f"unexpected size for input '{name}', expecting {size - len(rest)} additional bytes for model"
            f" '{asked.request.model_name}'"
        )
    asked.raw.append(rest[:size])
    return rest[size:]


def _check_one_content(given: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
    places = ["'data'"] if "data" in given else []
    places += [f"'{key}'" for key in (BINARY_SIZE, "shared_memory_region") if key in parameters]
    if len(places) != 1:
        raise InvalidRequest(
            f"Input must set only one of the following fields: 'data', '{BINARY_SIZE}' in 'parameters',"
            " 'shared_memory_region' in 'parameters'. But"
            f" {'set ' + ' '.join(places) if places else 'no field is set'}"
        )


def _read_output(request: Any, wanted: Any, binary: BinaryOutputs) -> None:
    if not isinstance(wanted, dict):
        raise InvalidRequest("Unable to parse 'outputs': each must be a JSON object")
    output = request.outputs.add(name=_value(wanted, "name", str))
    parameters = _value(wanted, "parameters", dict, {})
    for key, value in parameters.items():
        if key == "binary_data":
            binary.named[output.name] = _value(parameters, key, bool)
        elif not _put(output.parameters[key], value):
            raise InvalidRequest(f"parameter '{key}' of output '{output.name}' has invalid type.")
    # Naming an output without the parameter asks for JSON, regardless of the default.
    binary.named.setdefault(output.name, False)
