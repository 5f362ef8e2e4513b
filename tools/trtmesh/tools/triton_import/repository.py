"""Reads a repository; references between its models."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from trtmesh.chassis.config_file import suggestion
from trtmesh.chassis.errors import SettingsError
from trtmesh.tools.triton_import.config_file import parse_config, read_limited
from trtmesh.tools.triton_import.filling import fill, placeholders
from trtmesh.tools.triton_import.recipes import RepositoryModel, reason_unserved

MAX_MODELS = 256
"""Most models of a repository."""
MAX_DEPTH = 2
"""Most models between an ensemble and a core model: an ensemble asks a BLS, which asks the core models."""
CONFIG, ENGINE_ARGUMENTS = "config.pbtxt", "model.yaml"
VERSION = "1"


class Repository:
    """The models of a repository, by name."""

    def __init__(self, directory: Path, values: Mapping[str, str] | None = None) -> None:
        """Reads a repository, its templates filled in with `values` if given.

        Raises SettingsError if it is empty, a model is unreadable or no template has one of the keys.
        """
        paths = _model_directories(directory)
        texts = {path: read_limited(path / CONFIG) for path in paths}
        if values is not None:
            _check_keys(values, set().union(*map(placeholders, texts.values())))
            texts = {path: fill(text, values) for path, text in texts.items()}
        self.models = {path.name: _read_model(path, text) for path, text in texts.items()}
        self.unfilled = sorted(set().union(*map(placeholders, texts.values())))
        """Placeholders without a value."""

    def __iter__(self) -> Iterator[RepositoryModel]:
        return iter(self.models.values())

    def cores_of(self, model: RepositoryModel) -> list[str]:
        """The core models that serve a model; for a tokenizer, the core models of its users."""
        if not model.tokenizes:
            return list(dict.fromkeys(self._cores_of(model)))
        users = [user for user in self if model.name in user.steps]
        if not users:
            return [core.name for core in self if core.is_core][:1]
        return list(dict.fromkeys(core for user in users for core in self._cores_of(user)))

    def _cores_of(self, model: RepositoryModel, depth: int = 0) -> Iterator[str]:
        if model.is_core:
            yield model.name
        elif depth < MAX_DEPTH:
            for name in model.steps:
                if name in self.models:
                    yield from self._cores_of(self.models[name], depth + 1)

    def tokenizers_of(self, core: RepositoryModel) -> list[RepositoryModel]:
        return [model for model in self if model.tokenizes and core.name in self.cores_of(model)]

    def problem(self, model: RepositoryModel) -> str:
        """Why the mesh cannot serve a model; '' if the configurations allow it."""
        if model.recipe is None:
            return reason_unserved(model)
        if not re.fullmatch(r"[^/\s]{1,256}", model.name):
            return "its name has white space or more than 256 characters"
        for name in model.steps:
            if name not in self.models:
                if name not in model.recipe.provided_steps:
                    return f"it asks model '{name}', which the repository does not have"
            elif not self._is_one_of(name, model.recipe.step_recipes):
                return f"its step '{name}' has no counterpart in the mesh"
            elif reason := self.problem(self.models[name]):
                return f"its step '{name}' is not served: {reason}"
        return "" if self.cores_of(model) else "no model with weights serves it"

    def _is_one_of(self, name: str, templates: Sequence[str]) -> bool:
        recipe = self.models[name].recipe
        return recipe is not None and recipe.template.name in templates


def _model_directories(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise SettingsError(f"the model repository {str(directory)!r} is no directory")
    found = sorted(
        path
        for path in directory.iterdir()
        if not path.name.startswith(".") and (path / CONFIG).exists()
    )
    if not found:
        raise SettingsError(
            f"the model repository {str(directory)!r} has no directory with a {CONFIG}; name the one whose"
            " subdirectories are the models"
        )
    if len(found) > MAX_MODELS:
        raise SettingsError(f"{directory} has {len(found)} models; at most {MAX_MODELS} are read")
    return found


def _check_keys(values: Mapping[str, str], known: set[str]) -> None:
    for key in values:
        if key not in known:
            raise SettingsError(
                f"--fill names {key!r}, but no {CONFIG} has the placeholder ${{{key}}}"
                f"{suggestion(key, known)}"
            )


def _read_model(directory: Path, text: str) -> RepositoryModel:
    config, unfilled = parse_config(text, directory / CONFIG)
    if config.name not in ("", directory.name):
        raise SettingsError(
            f"{directory / CONFIG}: name is {config.name!r} but its directory is {directory.name!r}, which Triton does"
            " not load either"
        )
    arguments = _read_engine_arguments(directory / VERSION / ENGINE_ARGUMENTS)
    return RepositoryModel(directory.name, config, unfilled, arguments)


def _read_engine_arguments(file: Path) -> Mapping[str, Any] | None:
    if not file.exists():
        return None
    try:
        content = yaml.safe_load(read_limited(file))
    except (yaml.YAMLError, RecursionError) as error:
        raise SettingsError(f"{file} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise SettingsError(f"{file} must be a mapping of arguments")
    return {str(key): value for key, value in content.items()}
