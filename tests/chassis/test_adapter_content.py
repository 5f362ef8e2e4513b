"""The content of adapters: .npy files as numpy writes them, and digests."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from trtmesh.chassis.adapter_content import FILE_NAMES, AdapterContent, format_of, number_of
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
