"""The content of adapters: .npy files as numpy writes them, and digests."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from trtmesh.chassis.adapter_content import (
    FILE_NAMES,
    MOST_CONFIG_BYTES,
    MOST_MODULES,
    AdapterContent,
    format_of,
    number_of,
    rank_of,
)
from trtmesh.chassis.errors import InvalidField, InvalidRequest, NotFound
from trtmesh.chassis.vocabulary import Tensor
from trtmesh.v1 import generation_pb2 as pb

CONFIG = np.array([[1, 0, 8], [4, 0, 8]], np.int32)
WEIGHTS = np.arange(14, dtype=np.float16).reshape(2, 7)


def message_of(array: np.ndarray, data_type: int) -> Tensor:
    return Tensor(data_type, array.shape, array.tobytes())


def saved(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize("leading", [(), (1,)])
def test_arrays_of_a_request_equal_the_files_that_numpy_writes(leading: tuple[int, ...]) -> None:
    weights, config = (each.reshape(leading + each.shape) for each in (WEIGHTS, CONFIG))
    content = AdapterContent.of_arrays(
        message_of(weights, pb.DATA_TYPE_FP16), message_of(config, pb.DATA_TYPE_INT32)
    )
    assert content.config == saved(config)
    assert content.weights == saved(weights)


def test_bfloat16_is_two_opaque_bytes() -> None:
    bits = WEIGHTS.view(np.dtype("V2"))
    content = AdapterContent.of_arrays(
        message_of(bits, pb.DATA_TYPE_BF16), message_of(CONFIG, pb.DATA_TYPE_INT32)
    )
    read = np.load(io.BytesIO(content.weights), allow_pickle=False)
    assert read.dtype == np.dtype("V2")
    assert read.tobytes() == WEIGHTS.tobytes()


def test_type_without_file_format_is_refused() -> None:
    with pytest.raises(InvalidField, match="DATA_TYPE_INT64"):
        AdapterContent.of_arrays(
            message_of(WEIGHTS, pb.DATA_TYPE_FP16),
            message_of(CONFIG.astype(np.int64), pb.DATA_TYPE_INT64),
        )


def test_version_depends_on_format_and_on_the_border_between_the_files() -> None:
    versions = {
        AdapterContent(pb.ADAPTER_FORMAT_PEFT, b"ab", b"c").version,
        AdapterContent(pb.ADAPTER_FORMAT_PEFT, b"a", b"bc").version,
        AdapterContent(pb.ADAPTER_FORMAT_ARRAYS, b"ab", b"c").version,
    }
    assert len(versions) == 3
    again = AdapterContent(pb.ADAPTER_FORMAT_PEFT, b"ab", b"c").version
    assert again in versions


def peft(**values: object) -> AdapterContent:
    return AdapterContent(pb.ADAPTER_FORMAT_PEFT, json.dumps(values).encode(), b"w")


def arrays(config: bytes) -> AdapterContent:
    return AdapterContent(pb.ADAPTER_FORMAT_ARRAYS, config, b"w")


@pytest.mark.parametrize(
    ("content", "rank"),
    [
        (peft(r=8), 8),
        (peft(r=8, rank_pattern={}), 8),
        (peft(r=8, rank_pattern=None), 8),
        (peft(r=8, rank_pattern={"q_proj": 32, "v_proj": 4}), 32),
        (arrays(saved(CONFIG)), 8),
        (arrays(saved(np.array([[[1, 0, 4], [2, 0, 16], [1, 1, 8]]], np.int32))), 16),
        (arrays(saved(np.array([[1, 99, 4, 0], [2, 99, 16, 99]], np.int32))), 16),
        (arrays(saved(np.asfortranarray([[1, 99, 4], [2, 98, 16]], np.int32))), 16),
        (arrays(saved(np.asfortranarray([[[1, 99, 4], [2, 98, 16]]], np.int32))), 16),
    ],
)
def test_rank_is_the_largest_of_the_configuration(content: AdapterContent, rank: int) -> None:
    assert rank_of(content) == rank


def npy(header: str) -> bytes:
    """A .npy file of 12 zeros."""
    text = header.encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(12)


GOOD = "{'descr': '<i4', 'fortran_order': False, 'shape': (1, 3)}"


@pytest.mark.parametrize(
    "content",
    [
        peft(),
        peft(r="8"),
        peft(r=True),
        peft(r=-1),
        peft(r=2**31),
        peft(r=8, rank_pattern=[4]),
        peft(r=8, rank_pattern={"q_proj": 1.5}),
        *(AdapterContent(pb.ADAPTER_FORMAT_PEFT, config, b"w") for config in (
            b"", b"{", b"[8]", b"\xff", b"[" * 100_000, b'{"r": ' + b"9" * 5000 + b"}",
            b'{"r": 8, "x": "' + b"a" * MOST_CONFIG_BYTES + b'"}',
        )),
        arrays(b""),
        arrays(saved(CONFIG)[:-1]),
        arrays(saved(CONFIG.astype(np.int64))),
        arrays(saved(CONFIG.astype(">i4"))),
        arrays(saved(CONFIG[:, :2].copy())),
        arrays(saved(CONFIG[:0])),
        arrays(saved(np.stack((CONFIG, CONFIG)))),
        arrays(saved(np.array([[1, 0, -8]], np.int32))),
        *(arrays(npy(GOOD.replace(*change))) for change in (
            ("(1, 3)", "(-1, 3)"), ("(1, 3)", "(1 << 40, 3)"), ("(1, 3)", "(1000000000, 3)"), ("(1, 3)", "3"),
            ("(1, 3)", "('1', 3)"), ("{", "("), ("'<i4'", "['<i4']"), ("'shape'", "'form'"), ("{", "{" * 5000),
        )),
    ],
)  # fmt: skip
def test_configuration_without_rank_is_refused(content: AdapterContent) -> None:
    with pytest.raises(InvalidRequest) as refused:
        rank_of(content)
    assert refused.value.field == "adapter.config"


def test_number_of_a_name_is_stable_and_above_those_of_clients() -> None:
    assert number_of("unit-tests") == number_of("unit-tests")
    assert number_of("unit-tests") != number_of("docstrings")
    assert 2**62 <= number_of("unit-tests") < 2**63


@pytest.mark.parametrize(
    ("kind", "config", "weights"),
    [
        (pb.ADAPTER_FORMAT_PEFT, "adapter_config.json", "adapter_model.safetensors"),
        (pb.ADAPTER_FORMAT_ARRAYS, "model.lora_config.npy", "model.lora_weights.npy"),
    ],
)
def test_directory_is_read_in_either_format(
    tmp_path: Path, kind: int, config: str, weights: str
) -> None:
    (tmp_path / config).write_bytes(b"{}")
    with pytest.raises(NotFound, match=weights):
        AdapterContent.read(tmp_path, 10)
    (tmp_path / weights).write_bytes(b"12345678")
    assert AdapterContent.read(tmp_path, 10) == AdapterContent(kind, b"{}", b"12345678")
    with pytest.raises(InvalidRequest) as refused:
        AdapterContent.read(tmp_path, 9)
    assert (refused.value.value, refused.value.limit) == ("10", "at most 9 bytes")


def test_configuration_of_the_most_modules_fits() -> None:
    config = message_of(np.full((MOST_MODULES, 4), 8, np.int32), pb.DATA_TYPE_INT32)
    content = AdapterContent.of_arrays(message_of(WEIGHTS, pb.DATA_TYPE_FP16), config)
    assert len(content.config) <= MOST_CONFIG_BYTES
    assert rank_of(content) == 8


def test_larger_configuration_is_refused(tmp_path: Path) -> None:
    config = message_of(np.zeros(MOST_CONFIG_BYTES // 4, np.int32), pb.DATA_TYPE_INT32)
    with pytest.raises(InvalidField) as refused:
        AdapterContent.of_arrays(message_of(WEIGHTS, pb.DATA_TYPE_FP16), config)
    assert refused.value.fields == ("lora.config",)
    (tmp_path / PEFT[0]).write_bytes(bytes(MOST_CONFIG_BYTES))
    (tmp_path / PEFT[1]).write_bytes(b"w")
    AdapterContent.read(tmp_path, 1 << 30)
    (tmp_path / PEFT[0]).write_bytes(bytes(MOST_CONFIG_BYTES + 1))
    with pytest.raises(InvalidRequest) as unread:
        AdapterContent.read(tmp_path, 1 << 30)
    assert unread.value.limit == f"at most {MOST_CONFIG_BYTES} bytes"


def test_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no directory"):
        format_of(tmp_path / "nowhere")


PEFT, ARRAYS = (list(names) for names in FILE_NAMES.values())


@pytest.mark.parametrize(
    ("names", "error", "words"),
    [
        ([], NotFound, "it lacks"),
        (PEFT[:1], NotFound, PEFT[1]),
        (PEFT[1:], NotFound, PEFT[0]),
        (ARRAYS[:1], NotFound, ARRAYS[1]),
        (PEFT + ARRAYS[1:], InvalidRequest, "two formats"),
    ],
    ids=["empty", "no_weights", "no_config", "no_array", "both"],
)
def test_directory_without_exactly_one_adapter_is_refused(
    names: list[str], error: type[Exception], words: str, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(error, match=words):
        format_of(tmp_path)
