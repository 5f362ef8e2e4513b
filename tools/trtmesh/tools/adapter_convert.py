"""`trtmesh adapters convert`: an adapter of PEFT as TensorRT-LLM's arrays, and back."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from trtmesh.chassis.adapter_content import FILE_NAMES, format_of
from trtmesh.chassis.errors import (
    InvalidRequest,
    ModelUnusable,
    NotFound,
    SettingsError,
    StartupError,
)
from trtmesh.chassis.model_dir import check_model_dir
from trtmesh.tools.converter import convert_files, tell_written
from trtmesh.v1 import generation_pb2 as pb

CONVERTER = "trtmesh.engine.backends.torch.model.adapter_conversion"


class WrittenType(StrEnum):
    """The type of the written weights."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


def convert(
    source: Annotated[Path, typer.Argument(help="Directory of an adapter in either format.")],
    target: Annotated[Path, typer.Argument(help="Directory for the adapter in the other format.")],
    model: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the adapter's model, whose weights are not read. Arrays need it; an adapter of PEFT is"
            " then compared with its layers."
        ),
    ] = None,
    dtype: Annotated[
        WrittenType,
        typer.Option(help="Type of the weights; auto is the smallest that holds every value."),
    ] = WrittenType.AUTO,
    *,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an adapter in TARGET, in both formats.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=0, help="Longest duration.")] = 3600,
) -> None:
    """Convert an adapter between PEFT's format and TensorRT-LLM's arrays (lora_weights, lora_config).

    The scale of an adapter of PEFT becomes part of B, as in hf_lora_convert.py; the files appear together.

    Exit status: 0 converted, 1 not enough space or time, 2 wrong usage or TARGET has an adapter, 4 unusable adapter or
    model, 130 Ctrl-C.
    """
    tell_written(lambda: _convert(source, target, model, dtype, replace=force, seconds=seconds))


def _convert(
    source: Path,
    target: Path,
    model: Path | None,
    dtype: WrittenType,
    *,
    replace: bool,
    seconds: float,
) -> Sequence[Path]:
    """The new files. Raises StartupError."""
    old = [
        file for names in FILE_NAMES.values() for name in names if (file := target / name).exists()
    ]
    if old and not replace:
        raise SettingsError(f"{old[0]} exists; --force replaces it")
    config = _checked_config(source, model)
    made = not target.exists()
    try:
        target.mkdir(parents=True, exist_ok=True)
        options = [dtype, *([str(model)] if model else [])]
        return convert_files(
            CONVERTER, source, target, *options, like=config, old=old, seconds=seconds
        )
    except OSError as error:
        raise StartupError(f"cannot write to {target}: {error.strerror}") from error
    finally:
        if made and target.is_dir() and not any(target.iterdir()):
            target.rmdir()


def _checked_config(source: Path, model: Path | None) -> Path:
    """The configuration of the adapter. Raises ModelUnusable, and SettingsError for arrays without a model."""
    try:
        form = format_of(source)
    except (InvalidRequest, NotFound) as error:
        raise ModelUnusable(str(error)) from error
    if model is not None:
        check_model_dir(model)
    elif form == pb.ADAPTER_FORMAT_ARRAYS:
        raise SettingsError(
            f"{source} holds arrays without names and sizes of layers; --model DIRECTORY gives them"
        )
    return source / FILE_NAMES[form].config
