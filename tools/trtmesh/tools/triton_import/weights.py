"""Finds the Hugging Face weights of each core model: the embedded engine cannot run TensorRT engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtmesh.chassis.errors import ModelUnusable, SettingsError
from trtmesh.chassis.model_dir import check_model_dir
from trtmesh.tools.triton_import.config_file import is_unset
from trtmesh.tools.triton_import.hf_model import advice, has_weights, reason_unusable
from trtmesh.tools.triton_import.parameters import NO_ENCODER
from trtmesh.tools.triton_import.recipes import RepositoryModel
from trtmesh.tools.triton_import.repository import Repository

EVERY = ""
"""Stands for all models: a directory given without a name."""


@dataclass(frozen=True, slots=True)
class WeightFolders:
    """Directories by core model; for models without one, the advice to the user."""

    directories: Mapping[str, Path]
    needed: Mapping[str, str]

    @property
    def distinct(self) -> list[Path]:
        return list(dict.fromkeys(self.directories.values()))


def find_weights(repository: Repository, given: Mapping[str, Path]) -> WeightFolders:
    """The given directories, else the repository's own Hugging Face directories. Raises SettingsError for an unknown
    model name, or ModelUnusable for an unsuitable directory."""
    cores = [model for model in repository if model.is_core]
    unknown = set(given) - {EVERY} - {core.name for core in cores}
    if unknown:
        known = ", ".join(core.name for core in cores) or "none"
        raise SettingsError(
            f"--model names {', '.join(map(repr, sorted(unknown)))}, but the models with weights of their own are:"
            f" {known}"
        )
    if EVERY in given:
        _check_one_engine(cores, given)
    directories: dict[str, Path] = {}
    needed: dict[str, str] = {}
    for core in cores:
        chosen = given.get(core.name) or given.get(EVERY)
        if chosen:
            check_model_dir(chosen)
        found = chosen or _named_directory(repository, core)
        if found is None:
            needed[core.name] = _needed(repository, core)
            continue
        directory = found.resolve()
        reason = reason_unusable(directory)
        if reason and chosen:
            raise ModelUnusable(f"{directory}, for model '{core.name}', {reason}")
        if reason:
            needed[core.name] = f"{directory} {reason}"
        else:
            directories[core.name] = directory
    _check_names(directories)
    return WeightFolders(directories, needed)


def _check_one_engine(cores: Sequence[RepositoryModel], given: Mapping[str, Path]) -> None:
    """A directory without a name fits a single engine, and the engine's own directory."""
    every = given[EVERY].resolve()
    others = {
        core.name: source
        for core in cores
        if core.name not in given and Path(source := _source(core)).resolve() != every
    }
    if len(set(others.values())) > 1:
        listed = ", ".join(f"{name} ({source or 'unset'})" for name, source in others.items())
        raise SettingsError(
            f"the repository has several engines: {listed}; name each with --model NAME=DIR"
        )


def _source(core: RepositoryModel) -> str:
    """The engine or model named in the repository, verbatim; '' if none."""
    assert core.recipe is not None
    return core.recipe.engine(core)


def _named_directory(repository: Repository, core: RepositoryModel) -> Path | None:
    """The first Hugging Face directory named in the repository."""
    return next(filter(has_weights, _directories(repository, core)), None)


def _directories(repository: Repository, core: RepositoryModel) -> Iterator[Path]:
    """The absolute paths that the repository names for a model or its tokenizers."""
    texts = [_source(core)]
    for model in repository.tokenizers_of(core):
        parameters = model.parameters
        texts += [parameters.get(name, "") for name in ("hf_model_path", "tokenizer_dir")]
    return (Path(t) for t in texts if not is_unset(t) and Path(t).is_absolute())


def _needed(repository: Repository, core: RepositoryModel) -> str:
    if not is_unset(core.parameters.get("encoder_model_path", "")):
        return NO_ENCODER
    source = _source(core)
    names = f"names {source}, which is" if source else "names"
    hints = (advice(directory) for directory in _directories(repository, core))
    return (
        f"model '{core.name}' {names} no directory with a Hugging Face model (config.json and *.safetensors); give the"
        f" one that the engine was built from: --model DIR, or --model {core.name}=DIR"
        f"{next(filter(None, hints), '')}"
    )


def _check_names(directories: Mapping[str, Path]) -> None:
    """Models of the mesh are named after their directories."""
    by_name: dict[str, Path] = {}
    for directory in directories.values():
        if by_name.setdefault(directory.name, directory) != directory:
            raise SettingsError(
                f"{directory} and {by_name[directory.name]} have the same name, so the mesh could not tell them apart;"
                " rename one"
            )
