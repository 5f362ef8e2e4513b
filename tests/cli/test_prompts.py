"""Prompts of a command line."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import typer
from trtmesh.cli.prompts import read_prompts


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))


def test_arguments_are_texts() -> None:
    assert read_prompts(["one", "", "@@dataclass"], lines=True) == ["one", "", "@dataclass"]


@pytest.mark.parametrize("lines", [False, True])
def test_file_is_one_prompt_or_one_a_line(tmp_path: Path, *, lines: bool) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("def f():\r\n\n  é\n".encode())
    prompts = ["def f():", "  é"] if lines else ["def f():\r\n\n  é\n"]
    assert read_prompts([f"@{file}", "one"], lines=lines) == [*prompts, "one"]


def test_standard_input_is_one_prompt(stdin: None) -> None:
    assert read_prompts(["-"], lines=False) == ["one\n\ntwo\n"]


def test_lines_of_standard_input_are_prompts(stdin: None) -> None:
    assert read_prompts(["-"], lines=True) == ["one", "two"]


@pytest.mark.parametrize("lines", [False, True])
def test_file_without_a_prompt_is_refused(tmp_path: Path, *, lines: bool) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(typer.BadParameter, match="empty"):
        read_prompts([f"@{tmp_path}/empty"], lines=lines)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"\xe9")
    for name in ("latin", "nowhere"):
        with pytest.raises(typer.BadParameter, match=f"{name}.*@@"):
            read_prompts([f"@{tmp_path}/{name}"], lines=False)
