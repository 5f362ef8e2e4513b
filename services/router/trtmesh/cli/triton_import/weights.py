"""Finds the Hugging Face weights of each core model: the embedded engine cannot run TensorRT engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtmesh.chassis.errors import ModelUnusable, SettingsError
from trtmesh.cli.triton_import.config_file import is_unset
from trtmesh.cli.triton_import.recipes import RepositoryModel
from trtmesh.cli.triton_import.repository import Repository

EVERY = ""
"""Stands for all models: a directory given without a name."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Directories by core model; for models without one, the advice to the user."""

    directories: Mapping[str, Path]
    needed: Mapping[str, str]

    @property
    def distinct(self) -> list[Path]:
        return list(dict.fromkeys(self.directories.values()))


def find_weights(repository: Repository, given: Mapping[str, Path]) -> Weights:
    """The given directories, else the repository's own Hugging Face directories. Raises SettingsError for an unknown
    model name, or ModelUnusable if nothing can be served."""
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
        found = given.get(core.name) or given.get(EVERY) or _named_directory(repository, core)
        if found is None:
            needed[core.name] = _needed(core)
        else:
            directories[core.name] = _checked(core, found)
    if not directories:
        raise ModelUnusable("; ".join(needed.values()) or "no model of the repository runs one")
    _check_names(directories)
    return Weights(directories, needed)


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
    texts = [_source(core)]
    for model in repository.tokenizers_of(core):
        parameters = model.parameters
        texts += [parameters.get(name, "") for name in ("hf_model_path", "tokenizer_dir")]
    for text in texts:
        if not is_unset(text) and Path(text).is_absolute() and _has_weights(Path(text)):
            return Path(text)
    return None


def _has_weights(directory: Path) -> bool:
    return (directory / "config.json").is_file() and any(directory.glob("*.safetensors"))


def _checked(core: RepositoryModel, directory: Path) -> Path:
    directory = directory.resolve()
    if not _has_weights(directory):
        raise ModelUnusable(
            f"{directory}, for model '{core.name}', has no config.json with *.safetensors: the embedded"
            " engine reads Hugging Face models"
        )
    return directory


def _needed(core: RepositoryModel) -> str:
    source = _source(core)
    names = f"names {source}, which is" if source else "names"
    return (
        f"model '{core.name}' {names} no directory with a Hugging Face model (config.json and *.safetensors); give the"
        f" one that the engine was built from: --model DIR, or --model {core.name}=DIR"
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
