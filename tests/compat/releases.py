"""The tensors of every release, as `releases.json` has them: facts from the configurations of TensorRT-LLM's releases,
kept apart from the table of the code so that each checks the other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

FACTS: Mapping[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
MODELS = tuple(FACTS)
RELEASES: Sequence[str] = FACTS["ensemble"]["releases"]


@dataclass(frozen=True)
class Tensor:
    """A tensor of a model as a release declares it."""

    name: str
    data_type: str
    """KServe's name; '' where the template's user chooses."""
    dims: tuple[int, ...]
    required: bool

    @property
    def is_scalar(self) -> bool:
        """Whether clients send a single value, whatever number the release allows."""
        return self.dims == (1,) or self.name in ONE_VALUE


ONE_VALUE = frozenset(
    {
        *("text_input", "decoder_text_input", "max_tokens"),
        *("QUERY", "DECODER_QUERY", "REQUEST_OUTPUT_LEN", "END_ID", "PAD_ID"),
    }
)
"""Inputs of one value that releases before v0.12 declare with any number."""


def _changes() -> Sequence[str]:
    found = {
        entry.split(" ")[0]
        for model in MODELS
        for entries in FACTS[model]["inputs"].values()
        for entry in entries[1:]
    }
    return sorted(found, key=_index)


def releases_of(model: str) -> Sequence[str]:
    """The releases that have a model."""
    found: Sequence[str] = FACTS[model]["releases"]
    return found


@cache
def tensors(model: str, kind: str, release: str) -> Mapping[str, Tensor]:
    """The `inputs` or `outputs` of a model in a release."""
    found = {}
    for name, entries in FACTS[model][kind].items():
        for entry in entries:
            since, until, data_type, dims, *optional = entry.split(" ")
            if _index(since) <= _index(release) <= _index(until):
                found[name] = Tensor(
                    name,
                    data_type.replace("STRING", "BYTES"),
                    tuple(int(extent) for extent in dims.split(",")),
                    optional == ["required"],
                )
    return found


def _index(release: str) -> int:
    return RELEASES.index(release)


NUMPY: Mapping[str, Any] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "INT32": np.int32,
    "UINT32": np.uint32,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
    "BYTES": np.object_,
}


def data_type_of(tensor: Tensor) -> str:
    """The data type that a client sends: upstream's default where the template leaves it open."""
    return tensor.data_type or OPEN_TYPES[tensor.name]


def row_of(tensor: Tensor, value: Any) -> Any:
    """A batch of one row, in the data type and the shape that a release's client sends."""
    data_type = NUMPY[data_type_of(tensor)]
    row = np.array(
        [value] if tensor.is_scalar and not isinstance(value, list) else value, data_type
    )
    declared = (1,) if tensor.is_scalar else tensor.dims
    assert row.ndim == len(declared), (tensor, row.shape)
    assert all(want in (-1, got) for got, want in zip(row.shape, declared, strict=True)), tensor
    return row[np.newaxis]


OPEN_TYPES = {
    "context_logits": "FP32",
    "generation_logits": "FP32",
    "draft_logits": "FP32",
    "encoder_input_features": "FP16",
}
"""Types that the templates leave open, by upstream's default."""


def typed(model: str, release: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """A request in a release's types. An input of another release has that release's."""
    request = {}
    for name, value in values.items():
        known = [tensors(model, "inputs", each).get(name) for each in (release, *RELEASES[::-1])]
        found = next(each for each in known if each is not None)
        request[name] = row_of(found, value)
    return request


CHANGES = _changes()
"""Releases that declare an input otherwise than the one before. Others add inputs or drop some."""


def end_to_end(releases: Sequence[str]) -> Sequence[str]:
    """Of these releases the first, the last and those of CHANGES: processes serve them. What all releases send is
    read and translated alike, as tests/router/doors/triton/test_releases.py shows without processes."""
    return [each for each in releases if each in {releases[0], releases[-1], *CHANGES}]
