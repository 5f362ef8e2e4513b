"""Errors of the mesh in the words of Triton's clients: with the tensors that they sent, and the rows of their batch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from trtmesh.chassis.errors import TrtmeshError

if TYPE_CHECKING:
    from trtmesh.router.doors.triton.templates.generation import Call

FIELD_PATH = re.compile(r"(?<![\w.])[a-z_]+(?:\[\d+\])?(?:\.[a-z_]+(?:\[\d+\])?)+")
REQUEST_TYPE = "parameter 'request_type'"


def in_tensors(error: TrtmeshError, call: Call) -> TrtmeshError:
    """The error with the names of tensors in the place of the fields that they set."""
    tensors = _tensors_by_field(call)
    return reworded(
        error, FIELD_PATH.sub(lambda found: _tensor(found[0], tensors), error.sentence(str))
    )


def of_row(error: TrtmeshError, row: int, call: Call) -> TrtmeshError:
    """The error with the row that it is of, where there are several."""
    return reworded(error, f"row {row}: {error.message}") if call.batch_size > 1 else error


def of_request(error: TrtmeshError, call: Call) -> TrtmeshError:
    """The error of a request of the mesh as one of the call: an item is a row."""
    told = in_tensors(error, call)
    return told if error.batch_index is None else of_row(told, error.batch_index, call)


def reworded(error: TrtmeshError, message: str) -> TrtmeshError:
    """The same error with another message."""
    return type(error)(message, worker=error.worker, retry_after_ms=error.retry_after_ms)


def _tensors_by_field(call: Call) -> dict[str, str]:
    """Inputs of the model by the fields that they set: of several those that were sent."""
    sent_last = sorted(call.model.inputs.values(), key=lambda spec: spec.name in call.inputs)
    return {"handoff.phase": REQUEST_TYPE} | {
        field: spec.name for spec in sent_last if spec.put is not None for field in spec.put.fields
    }


def _tensor(path: str, tensors: dict[str, str]) -> str:
    """The tensor behind `path`, with what `path` says of a part of it; `path` itself where no tensor sets it."""
    head, tail = path, ""
    while head:
        tensor = tensors.get(re.sub(r"\[\d+\]", "", head))
        if tensor is not None:
            index = head[head.find("[") : head.find("]") + 1] if "[" in head else ""
            return tensor + index + tail
        head, _, last = head.rpartition(".")
        tail = f".{last}{tail}"
    return path
