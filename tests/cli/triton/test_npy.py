"""Arrays of .npy files, as numpy writes them."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trtmesh.chassis.errors import InvalidRequest
from trtmesh.tools.triton.npy import DATA_TYPES, MAGIC, MAX_FILE_BYTES, read_npy
from trtmesh.tools.triton.tensors import Array

NUMBERS = np.arange(12).reshape(2, 2, 3)


@pytest.mark.parametrize("described", [each for each in DATA_TYPES if each != "|V2"])
def test_arrays_of_every_type(tmp_path: Path, described: str) -> None:
    saved = NUMBERS.astype(described)
    np.save(tmp_path / "a.npy", saved)
    array = read_npy(tmp_path / "a.npy")
    assert (array.shape, array.data) == ((2, 2, 3), saved.tobytes())
    assert array[1] == Array(DATA_TYPES[described], (2, 3), saved[1].tobytes())


def test_opaque_pairs_of_bytes_are_bf16(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.frombuffer(b"\x80\x3f\x00\x40", "V2"))
    assert read_npy(tmp_path / "a.npy").encoded("FP32") == struct.pack("<2f", 1.0, 2.0)


def test_numbers_convert_to_the_declared_type(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", NUMBERS.astype(np.float64))
    array = read_npy(tmp_path / "a.npy")
    assert array.encoded("FP16") == NUMBERS.astype(np.float16).tobytes()
    with pytest.raises(InvalidRequest, match="INT32"):
        array.encoded("INT32")
    with pytest.raises(InvalidRequest, match="FP16"):
        Array("FP64", (1,), struct.pack("<d", 1e9)).encoded("FP16")


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    np.save(tmp_path / "a.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    with pytest.raises(InvalidRequest, match=r"its type is '\|O'"):
        read_npy(tmp_path / "a.npy")
    assert not (tmp_path / "sprung").exists()


def with_header(text: str, data: bytes = b"") -> bytes:
    return MAGIC + b"\x01\x00" + struct.pack("<H", len(text)) + text.encode() + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04",
        MAGIC,
        MAGIC + b"\x09\x00" + bytes(8),
        MAGIC + b"\x02\x00" + struct.pack("<I", 2**31),
        with_header("{"),
        with_header("[1]"),
        with_header("{'descr': '<f4'}"),
        with_header("{'descr': '>f4', 'fortran_order': False, 'shape': (1,)}", bytes(4)),
        with_header("{'descr': '<f4', 'fortran_order': True, 'shape': (1,)}", bytes(4)),
        with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}", bytes(4)),
        with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}", bytes(4)),
        with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}", bytes(8)),
    ],
)
def test_other_content_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(InvalidRequest, match=r"a\.npy is not a usable"):
        read_npy(tmp_path / "a.npy")


def test_large_files_are_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "a.npy").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(InvalidRequest, match=str(MAX_FILE_BYTES)):
        read_npy(tmp_path / "a.npy")


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="nowhere"):
        read_npy(tmp_path / "nowhere.npy")
