"""Converts pickled weights to safetensors: `python -m trtmesh.engine.backends.torch.model.pickles FROM INTO`.

`trtmesh convert` runs this in a process, to read FROM and write files into the empty directory INTO. PyTorch's
`weights_only` loader builds tensors and refuses everything else, so no code of a file runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from trtmesh.chassis.errors import ModelUnusable, StartupError
from trtmesh.chassis.json_text import load_json
from trtmesh.engine.backends.torch.model.conversions import run_conversion

SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
CONVERTED_INDEX = "model.safetensors.index.json"


def convert(source: Path, target: Path) -> None:
    """Writes a safetensors file for each pickle, and for several an index.

    Raises ModelUnusable for unusable weights, StartupError where a file cannot be written.
    """
    shards = _shards(source)
    places: dict[str, str] = {}
    size = 0
    for number, (file, expected) in enumerate(shards.items(), 1):
        several = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        tensors = _load(source / file)
        if missing := sorted(set(expected) - set(tensors)):
            raise ModelUnusable(f"{source / file} lacks {missing[0]}, which {INDEX} places there")
        written = target / f"model{several}.safetensors"
        _save(tensors, written)
        places |= dict.fromkeys(tensors, written.name)
        size += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
        _write(json.dumps(index, indent=2), target / CONVERTED_INDEX)


def _shards(source: Path) -> Mapping[str, Sequence[str]]:
    """The pickles, each with the tensors placed there by the index."""
    index = source / INDEX
    if not index.is_file():
        if not (source / SINGLE).is_file():
            raise ModelUnusable(f"{source} has neither {SINGLE} nor {INDEX}")
        return {SINGLE: ()}
    shards: dict[str, list[str]] = {}
    for name, file in _weight_map(index).items():
        shards.setdefault(file, []).append(name)
    for file in shards:
        if Path(file).name != file:
            raise ModelUnusable(f"{index} names {file!r}, which is no file of the directory")
        if not (source / file).is_file():
            raise ModelUnusable(f"{index} names {file}, but {source} lacks it")
    return dict(sorted(shards.items()))


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        places = load_json(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelUnusable(f"{index} is not an index of weights: {error!r}") from error
    if not isinstance(places, dict) or not all(isinstance(each, str) for each in places.values()):
        raise ModelUnusable(f"{index} is not an index of weights: weight_map maps names to files")
    return places


def _load(file: Path) -> dict[str, Tensor]:
    """The tensors of a pickle by name, contiguous and in storage of their own."""
    content = _read(file)
    if not isinstance(content, dict) or not content:
        raise ModelUnusable(f"{file} holds no tensors by name but {type(content).__name__}")
    storages: set[int] = set()
    tensors = {}
    for name, tensor in content.items():
        _check(file, name, tensor)
        storage = tensor.untyped_storage().data_ptr()
        # safetensors refuses tied tensors; as copies they load into tied and untied models.
        own = tensor.clone() if storage in storages else tensor
        storages.add(storage)
        tensors[name] = own.detach().contiguous()
    return tensors


def _read(file: Path) -> object:
    """The content of a pickle. Raises ModelUnusable for a torn file, and for anything but plain data."""
    try:
        # Only files in PyTorch's present format can be mapped; files from before 1.6 are read whole.
        mapped = is_zipfile(file)
        foreign = torch.serialization.get_unsafe_globals_in_checkpoint(file) if mapped else ()
        if not foreign:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except UnpicklingError as error:
        # The error advises to load the file with code.
        raise ModelUnusable(
            f"{file} is torn or holds more than weights; it is not loaded"
        ) from error
    except Exception as error:
        text = str(error).partition("\n")[0].partition(". ")[0]
        raise ModelUnusable(
            f"{file} is torn or no file of PyTorch: {text or 'it is empty'}"
        ) from error
    raise ModelUnusable(
        f"{file} asks for {foreign[0]}, which is no part of weights; it is not loaded"
    )


def _check(file: Path, name: object, tensor: object) -> None:
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise ModelUnusable(f"{file} holds {type(tensor).__name__} at {name!r}, not a tensor")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ModelUnusable(f"{file} holds a sparse or quantized tensor: {name}")


def _save(tensors: Mapping[str, Tensor], file: Path) -> None:
    try:
        save_file(dict(tensors), file, metadata={"format": "pt"})
    except (SafetensorError, OSError) as error:
        raise StartupError(f"cannot write {file.name}: {error}") from error


def _write(text: str, file: Path) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StartupError(f"cannot write {file.name}: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(run_conversion(lambda: convert(*map(Path, sys.argv[1:]))))
