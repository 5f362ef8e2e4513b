"""Loads that share what depends on a model alone: two thirds of the start of a tiny model's engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from trtmesh.engine.backends.torch import loading
from trtmesh.engine.backends.torch.compute.device import Device
from trtmesh.engine.backends.torch.compute.self_check import check_invariance, check_model
from trtmesh.engine.backends.torch.cpu.device import Cpu
from trtmesh.engine.backends.torch.guided import guidance
from trtmesh.engine.backends.torch.model import model
from trtmesh.engine.backends.torch.model.model import Model

Check = Callable[[Model, Device], None]
Version = tuple[tuple[str, int, int], ...]
"""The files of a model as they are now."""

_compilers: dict[tuple[object, ...], guidance.GuidanceCompiler | None] = {}
_passed = set[tuple[object, ...]]()
_once = set[tuple[object, ...]]()
"""Models that have been read."""
_read = model._weights


@contextmanager
def shared_loads() -> Iterator[None]:
    """Within the block, this process reads and checks unchanged files once, or twice."""
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(model, "_weights", _weights)
        patching.setattr(loading, "compiler_for", _compiler_for)
        for check in (check_model, check_invariance):
            patching.setattr(loading, check.__name__, _passing_once(check))
        yield


def _version(model_dir: Path) -> Version:
    files = [(each.name, each.stat()) for each in sorted(model_dir.iterdir())]
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in files)


def _weights(model_dir: Path, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """A copy, to which the engine adds layers. Many models have one engine only."""
    wanted = (model_dir, version := _version(model_dir), dtype)
    if wanted not in _once:
        _once.add(wanted)
        return _read(model_dir, config, dtype)
    return copy.deepcopy(_weights_of(model_dir, version, dtype))


@lru_cache(maxsize=16)
def _weights_of(model_dir: Path, _: Version, dtype: torch.dtype) -> PreTrainedModel:
    return _read(model_dir, model._config(model_dir), dtype)


def _compiler_for(
    model_dir: Path, vocabulary_size: int, end_ids: Sequence[int]
) -> guidance.GuidanceCompiler | None:
    file = model_dir / "tokenizer.json"
    key = (file.is_file() and file.read_bytes(), vocabulary_size, *end_ids)
    if key not in _compilers:
        _compilers[key] = guidance.compiler_for(model_dir, vocabulary_size, end_ids)
    return _compilers[key]


def _passing_once(check: Check) -> Check:
    def passing(checked: Model, device: Device) -> None:
        # Ranks compute the check together, and a GPU has to be warm.
        if not isinstance(device, Cpu) or device._group:
            check(checked, device)
            return
        settings, folder = device._settings, Path(checked.module.config._name_or_path)
        key = (
            *(check.__name__, folder, _version(folder), checked.dtype, torch.get_num_threads()),
            *(settings.batch_invariant, settings.limits.max_sequence_tokens),
            settings.adapters.model_dump_json(),
        )
        if key not in _passed:
            check(checked, device)
            _passed.add(key)

    return passing
