"""From a model repository to the configuration of a mesh with the same models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtmesh.chassis.device_names import DeviceName
from trtmesh.chassis.errors import SettingsError
from trtmesh.tools.triton_import.config_file import is_unset
from trtmesh.tools.triton_import.devices import PARAMETER, convert_devices, place_engines
from trtmesh.tools.triton_import.fields import convert_fields
from trtmesh.tools.triton_import.findings import Draft, Finding, Subject
from trtmesh.tools.triton_import.parameters import (
    ARGUMENTS,
    DRAFT_MODEL,
    OF_THE_LIBRARY,
    arguments_of,
)
from trtmesh.tools.triton_import.recipes import Recipe, RepositoryModel
from trtmesh.tools.triton_import.release import set_release
from trtmesh.tools.triton_import.repository import ENGINE_ARGUMENTS, Repository
from trtmesh.tools.triton_import.rules import MODELS, TORCH, Rule, unsupported
from trtmesh.tools.triton_import.tensorrt_llm import (
    ALL_ARGUMENTS,
    BACKEND,
    CORE_OVERRIDES,
    rename_settings,
)
from trtmesh.tools.triton_import.weights import WeightFolders, find_weights


@dataclass(frozen=True, slots=True)
class Conversion:
    """The configuration, and a finding for every value of the repository."""

    sections: Mapping[str, Any]
    """Sections of a configuration file; empty if no model is served."""
    findings: Sequence[Finding]
    served: Sequence[str]
    unserved: Mapping[str, str]
    """Models without a counterpart in the mesh, with the reason."""
    unfilled: Sequence[str]
    """Placeholders without a value."""


def convert_repository(
    directory: Path,
    model_directories: Mapping[str, Path],
    device: str = "",
    values: Mapping[str, str] | None = None,
    backend: str = "",
) -> Conversion:
    """Reads a repository. `model_directories` has the weights by core model, '' for all; `device` is a name
    as of `engine.torch.device`; `values` fill the templates; `backend` is that of the engines, '' the embedded one.
    Raises SettingsError or ModelUnusable."""
    if backend and device:
        raise SettingsError(f"--device {device} is for the embedded engine, not for {backend}")
    _check_device(device)
    repository = Repository(directory, values)
    weights = find_weights(repository, model_directories)
    problems = {m.name: _problem(m, repository, weights) for m in repository}
    unserved = {name: reason for name, reason in problems.items() if reason}
    served = [model for model in repository if model.name not in unserved]
    draft = Draft()
    if backend:
        draft.put(("mesh", "backend"), backend)
    if served:
        _put_weights(weights, device, draft)
        set_release(served, draft)
        place_engines(served, weights, draft)
    # Engines first: the inputs of other models depend on their settings.
    for model in sorted(repository, key=lambda each: not each.is_core):
        if model.name in unserved:
            template = "unknown" if model.recipe is None else model.recipe.template.name
            subject = Subject(model.name, "the whole model", template)
            draft.refuse(subject, unserved[model.name])
        elif model.recipe is not None:
            _convert_model(model, model.recipe, repository, weights, draft)
    for model in served:
        _inherit(model, repository, draft)
    if backend:
        rename_settings(draft)
    order = {model.name: place for place, model in enumerate(repository)}
    # What concerns all models comes first.
    draft.findings.sort(key=lambda finding: order.get(finding.model, -1))
    names = [model.name for model in served]
    return Conversion(draft.sections, draft.findings, names, unserved, repository.unfilled)


def _check_device(device: str) -> None:
    """Raises SettingsError for what is no name of a device; '' names none."""
    try:
        DeviceName(device or "cpu")
    except ValueError as error:
        raise SettingsError(f"--device is {device!r} but {error}") from error


def _problem(model: RepositoryModel, repository: Repository, weights: WeightFolders) -> str:
    """Why the mesh cannot serve a model; '' if it can."""
    if reason := repository.problem(model):
        return reason
    cores = repository.cores_of(model)
    needed = [weights.needed[core] for core in cores if core in weights.needed]
    if model.tokenizes:
        # One usable core model is enough.
        return needed[0] if len(needed) == len(cores) else ""
    if not needed and len({weights.directories[core] for core in cores}) > 1:
        return f"models with different weights serve it: {', '.join(cores)}"
    return needed[0] if needed else ""


def _put_weights(weights: WeightFolders, device: str, draft: Draft) -> None:
    directories = [str(directory) for directory in weights.distinct]
    draft.put(("mesh", "model"), directories if len(directories) > 1 else directories[0])
    if device:
        draft.put((*TORCH, "device"), device)


def _convert_model(
    model: RepositoryModel,
    recipe: Recipe,
    repository: Repository,
    weights: WeightFolders,
    draft: Draft,
) -> None:
    cores = repository.cores_of(model)
    directory = next(weights.directories[core] for core in cores if core in weights.directories)
    draft.put((*model.path, "template"), recipe.template.name)
    if len(weights.distinct) > 1:
        draft.put((*model.path, "model"), directory.name)
    _convert_steps(model, recipe, draft)
    convert_devices(model, directory, draft)
    spread = draft.get(("mesh", "backend")) == BACKEND
    arguments = ALL_ARGUMENTS if spread else ARGUMENTS
    overrides = CORE_OVERRIDES if spread and model.is_core else {}
    if DRAFT_MODEL in recipe.parameters:
        overrides = {**overrides, DRAFT_MODEL: _drafts_with(weights)}
    _convert_parameters(model, recipe, overrides, directory, draft)
    for name, value in arguments_of(model.engine_arguments or {}):
        subject = Subject(model.name, f"{ENGINE_ARGUMENTS}: {name}", value, directory)
        if is_unset(value):
            draft.leave(subject)
        else:
            arguments.get(name, unsupported(OF_THE_LIBRARY))(subject, draft)
    convert_fields(model, recipe, draft)


def _drafts_with(weights: WeightFolders) -> Rule:
    """The model that drafts for a BLS, by the name that the mesh gives it."""

    def rule(subject: Subject, draft: Draft) -> None:
        directory = weights.directories.get(subject.value)
        if directory is None:
            unknown = "the repository has no model of this name with weights of its own"
            draft.refuse(subject, weights.needed.get(subject.value, unknown))
        else:
            draft.carry(subject, (*MODELS, subject.model, "draft_model"), directory.name)

    return rule


def _convert_steps(model: RepositoryModel, recipe: Recipe, draft: Draft) -> None:
    """The models for which requests count too."""
    path = (*model.path, "steps")
    steps = model.steps[-1:] if recipe.counts_last_step else model.steps
    if recipe.steps_field:
        draft.carry(Subject(model.name, recipe.steps_field, ", ".join(steps)), path, steps)
    elif steps:
        draft.put(path, steps)


def _convert_parameters(
    model: RepositoryModel,
    recipe: Recipe,
    overrides: Mapping[str, Rule],
    directory: Path,
    draft: Draft,
) -> None:
    """Converts parameters in the order of the rules, because some depend on others; parameters without a rule last."""
    rules = {**recipe.parameters, **overrides}
    parameters = {name: each for name, each in model.parameters.items() if name != PARAMETER}
    known = [name for name in rules if name in parameters]
    for name in (*known, *(name for name in parameters if name not in rules)):
        subject = Subject(model.name, f"parameters.{name}", parameters[name], directory)
        if not is_unset(subject.value):
            rules.get(name, unsupported("no model of TensorRT-LLM's has it"))(subject, draft)
        elif name not in recipe.defaults:
            draft.leave(subject)
    for name, default in recipe.defaults.items():
        if is_unset(value := parameters.get(name, "")):
            draft.put((*model.path, name), default)
            subject = Subject(model.name, f"parameters.{name}", value)
            draft.leave(subject, f"it is {str(default).lower()}, Triton's default")


def _inherit(model: RepositoryModel, repository: Repository, draft: Draft) -> None:
    """Copies settings of the steps to an ensemble or BLS, those of their own steps first."""
    for name in model.steps:
        step = repository.models.get(name)
        if step is None or step.recipe is None:
            continue
        _inherit(step, repository, draft)
        for setting in step.recipe.inherited:
            path = (*model.path, setting)
            value = draft.get((*MODELS, name, setting))
            if value is not None and draft.get(path) is None:
                draft.put(path, value)
