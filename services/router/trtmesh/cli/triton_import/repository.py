"""The models of a repository, and the recipe of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from trtmesh.chassis.errors import SettingsError
from trtmesh.cli.triton_import.config_file import ConfigFile, read_config, read_limited
from trtmesh.cli.triton_import.recipes import RECIPES, Declared, Recipe
from trtmesh.cli.triton_import.rules import MODELS

MAX_MODELS = 256
"""Most models of a repository."""
CONFIG, ENGINE_ARGUMENTS = "config.pbtxt", "model.yaml"
VERSION = "1"


@dataclass(frozen=True, slots=True)
class RepositoryModel:
    """A model directory. `recipe` is None for models other than TensorRT-LLM's."""

    name: str
    directory: Path
    file: ConfigFile
    declared: Declared
    recipe: Recipe | None

    @property
    def config(self) -> Any:
        return self.file.config

    @property
    def parameters(self) -> Mapping[str, str]:
        return self.declared.parameters

    @property
    def is_core(self) -> bool:
        return self.recipe is not None and self.recipe.is_core

    @property
    def tokenizes(self) -> bool:
        return self.recipe is not None and self.recipe.tokenizes

    @property
    def steps(self) -> list[str]:
        """The names of the models it asks."""
        return [] if self.recipe is None else self.recipe.steps(self.declared)

    @property
    def path(self) -> tuple[str, ...]:
        """Its place in the configuration."""
        return (*MODELS, self.name)


def read_repository(directory: Path) -> list[RepositoryModel]:
    """All models, by name. Raises SettingsError for an empty repository or an unreadable model."""
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
    return [_read_model(path) for path in found]


def _read_model(directory: Path) -> RepositoryModel:
    file = read_config(directory / CONFIG)
    if file.config.name not in ("", directory.name):
        raise SettingsError(
            f"{directory / CONFIG}: name is {file.config.name!r} but its directory is {directory.name!r}, which Triton"
            " does not load either"
        )
    arguments = _read_engine_arguments(directory / VERSION / ENGINE_ARGUMENTS)
    declared = Declared(file.config, arguments)
    recipe = next((recipe for recipe in RECIPES if recipe.recognises(declared)), None)
    return RepositoryModel(directory.name, directory, file, declared, recipe)


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
