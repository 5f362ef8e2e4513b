"""From a model repository to the configuration of a mesh that serves the same models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtmesh.chassis.errors import SettingsError
from trtmesh.chassis.fingerprint import tokenizer_fingerprint
from trtmesh.cli.triton_import.config_file import is_unset
from trtmesh.cli.triton_import.engine_arguments import arguments_of, convert_argument
from trtmesh.cli.triton_import.fields import convert_fields
from trtmesh.cli.triton_import.findings import Draft, Finding, Subject
from trtmesh.cli.triton_import.parameters import PARAMETERS
from trtmesh.cli.triton_import.references import Repository
from trtmesh.cli.triton_import.repository import ENGINE_ARGUMENTS, RepositoryModel
from trtmesh.cli.triton_import.rules import MODELS, TORCH, unsupported
from trtmesh.cli.triton_import.weights import ENGINE_PARAMETERS, Weights, find_weights

INHERITED: Mapping[str, Sequence[str]] = {
    "tensorrt_llm": ("decoupled", "exclude_input_in_output", "max_beam_width"),
    "preprocessing": ("add_special_tokens",),
    "postprocessing": ("skip_special_tokens",),
}
"""What a text model is as its steps are, where it does not say."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """The configuration, and what became of everything in the repository."""

    sections: Mapping[str, Any]
    """As a configuration file has them."""
    findings: Sequence[Finding]
    served: Sequence[str]
    unserved: Mapping[str, str]
    """Models of the repository that the mesh cannot serve, with the reason."""


def convert_repository(
    directory: Path, model_directories: Mapping[str, Path], device: str = ""
) -> Conversion:
    """Reads a repository. `model_directories` has the weights by the model that runs them, '' standing for all;
    `device` is what engines run on, in PyTorch's words. Raises SettingsError or ModelUnusable."""
    repository = Repository.read(directory)
    weights = find_weights(repository, model_directories)
    unserved = _unserved(repository, weights)
    draft = Draft()
    _put_weights(weights, device, draft)
    for model in repository:
        if model.name in unserved:
            subject = Subject(model.name, "the whole model", str(model.template or "unknown"))
            draft.refuse(subject, unserved[model.name])
        else:
            _convert_model(model, repository, weights, draft)
    for model in repository:
        if model.name not in unserved:
            _inherit(model, repository, draft)
    served = [model.name for model in repository if model.name not in unserved]
    return Conversion(draft.sections, draft.findings, served, unserved)


def _unserved(repository: Repository, weights: Weights) -> dict[str, str]:
    unserved: dict[str, str] = {}
    for model in repository:
        if reason := repository.problem(model) or _weights_problem(model, repository, weights):
            unserved[model.name] = reason
    return unserved


def _weights_problem(model: RepositoryModel, repository: Repository, weights: Weights) -> str:
    cores = repository.cores_of(model)
    needed = [weights.needed[core] for core in cores if core in weights.needed]
    if model.template in ("preprocessing", "postprocessing"):
        # It may belong to several models; one of them is enough to have something to do.
        return needed[0] if len(needed) == len(cores) else ""
    if not needed and len({weights.directories[core] for core in cores}) > 1:
        return f"models with different weights stand behind it: {', '.join(cores)}"
    return needed[0] if needed else ""


def _put_weights(weights: Weights, device: str, draft: Draft) -> None:
    first, *others = map(str, weights.distinct)
    draft.put(("mesh", "model"), first)
    if others:
        draft.put(("mesh", "models"), others)
    if device:
        draft.put((*TORCH, "device"), device)


def _convert_model(
    model: RepositoryModel, repository: Repository, weights: Weights, draft: Draft
) -> None:
    cores = repository.cores_of(model)
    directory = next(weights.directories[core] for core in cores if core in weights.directories)
    own = (*MODELS, model.name)
    draft.put((*own, "template"), model.template)
    if len(weights.distinct) > 1:
        draft.put((*own, "model"), directory.name)
    _convert_steps(model, repository, draft)
    _convert_parameters(model, directory, draft)
    for name, value in arguments_of(model.engine_arguments):
        subject = Subject(model.name, f"{ENGINE_ARGUMENTS}: {name}", value)
        if is_unset(value):
            draft.leave(subject)
        else:
            convert_argument(name, subject, draft)
    convert_fields(model, draft)


def _convert_steps(model: RepositoryModel, repository: Repository, draft: Draft) -> None:
    """The models that a request to this one counts for too."""
    path = (*MODELS, model.name, "steps")
    steps = repository.steps_of(model)
    if model.template == "ensemble":
        draft.carry(Subject(model.name, "ensemble_scheduling", ", ".join(steps)), path, steps)
    elif model.template == "disaggregated_serving_bls":
        # One engine does what both halves do, and the last one is what clients get.
        draft.put(path, steps[-1:])
    elif steps:
        draft.put(path, steps)


def _convert_parameters(model: RepositoryModel, directory: Path, draft: Draft) -> None:
    """In the order of the rules, because some decide what others mean; those without a rule last."""
    assert model.template is not None
    rules, parameters = PARAMETERS[model.template], model.parameters
    known = [name for name in rules if name in parameters]
    for name in (*known, *(name for name in parameters if name not in rules)):
        subject = Subject(model.name, f"parameters.{name}", parameters[name])
        if is_unset(subject.value):
            draft.leave(subject)
        elif name in ENGINE_PARAMETERS:
            draft.replace(subject, f"the engine reads the Hugging Face model in {directory}")
        elif name == "tokenizer_dir" and model.template != "tensorrt_llm":
            _convert_tokenizer(subject, directory, draft)
        else:
            rules.get(name, unsupported("no model of TensorRT-LLM's has it"))(subject, draft)


def _convert_tokenizer(subject: Subject, directory: Path, draft: Draft) -> None:
    """The tokenizer beside the weights is used, which is the same one unless the files say otherwise."""
    own = Path(subject.value)
    try:
        differs = own.is_dir() and tokenizer_fingerprint(own) != tokenizer_fingerprint(directory)
    except (OSError, ValueError) as error:
        raise SettingsError(f"cannot compare {own} with {directory}: {error}") from error
    if differs:
        draft.refuse(
            subject,
            f"the tokenizer beside the weights, in {directory}, is another one, and it is used; copy these files there"
            " if they are right",
        )
    else:
        draft.replace(subject, f"the tokenizer in {directory}, beside the weights")


def _inherit(model: RepositoryModel, repository: Repository, draft: Draft) -> None:
    """Settings that a text model gets from the models that it is made of."""
    for step in repository.steps_of(model):
        template = repository.models[step].template if step in repository.models else None
        for name in INHERITED.get(template or "", ()):
            path = (*MODELS, model.name, name)
            value = draft.get((*MODELS, step, name))
            if value is not None and draft.get(path) is None:
                draft.put(path, value)
