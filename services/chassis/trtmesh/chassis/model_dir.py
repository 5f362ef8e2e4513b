"""Recognises common mistakes in place of a model directory, before loading, and reads its JSON files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from trtmesh.chassis.errors import ModelUnusable
from trtmesh.chassis.json_text import load_json

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""A repository of the Hugging Face Hub: owner and name."""

POINTER_START = b"version https://git-lfs.github.com/spec/"
CHECKED_FILES = ("*.json", "*.model", "*.safetensors", "*.txt")


def check_model_dir(model_dir: Path) -> None:
    """Raises ModelUnusable, with a remedy, unless this is a directory with the real files."""
    if model_dir.suffix == ".gguf":
        raise ModelUnusable(f"{model_dir} {_of_llama_cpp(model_dir.name)}")
    if not model_dir.is_dir():
        raise ModelUnusable(_no_directory(model_dir))
    if (gguf := sorted(model_dir.glob("*.gguf"))) and not any(model_dir.glob("*.safetensors")):
        raise ModelUnusable(f"model directory {model_dir} {_of_llama_cpp(gguf[0].name)}")
    for file in sorted(file for pattern in CHECKED_FILES for file in model_dir.glob(pattern)):
        if _is_pointer(file):
            raise ModelUnusable(
                f"{file} is a pointer of Git LFS, not the file itself; fetch the files: git -C {model_dir} lfs pull"
            )


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelUnusable."""
    try:
        content = load_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnusable(f"{file} is refused: {error}") from error
    if not isinstance(content, dict):
        raise ModelUnusable(f"{file} is refused: it must hold a JSON object")
    return content


def read_optional(file: Path) -> dict[str, Any]:
    """The JSON object in a file, which is empty where there is none. Raises ModelUnusable."""
    return read_object(file) if file.is_file() else {}


def _of_llama_cpp(name: str) -> str:
    return (
        f"holds a model for llama.cpp ({name}), which no backend reads; download the model from which it was"
        " converted: a directory with config.json and *.safetensors"
    )


def _no_directory(path: Path) -> str:
    if path.exists():
        return f"{path} is a file, not a model directory"
    if HUB_NAME.fullmatch(str(path)) and not path.parent.exists():
        return (
            f"model directory {path} does not exist; a model of the Hugging Face Hub is downloaded first:"
            f" hf download {path} --local-dir {path.name}, then give the directory {path.name}"
        )
    return f"model directory {path} does not exist"


def _is_pointer(file: Path) -> bool:
    try:
        with file.open("rb") as content:
            return content.read(len(POINTER_START)) == POINTER_START
    except OSError:
        # The reader of the file reports the error.
        return False
