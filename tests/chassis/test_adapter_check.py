"""What an adapter's files show without a value being read."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from trtmesh.chassis.adapter_content import FILE_NAMES, AdapterContent
from trtmesh.chassis.errors import InvalidRequest, Unsupported
from trtmesh.chassis.peft_adapter import check_content
from trtmesh.v1 import generation_pb2 as pb

ARRAYS = FILE_NAMES[pb.ADAPTER_FORMAT_ARRAYS]


def file_of(values: Any, dtype: str) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array(values, dtype=dtype))
    return file.getvalue()


def arrays(rows: Any, weights: Any, dtype: str = "<f2") -> AdapterContent:
    return AdapterContent(pb.ADAPTER_FORMAT_ARRAYS, file_of(rows, "<i4"), file_of(weights, dtype))


GOOD = arrays([[[1, 0, 8]]], [[[1.0, 2.0]]])


@pytest.mark.parametrize("rows", [[[1, 0, 8]], [[[1, 0, 8, 0]]], [[1, 0, 8], [1, 1, 4]]])
def test_arrays_of_plain_lora_pass(rows: Any) -> None:
    count = len(np.array(rows).reshape(-1, np.array(rows).shape[-1]))
    check_content(arrays(rows, np.zeros((1, count, 5))))
    check_content(arrays(rows, np.zeros((count, 5)), "<f4"))


@pytest.mark.parametrize(
    ("content", "file"),
    [
        (replace(GOOD, weights=GOOD.weights[:-1]), ARRAYS.weights),
        (replace(GOOD, weights=GOOD.weights + b"x"), ARRAYS.weights),
        (replace(GOOD, weights=b""), ARRAYS.weights),
        (replace(GOOD, config=GOOD.config[:-1]), ARRAYS.config),
        (replace(GOOD, config=b"{}"), ARRAYS.config),
        (arrays([[1, 0, 8], [1, 1, 8]], [[1.0]]), ARRAYS.weights),
        (arrays([[1, 0, -8]], [[1.0]]), ARRAYS.config),
        (arrays([[1, 0, 8, 1]], [[1.0]]), ARRAYS.config),
        (arrays([[1, 0, 8]], [[1]], "<i4"), ARRAYS.weights),
    ],
)
def test_arrays_that_are_not_are_refused_by_file(content: AdapterContent, file: str) -> None:
    with pytest.raises((InvalidRequest, Unsupported)) as refused:
        check_content(content, "adapters/mine/")
    assert refused.value.field == f"adapters/mine/{file}"


@pytest.mark.parametrize(
    "config", [b"{", b"[" * 100_000, b"null", b"\xff", json.dumps({"r": 8}).encode()]
)
def test_configurations_that_are_none_are_refused_by_file(config: bytes) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_content(AdapterContent(pb.ADAPTER_FORMAT_PEFT, config, b""), "adapters/mine/")
    assert refused.value.field == "adapters/mine/adapter_config.json"
