"""The output of a step: checked, stamped, and published by one rename, so that no reader ever sees a half of it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trtmesh.chassis.errors import SettingsError
from trtmesh.chassis.json_text import load_json
from trtmesh.tools.engine_build.steps import Content, Step

BEGUN = ".trtmesh-begun"
"""Holds the digest of an output in the making."""
STAMP = ".trtmesh-build.json"
"""Names the command that made a directory, and its files; written last."""
REPLACED = ".replaced-"
"""Starts the name of an output that a newer one replaces."""


class OutputIncomplete(Exception):
    """A tool ended without an error, but not all of its output is there."""


def digest_of(step: Step) -> str:
    """Identifies the command and, through the steps before it, all that it reads."""
    source: object = None
    if step.needs is not None:
        source = digest_of(step.needs)
    elif step.source is not None:
        source = [[name, *_state(step.source / name)] for name in _files(step.source)]
    content = json.dumps([step.command(), source])
    return hashlib.sha256(content.encode()).hexdigest()


def _state(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def _files(directory: Path) -> list[str]:
    """The files at any depth, by relative name, without hidden ones: those belong to tools."""
    found = (file for file in directory.rglob("*") if file.is_file())
    names = (file.relative_to(directory) for file in found)
    return sorted(str(name) for name in names if not any(p.startswith(".") for p in name.parts))


def is_done(step: Step) -> bool:
    """Whether the output is whole and made by the same command from the same source. Raises SettingsError for a
    directory that is no output of a build."""
    if not step.output.exists():
        return False
    stamp = _read_stamp(step.output)
    if stamp is None:
        raise SettingsError(
            f"{step.output} exists, but `trtmesh build` did not make it; move it away, or change output"
        )
    return _is_stamped(step.output, stamp, digest_of(step))


def is_publishable(step: Step) -> bool:
    """Whether a build was interrupted between the stamp and the rename."""
    stamp = _read_stamp(step.partial)
    return stamp is not None and _is_stamped(step.partial, stamp, digest_of(step))


def _is_stamped(directory: Path, stamp: Mapping[str, Any], digest: str) -> bool:
    files = stamp.get("files")
    if stamp.get("digest") != digest or not isinstance(files, dict):
        return False
    return all(_size(directory / name) == size for name, size in files.items())


def _size(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except OSError:
        return None


def _read_stamp(directory: Path) -> Mapping[str, Any] | None:
    try:
        stamp = load_json((directory / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return stamp if isinstance(stamp, dict) else None


def prepare(step: Step) -> None:
    """Clears the place of the output in the making; a download continues where it stopped."""
    begun, digest = step.partial / BEGUN, digest_of(step)
    if step.content is not Content.MODEL or _text(begun) != digest:
        _remove(step.partial)
    step.partial.mkdir(parents=True, exist_ok=True)
    begun.write_text(digest, encoding="utf-8")
    (step.partial / STAMP).unlink(missing_ok=True)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""


def stamp(step: Step) -> None:
    """Checks the output and marks it as whole. Raises OutputIncomplete."""
    check(step.partial, step)
    files = _files(step.partial)
    for name in files:
        _sync(step.partial / name)
    sizes = {name: (step.partial / name).stat().st_size for name in files}
    content = {"command": step.command(), "digest": digest_of(step), "files": sizes}
    temporary = step.partial / f"{STAMP}.new"
    with temporary.open("w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.rename(step.partial / STAMP)
    _sync(step.partial)


def publish(step: Step) -> None:
    """Renames the stamped output to its name. An output that it replaces is removed last."""
    if step.output.exists():
        _remove(_replaced(step))
        step.output.rename(_replaced(step))
    step.partial.rename(step.output)
    _sync(step.output.parent)
    remove_rest(step)


def remove_rest(step: Step) -> None:
    """Removes what an interrupted replacement left behind."""
    _remove(_replaced(step))


def _replaced(step: Step) -> Path:
    return step.output.with_name(f"{REPLACED}{step.output.name}")


def _remove(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check(directory: Path, step: Step) -> None:
    """Raises OutputIncomplete unless the directory holds what the step makes."""
    for name in _expected(directory, step):
        file = directory / name
        if not file.is_file():
            raise OutputIncomplete(f"{name} is missing")
        if not file.stat().st_size:
            raise OutputIncomplete(f"{name} is empty")
        if file.suffix == ".safetensors":
            _check_safetensors(file)


def _expected(directory: Path, step: Step) -> Iterator[str]:
    yield "config.json"
    ranks = range(step.ranks)
    match step.content:
        case Content.ENGINE:
            yield from (f"rank{rank}.engine" for rank in ranks)
        case Content.CHECKPOINT:
            yield from (f"rank{rank}.safetensors" for rank in ranks)
        case Content.QUANTIZED:
            yield "hf_quant_config.json"
            yield from _weight_files(directory, "*.safetensors")
        case Content.MODEL:
            patterns = ("*.safetensors", "pytorch_model*.bin")
            fits = next((each for each in patterns if any(directory.glob(each))), patterns[0])
            yield from _weight_files(directory, fits)


def _weight_files(directory: Path, pattern: str) -> Iterator[str]:
    """The weights that are there, and the shards that their index names."""
    found = {file.name for file in directory.glob(pattern)}
    for index in directory.glob(f"{pattern}.index.json"):
        try:
            names = load_json(index.read_text(encoding="utf-8"))["weight_map"].values()
            found.update(str(name) for name in names if "/" not in str(name))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise OutputIncomplete(f"{index.name} is no index: {error}") from error
    if not found:
        raise OutputIncomplete(f"there are no weights: {pattern}")
    yield from sorted(found)


def _check_safetensors(file: Path) -> None:
    """Raises OutputIncomplete for a truncated file: the header says how long it is."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > size:
                raise OutputIncomplete(f"{file.name} is truncated")
            header = load_json(stream.read(length))
        ends = [each["data_offsets"][1] for name, each in header.items() if name != "__metadata__"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise OutputIncomplete(f"{file.name} is no safetensors file: {error}") from error
    if size < 8 + length + max(ends, default=0):
        raise OutputIncomplete(f"{file.name} is truncated")


def size_of(directory: Path) -> int:
    """Bytes of the files so far, hidden ones too; 0 for what is not there yet."""
    total = 0
    for file in directory.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:
            continue  # A tool removed it in between.
    return total
