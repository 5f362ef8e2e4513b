"""The models of a repository, and which of TensorRT-LLM's models each of them is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from trtmesh.chassis.errors import SettingsError
from trtmesh.cli.triton_import.config_file import ConfigFile, read_config, read_limited
from trtmesh.router.doors.triton.model_settings import Template

MAX_MODELS = 256
"""Most models of a repository."""
CONFIG, ENGINE_ARGUMENTS = "config.pbtxt", "model.yaml"
VERSION = "1"


@dataclass(frozen=True, slots=True)
class RepositoryModel:
    """One model directory. `template` is None where it is none of TensorRT-LLM's models."""

    name: str
    directory: Path
    file: ConfigFile
    template: Template | None
    engine_arguments: Mapping[str, Any]
    """Of `model.yaml`, which the llmapi model has beside its code."""

    @property
    def config(self) -> Any:
        return self.file.config

    @property
    def parameters(self) -> Mapping[str, str]:
        return {key: each.string_value for key, each in sorted(self.config.parameters.items())}


def read_repository(directory: Path) -> list[RepositoryModel]:
    """All models, by name. Raises SettingsError where there is none or one cannot be read."""
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
    template = _recognise(file.config, has_engine_arguments=arguments is not None)
    return RepositoryModel(directory.name, directory, file, template, arguments or {})


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


def _recognise(config: Any, *, has_engine_arguments: bool) -> Template | None:
    """By what the model declares, because directories may have any name."""
    inputs = {given.name for given in config.input}
    if config.platform == "ensemble" or config.HasField("ensemble_scheduling"):
        return "ensemble"
    if config.backend == "tensorrtllm":
        return "tensorrt_llm"
    if "QUERY" in inputs:
        return "preprocessing"
    if "TOKENS_BATCH" in inputs:
        return "postprocessing"
    if "context_model_name" in config.parameters or "generation_model_name" in config.parameters:
        return "disaggregated_serving_bls"
    if "text_input" in inputs:
        if has_engine_arguments or any(name.startswith("sampling_param_") for name in inputs):
            return "llmapi"
        return "tensorrt_llm_bls"
    return "tensorrt_llm" if "input_ids" in inputs else None
