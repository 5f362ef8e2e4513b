"""Bodies of `generate` and `generate_stream`: plain JSON; keys are inputs of the model or request parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from trtmesh.chassis.errors import InvalidRequest
from trtmesh.router.doors.http.answers import to_json
from trtmesh.router.doors.http.bodies import Body
from trtmesh.router.doors.http.json_bodies import parse_json
from trtmesh.router.doors.triton.http.infer_body import (
    Asked,
    begin_request,
    json_cost,
    response_parameters,
    set_parameter,
)
from trtmesh.router.doors.triton.http.json_tensors import (
    BINARY_ONLY,
    flatten,
    read_elements,
    values,
)
from trtmesh.router.doors.triton.http.misspelt_inputs import MisspeltInputs
from trtmesh.router.doors.triton.models import MODEL_VERSION
from trtmesh.router.doors.triton.templates.template import Model
from trtmesh.router.doors.triton.tensors import Output, TensorSpec

NESTED = "parameters"
"""An object under this key is merged into the top level."""


def read_generate(model: Model, most_bytes: int, body: Body) -> Asked:
    """Makes a ModelInferRequest of at most `most_bytes` of JSON. Raises InvalidRequest."""
    message = parse_json(body, most_bytes, partial(_said_twice, model)) if body else {}
    asked, misspelt = begin_request(model, message), MisspeltInputs(model)
    own = {k: v for k, v in message.items() if k not in ("id", NESTED)}
    _read_keys(asked, model, own, misspelt)
    nested = message.get(NESTED, {})
    if not isinstance(nested, dict):
        raise InvalidRequest(
            f"Expected JSON object for keyword: '{NESTED}': attempt to access JSON non-object as object"
        )
    _read_keys(asked, model, nested, misspelt)
    return asked


def write_generate(model: Model, request_id: str, outputs: Sequence[Output]) -> bytes:
    """A response: each output's value, as a list unless there is exactly one."""
    return to_json(_response(model, request_id, outputs), json_cost(outputs))


def _response(model: Model, request_id: str, outputs: Sequence[Output]) -> dict[str, Any]:
    message = response_parameters(model)
    for output in outputs:
        elements = values(output)
        message[output.name] = elements[0] if len(elements) == 1 else elements
    if request_id:
        message["id"] = request_id
    message |= {"model_name": model.name, "model_version": MODEL_VERSION}
    return dict(sorted(message.items()))


def _read_keys(
    asked: Asked, model: Model, message: Mapping[str, Any], misspelt: MisspeltInputs
) -> None:
    for key, value in message.items():
        spec = model.inputs.get(key)
        if spec is None:
            misspelt.refuse(key)
            if key in asked.request.parameters:
                raise InvalidRequest(_said_twice(model, key))
            set_parameter(asked.request, key, value)
        else:
            _add_input(asked, spec, flatten(value), model.batch_dims)


def _said_twice(model: Model, key: str) -> str:
    kind = "input" if key in model.inputs else "parameter"
    return f"{kind} '{key}' already exists in request"


def _add_input(
    asked: Asked, spec: TensorSpec, elements: Sequence[Any], batch_dims: Sequence[int]
) -> None:
    data_type = _data_type(spec, elements)
    shape = _shape(spec, len(elements), batch_dims)
    asked.request.inputs.add(name=spec.name, datatype=data_type, shape=shape)
    asked.raw.append(read_elements(spec.name, data_type, elements))


def _data_type(spec: TensorSpec, elements: Sequence[Any]) -> str:
    """The input's first type with a JSON form, BOOL if all elements are booleans."""
    able = [data_type for data_type in spec.data_types if data_type not in BINARY_ONLY]
    if "BOOL" in able and elements and all(type(element) is bool for element in elements):
        return "BOOL"
    return able[0] if able else spec.data_type


def _shape(spec: TensorSpec, count: int, batch_dims: Sequence[int]) -> list[int]:
    """Infers a shape for `count` elements: the innermost open extent takes the rest, other open extents are 1. So three
    texts for an input of a single text are a batch. Raises InvalidRequest."""
    shape = [*batch_dims, *spec.dims]
    fixed = math.prod(extent for extent in shape if extent > 0)
    left, rest = divmod(count, fixed)
    for index in reversed(range(len(shape))):
        if shape[index] == -1:
            shape[index], left = left, 1
    if rest or left != 1:
        raise InvalidRequest(
            f"The schema can not convert input '{spec.name}' to tensor with proper shape"
        )
    return shape
