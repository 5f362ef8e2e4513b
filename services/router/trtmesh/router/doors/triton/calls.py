"""From a ModelInferRequest to a call: every tensor checked against its declaration, in Triton's own words."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from trtmesh.chassis.errors import InvalidRequest
from trtmesh.chassis.parsing import MAX_DIMENSIONS
from trtmesh.chassis.quoting import cut, quoted
from trtmesh.router.doors.triton.templates.template import Call, Model
from trtmesh.router.doors.triton.tensors import (
    ELEMENT_CODES,
    MOST_TEXTS,
    Contents,
    Elements,
    InputTensor,
    Shape,
    split_elements,
)

CONTENTS_FIELDS = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "INT32": "int_contents",
    "UINT32": "uint_contents",
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "BYTES": "bytes_contents",
}
"""Fields of typed contents; the 16-bit types have none and come raw only."""

MOST_PARAMETERS = 256
"""Most parameters of a request, an input or an output."""
MOST_ID_CHARACTERS = 1024
MOST_OUTPUTS = 256
"""Most requested outputs."""
ALL_OUTPUTS: frozenset[str] = frozenset()
PIECE_BYTES = 2**20
"""Bytes that are copied at once: other threads run between the pieces."""
REMEMBERED_FORMS = 4096
"""Data types and shapes of inputs that were found to fit: clients send the same few."""
MOST_TYPED_ELEMENTS = 2**20
"""Most elements of typed contents. Typed contents are converted one by one, raw contents are copied."""

BATCH_DIMENSION_NOTE = (
    " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each"
    " input shape. If you want to specify the full shape including the batch dim in your input dims config, try"
    " setting max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)

ONE_FOR_ALL_ROWS = frozenset(
    {
        *("stop", "stream", "streaming", "beam_width", "num_return_sequences", "return_log_probs"),
        *("return_context_logits", "return_generation_logits", "return_perf_metrics"),
        *("return_kv_cache_reuse_stats", "return_num_input_tokens", "return_num_output_tokens"),
        "output_log_probs",
    }
)
"""Inputs that shape the responses: all rows of a request must agree on them."""


def read_call(
    model: Model,
    request: Any,
    raw: Sequence[Contents] | None = None,
    *,
    unary: bool = False,
    is_large: bool = False,
) -> Call:
    """Reads a ModelInferRequest. `raw` are separate raw contents, and `unary` limits the request to a single response.
    Raises InvalidRequest."""
    arrived_ns = time.monotonic_ns()
    if raw is None:
        raw = request.raw_input_contents
    _check_counts(request)
    inputs, batch_size = _read_inputs(request, raw, model)
    if batch_size > 1:
        _check_alike(inputs, batch_size)
    _check_names(inputs, model)
    call = Call(
        model,
        request.id,
        inputs,
        batch_size,
        model.decoupled and not unary,
        _requested_outputs(model, request.outputs) if request.outputs else ALL_OUTPUTS,
        _parameters(request.parameters) if request.parameters else {},
        is_large,
        arrived_ns,
    )
    if not (call.stops or model.required <= inputs.keys()):
        raise _incomplete(inputs, model)
    model.template.check_outputs(call)
    return call


def _check_counts(request: Any) -> None:
    """Counts before anything is copied. Raises InvalidRequest."""
    _check_most("request", "characters in its id", request.id, MOST_ID_CHARACTERS)
    _check_most("request", "parameters", request.parameters, MOST_PARAMETERS)
    _check_most("request", "outputs", request.outputs, MOST_OUTPUTS)
    for output in request.outputs:
        _check_most(
            f"output {quoted(output.name)}", "parameters", output.parameters, MOST_PARAMETERS
        )


def _check_most(owner: str, what: str, given: Any, most: int) -> None:
    if len(given) > most:
        raise InvalidRequest(f"{owner} has {len(given)} {what} but must have at most {most}")


def _check_alike(inputs: Mapping[str, InputTensor], batch_size: int) -> None:
    for name in ONE_FOR_ALL_ROWS & inputs.keys():
        if len({inputs[name].scalar(row) for row in range(batch_size)}) > 1:
            raise InvalidRequest(
                "differs between the rows of the batch, which must agree on it; send a request for each value",
                field=name,
            )


def _check_names(inputs: Mapping[str, InputTensor], model: Model) -> None:
    """Names that releases gave to one input must agree."""
    for name, tensor in inputs.items():
        other = inputs.get(model.inputs[name].same_as)
        if other is not None and list(tensor.elements) != list(other.elements):
            raise InvalidRequest(
                "are two names of one input but differ; send one of them",
                fields=(other.name, tensor.name),
            )


def _requested_outputs(model: Model, outputs: Iterable[Any]) -> frozenset[str]:
    for output in outputs:
        if output.name not in model.outputs:
            raise InvalidRequest(
                f"unexpected inference output '{cut(output.name)}' for model '{model.name}'"
            )
        if any(name.startswith(("shared_memory", "classification")) for name in output.parameters):
            raise InvalidRequest(
                f"output '{output.name}' of model '{model.name}' asks for shared memory or classification, which this"
                " server does not support; leave the parameters out"
            )
    return frozenset(output.name for output in outputs)


def _parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    kinds = ((name, each, each.WhichOneof("parameter_choice")) for name, each in given.items())
    return {name: getattr(each, kind) if kind else None for name, each, kind in kinds}


def _read_inputs(
    request: Any, raw: Sequence[Contents], model: Model
) -> tuple[dict[str, InputTensor], int]:
    """The inputs by name, and the batch size; without a batch dimension a request is one row."""
    contents = iter(raw) if raw else None
    tensors: dict[str, InputTensor] = {}
    batch_size = 0
    for given in request.inputs:
        name, data_type = given.name, given.datatype
        spec = model.inputs.get(name)
        if spec is None:
            raise InvalidRequest(
                f"unexpected inference input '{cut(name)}' for model '{model.name}'"
            )
        if name in tensors:
            raise InvalidRequest(f"input '{name}' already exists in request")
        parameters = given.parameters
        if len(parameters) > MOST_PARAMETERS or len(given.shape) > MAX_DIMENSIONS:
            _check_most(f"input '{name}'", "parameters", parameters, MOST_PARAMETERS)
            _check_most(f"input '{name}'", "dimensions", given.shape, MAX_DIMENSIONS)
        sent = tuple(given.shape)
        is_shared = bool(parameters) and any(
            each.startswith("shared_memory") for each in parameters
        )
        shape = _whole_shape(model, name, data_type, sent, is_shared=is_shared)
        batch_size = batch_size or shape[0]
        if shape[0] != batch_size:
            raise InvalidRequest(
                f"input '{name}' batch size does not match other inputs for '{model.name}'"
            )
        if spec.put is not None and spec.put.most is not None:
            _check_length(name, math.prod(shape[1:]), spec.put.most)
        elements = _elements(given, data_type, math.prod(sent), contents, model.name)
        tensors[name] = InputTensor(name, data_type, shape, elements)
    left_over = len(raw) - len(tensors)
    if left_over > 0:
        raise InvalidRequest(
            f"raw_input_contents has {left_over} more entries than model '{model.name}' got inputs"
        )
    if batch_size > model.max_batch_size > 0:
        raise InvalidRequest(
            f"inference request batch-size must be <= {model.max_batch_size} for '{model.name}'"
        )
    return tensors, batch_size


def _incomplete(names: Iterable[str], model: Model) -> InvalidRequest:
    got, missing = sorted(names), sorted(model.required.difference(names))
    return InvalidRequest(
        f"expected number of inputs between {len(model.required)} and {len(model.inputs)} but got {len(got)} inputs"
        f" for model '{model.name}'. Got input(s) {_listed(got)}, but missing required input(s) {_listed(missing)}."
        " Please provide all required input(s)."
    )


def _listed(names: Sequence[str]) -> str:
    return f"[{','.join(repr(name) for name in names)}]"


@lru_cache(REMEMBERED_FORMS)
def _whole_shape(
    model: Model, name: str, data_type: str, shape: Shape, *, is_shared: bool
) -> Shape:
    """The shape of a declared input with the batch dimension. Raises InvalidRequest for what the model does not
    take."""
    spec = model.inputs[name]
    if data_type not in spec.data_types:
        raise InvalidRequest(
            f"inference input '{spec.name}' data-type is '{cut(data_type)}', but model '{model.name}' expects"
            f" '{spec.data_type}'"
        )
    if is_shared:
        raise InvalidRequest(
            f"input '{spec.name}' of model '{model.name}' is in shared memory, which this server does not support;"
            " send its contents"
        )
    expected = (*model.batch_dims, *spec.dims)
    fits = _fits(shape, expected) or any(
        _fits(shape, (*model.batch_dims, *dims)) for dims in spec.former_dims
    )
    batched = model.max_batch_size > 0
    if not fits or (batched and shape[0] < 1):
        raise InvalidRequest(
            f"unexpected shape for input '{spec.name}' for model '{model.name}'. Expected"
            f" {_dims(expected)}, got {_dims(shape)}." + (BATCH_DIMENSION_NOTE if batched else "")
        )
    return shape if batched else (1, *shape)


def _fits(shape: Sequence[int], expected: Sequence[int]) -> bool:
    return len(shape) == len(expected) and all(
        got == want or (want == -1 and got >= 0) for got, want in zip(shape, expected, strict=True)
    )


def _dims(dims: Sequence[int]) -> str:
    return f"[{','.join(map(str, dims))}]"


def _check_length(name: str, length: int, most: int) -> None:
    """Raises InvalidRequest, before anything is copied, for rows longer than their field may be."""
    if length > most:
        raise InvalidRequest(f"has {length} elements but must have at most {most}", field=name)


def _elements(
    given: Any, data_type: str, count: int, raw: Iterator[Contents] | None, model: str
) -> Elements:
    """The elements, so many; `raw` is None where all contents are typed."""
    if data_type == "BYTES" and count > MOST_TEXTS:
        raise InvalidRequest(
            f"input '{given.name}' has {count} elements but must have at most {MOST_TEXTS}"
        )
    if given.HasField("contents"):
        if raw is not None:
            raise InvalidRequest(
                "contents field must not be specified when using raw_input_contents for"
                f" '{given.name}' for model '{model}'"
            )
        return _typed(given, count, model)
    data = next(raw, b"") if raw is not None else b""
    if isinstance(data, (array, list)):
        return data
    if data_type == "BYTES":
        return _split(data, given.name, count)
    elements = array(ELEMENT_CODES[data_type])
    if len(data) != count * elements.itemsize:
        raise InvalidRequest(
            f"input byte size mismatch for input '{given.name}' for model '{model}'. Expected"
            f" {count * elements.itemsize}, got {len(data)}"
        )
    for at in range(0, len(data), PIECE_BYTES):
        elements.frombytes(data[at : at + PIECE_BYTES])
    return elements


def _typed(given: Any, count: int, model: str) -> Elements:
    wanted = CONTENTS_FIELDS.get(given.datatype)
    for field, values in given.contents.ListFields():
        if field.name != wanted and len(values):
            raise InvalidRequest(
                f"unexpected explicit tensor data for input tensor '{given.name}' for model '{model}' of type"
                f" '{field.name}', expected datatype '{given.datatype}'"
            )
    values = getattr(given.contents, wanted) if wanted else ()
    if len(values) != count:
        raise InvalidRequest(
            f"unexpected number of elements {len(values)} for inference input '{given.name}', expecting {count}"
        )
    if given.datatype == "BYTES":
        return tuple(values)
    if count > MOST_TYPED_ELEMENTS:
        raise InvalidRequest(
            f"input '{given.name}' has {count} typed elements but must have at most {MOST_TYPED_ELEMENTS}; send larger"
            " ones in raw_input_contents"
        )
    try:
        return array(ELEMENT_CODES[given.datatype], values)
    except OverflowError as error:
        raise InvalidRequest(
            f"input '{given.name}' for model '{model}' holds a value outside of {given.datatype}: {error}"
        ) from error


def _split(data: bytes | memoryview, name: str, count: int) -> Sequence[bytes]:
    try:
        elements = split_elements(data)
    except ValueError as error:
        raise InvalidRequest(f"{error} for inference input '{name}'") from error
    if len(elements) != count:
        raise InvalidRequest(
            f"unexpected number of string elements {len(elements)} for inference input '{name}', expecting {count}"
        )
    return elements
