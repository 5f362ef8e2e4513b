"""References between the models of a repository."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trtmesh.cli.triton_import.repository import RepositoryModel, read_repository


class Repository:
    """The models of a repository, by name."""

    def __init__(self, models: Sequence[RepositoryModel]) -> None:
        self.models: Mapping[str, RepositoryModel] = {model.name: model for model in models}

    @classmethod
    def read(cls, directory: Path) -> Repository:
        """Raises SettingsError."""
        return cls(read_repository(directory))

    def __iter__(self) -> Iterator[RepositoryModel]:
        return iter(self.models.values())

    def cores_of(self, model: RepositoryModel) -> list[str]:
        """The core models behind a model; for a tokenizer, the core models of its users."""
        if model.is_core:
            return [model.name]
        users = [model]
        if model.tokenizes:
            users = [user for user in self if model.name in user.steps]
            if not users:
                return [core.name for core in self if core.is_core][:1]
        return [
            step
            for user in users
            for step in user.steps
            if step in self.models and self.models[step].is_core
        ]

    def tokenizers_of(self, core: RepositoryModel) -> list[RepositoryModel]:
        """The tokenizers of a core model."""
        return [model for model in self if model.tokenizes and core.name in self.cores_of(model)]

    def problem(self, model: RepositoryModel) -> str:
        """Why the mesh cannot serve a model; '' if the configurations allow it."""
        if model.recipe is None:
            return "it is not one of TensorRT-LLM's models, and no code of a repository is run"
        for name in model.steps:
            if name not in self.models:
                if name not in model.recipe.provided_steps:
                    return f"it asks model '{name}', which the repository does not have"
            elif model.recipe.step_recipes and not self._is_one_of(name, model.recipe.step_recipes):
                return f"its step '{name}' has no counterpart in the mesh"
        return "" if self.cores_of(model) else "no model with weights serves it"

    def _is_one_of(self, name: str, templates: Sequence[str]) -> bool:
        recipe = self.models[name].recipe
        return recipe is not None and recipe.template.name in templates
