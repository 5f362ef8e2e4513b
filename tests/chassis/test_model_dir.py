"""What stands in place of a model directory is told apart, with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from trtmesh.chassis.errors import ModelUnusable
from trtmesh.chassis.model_dir import check_model_dir

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 9000000000\n"


def refusal(path: Path) -> str:
    with pytest.raises(ModelUnusable) as caught:
        check_model_dir(path)
    return str(caught.value)


def test_name_of_the_hub_is_downloaded_first() -> None:
    said = refusal(Path("meta-llama/Llama-3.1-8B"))
    assert "hf download meta-llama/Llama-3.1-8B --local-dir Llama-3.1-8B" in said


@pytest.mark.parametrize("path", ["/nowhere/at", "../nowhere", "nowhere", "a/b/c", "here/nowhere"])
def test_missing_paths_are_no_names_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    said = refusal(Path(path))
    assert "does not exist" in said
    assert "hf download" not in said


@pytest.mark.parametrize("name", ["model.gguf", "nowhere.gguf"])
def test_file_of_llama_cpp(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "llama.cpp" in refusal(tmp_path / name)


def test_directory_of_llama_cpp(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "(model.gguf)" in refusal(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    check_model_dir(tmp_path)


def test_other_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert "is a file" in refusal(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "tokenizer.json"])
def test_pointers_of_git_lfs(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    check_model_dir(tmp_path)
    (tmp_path / name).write_text(POINTER)
    said = refusal(tmp_path)
    assert name in said
    assert f"git -C {tmp_path} lfs pull" in said
