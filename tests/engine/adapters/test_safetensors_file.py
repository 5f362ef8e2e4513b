"""Our reader of safetensors files agrees with the library on whole files, and refuses what is not one."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, save
from searches import examples
from trtmesh.chassis.errors import InvalidRequest
from trtmesh.chassis.safetensors_header import MOST_HEADER_BYTES, read_entries
from trtmesh.engine.adapters.safetensors_file import read_tensors

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.arange(5).half(),
    "c": torch.ones(3, 0),
    "d": torch.arange(4).bfloat16().view(2, 2),
    "e": torch.arange(3, dtype=torch.int32),
}


def read(data: bytes, name: str) -> dict[str, torch.Tensor]:
    return read_tensors(data, read_entries(data, name))


def test_tensors_are_those_of_the_library() -> None:
    found = read(save(TENSORS, metadata={"format": "pt"}), "file")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@given(st.binary(max_size=40), st.integers(0, 500), st.integers(0, 255))
@settings(max_examples=examples(150, soak=400), deadline=None)
def test_spoiled_files_are_refused_or_equal_to_the_library(
    tail: bytes, position: int, value: int
) -> None:
    data = bytearray(save(TENSORS))
    data[position % len(data)] = value
    spoiled = bytes(data[: len(data) - len(tail)]) + tail[: position % 41]
    try:
        found = read(spoiled, "adapter_model.safetensors")
    except InvalidRequest:
        return
    expected = load(spoiled)
    assert found.keys() == expected.keys()
    assert all(found[name].shape == expected[name].shape for name in found)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F9", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, -1]},
        {"dtype": "F32", "shape": [2]},
        [],
    ],
)
def test_false_headers_are_refused(entry: object) -> None:
    header = json.dumps({"x": entry}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(8)
    with pytest.raises(SafetensorError):
        load(data)
    with pytest.raises(InvalidRequest) as refused:
        read(data, "x")
    assert refused.value.field == "x"


def test_large_header_is_refused_before_it_is_parsed() -> None:
    """The library takes headers of 100 MB, whose parsing would hold running sequences up."""
    header = b"[" * (MOST_HEADER_BYTES + 1)
    with pytest.raises(InvalidRequest, match=f"not 1 to {MOST_HEADER_BYTES}"):
        read(len(header).to_bytes(8, "little") + header, "x")
