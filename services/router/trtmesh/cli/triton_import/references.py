"""How the models of a repository refer to each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trtmesh.cli.triton_import.config_file import is_unset
from trtmesh.cli.triton_import.repository import RepositoryModel, read_repository

CORES = frozenset({"tensorrt_llm", "llmapi"})
"""Templates that run a model of their own."""
STEPS = frozenset({"preprocessing", "tensorrt_llm", "postprocessing"})
"""Templates that an ensemble may be made of."""


class Repository:
    """The models of a repository, each of which may stand for others."""

    def __init__(self, models: Sequence[RepositoryModel]) -> None:
        self.models: Mapping[str, RepositoryModel] = {model.name: model for model in models}

    @classmethod
    def read(cls, directory: Path) -> Repository:
        """Raises SettingsError."""
        return cls(read_repository(directory))

    def __iter__(self) -> Iterator[RepositoryModel]:
        return iter(self.models.values())

    def steps_of(self, model: RepositoryModel) -> list[str]:
        """The models that a text model is made of, by the names it has for them."""
        if model.template == "ensemble":
            return [step.model_name for step in model.config.ensemble_scheduling.step]
        if model.template == "tensorrt_llm_bls":
            core = model.parameters.get("tensorrt_llm_model_name", "")
            return ["preprocessing", "tensorrt_llm" if is_unset(core) else core, "postprocessing"]
        if model.template == "disaggregated_serving_bls":
            names = ("context_model_name", "generation_model_name")
            texts = [model.parameters.get(name, "") for name in names]
            return [text for text in texts if not is_unset(text)]
        return []

    def cores_of(self, model: RepositoryModel) -> list[str]:
        """The models with weights that stand behind a model. A tokenizer alone belongs to whoever has it as a step."""
        if model.template in CORES:
            return [model.name]
        users = [model]
        if model.template in ("preprocessing", "postprocessing"):
            users = [user for user in self if model.name in self.steps_of(user)]
            if not users:
                return [core.name for core in self if core.template in CORES][:1]
        return [
            step
            for user in users
            for step in self.steps_of(user)
            if step in self.models and self.models[step].template in CORES
        ]

    def preprocessors_of(self, core: RepositoryModel) -> list[RepositoryModel]:
        """What encodes for a core model, and decodes its answers."""
        templates = ("preprocessing", "postprocessing")
        return [
            model
            for model in self
            if model.template in templates and core.name in self.cores_of(model)
        ]

    def problem(self, model: RepositoryModel) -> str:
        """Why the mesh cannot be what the model is; '' when it can, as far as the configurations tell."""
        if model.template is None:
            return "it is none of TensorRT-LLM's models, and no code of a repository is run"
        missing = [name for name in self.steps_of(model) if name not in self.models]
        if model.template == "ensemble":
            for name in self.steps_of(model):
                if name in self.models and self.models[name].template not in STEPS:
                    return f"its step '{name}' is none that the mesh has"
        elif model.template == "tensorrt_llm_bls":
            # It needs its core alone: what encodes and decodes is the mesh's.
            missing = [name for name in missing if name not in ("preprocessing", "postprocessing")]
        if missing:
            return f"it asks model '{missing[0]}', which the repository does not have"
        return "" if self.cores_of(model) else "no model with weights stands behind it"
