"""Inputs and token ids of the command line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import typer
from trtmesh.tools.triton.tensors import Array
from trtmesh.tools.triton.values import read_ids, read_input


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    np.save(tmp_path / "a.npy", np.array([1.5], np.float32))
    (tmp_path / "one.csv").write_text("1, 2,3\n")
    (tmp_path / "two.csv").write_text("1,2\r\n\r\n3\r\n")
    (tmp_path / "words.csv").write_text("a,b\n")
    (tmp_path / "empty.csv").write_text("\n")
    (tmp_path / "a.json").write_text('{"type": "object"}')
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "a.txt").write_text("1")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1.5", 1.5),
        ("[1, 2]", [1, 2]),
        ("@{}/a.npy", Array("FP32", (1,), b"\0\0\xc0\x3f")),
        ("@{}/one.csv", [1, 2, 3]),
        ("@{}/two.csv", [[1, 2], [3]]),
        ("@{}/a.json", {"type": "object"}),
    ],
)
def test_inputs_are_json_or_files(folder: Path, text: str, value: object) -> None:
    assert read_input(f"name={text.format(folder)}") == ("name", value)


def test_rows_of_a_file_are_prompts_of_ids(folder: Path) -> None:
    assert read_ids(f"@{folder}/two.csv") == [[1, 2], [3]]
    assert read_ids("1 2,3") == [[1, 2, 3]]


@pytest.mark.parametrize(
    "name", ["words.csv", "empty.csv", "broken.json", "a.txt", "nowhere.csv", "nowhere.npy"]
)
def test_unusable_files_are_named(folder: Path, name: str) -> None:
    with pytest.raises(typer.BadParameter, match=name):
        read_input(f"name=@{folder}/{name}")
