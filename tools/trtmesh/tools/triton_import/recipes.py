"""The models of a repository, and for each template: how to recognise and import its models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from trtmesh.router.doors.triton.templates.catalogue import TEMPLATES
from trtmesh.router.doors.triton.templates.template import Template
from trtmesh.router.doors.triton.templates.tokenization import TokenizerTemplate
from trtmesh.tools.triton_import.config_file import UnfilledValue, is_unset
from trtmesh.tools.triton_import.parameters import (
    BLS_PARAMETERS,
    CORE_DEFAULTS,
    CORE_PARAMETERS,
    DISAGGREGATED_PARAMETERS,
    NO_PICTURES,
    NO_SPEECH,
    TEXT_PARAMETERS,
)
from trtmesh.tools.triton_import.rules import MODELS, Rule

ENGINE_PARAMETERS = ("gpt_model_path", "engine_dir")
BACKENDS = ("tensorrtllm", "inflight_batcher_llm")
"""Names of the C++ backend; before v0.7 it was the second."""
CORE_INPUTS = frozenset({"input_ids", "input_lengths", "request_output_len"})


@dataclass(frozen=True)
class RepositoryModel:
    name: str
    config: Any
    """The parsed ModelConfig."""
    unfilled: Sequence[UnfilledValue]
    engine_arguments: Mapping[str, Any] | None
    """Arguments in `model.yaml`; None without the file."""

    @cached_property
    def recipe(self) -> Recipe | None:
        """None for models other than TensorRT-LLM's."""
        return next((recipe for recipe in RECIPES if recipe.recognises(self)), None)

    @cached_property
    def inputs(self) -> frozenset[str]:
        return frozenset(given.name for given in self.config.input)

    @cached_property
    def outputs(self) -> frozenset[str]:
        return frozenset(each.name for each in self.config.output)

    @cached_property
    def parameters(self) -> Mapping[str, str]:
        return {key: each.string_value for key, each in sorted(self.config.parameters.items())}

    @property
    def is_core(self) -> bool:
        """Whether it runs weights itself."""
        return self.recipe is not None and self.recipe.template.is_core

    @property
    def tokenizes(self) -> bool:
        return self.recipe is not None and isinstance(self.recipe.template, TokenizerTemplate)

    @property
    def steps(self) -> list[str]:
        """The names of the models called by a model."""
        return [] if self.recipe is None else self.recipe.steps(self)

    @property
    def path(self) -> tuple[str, ...]:
        """Its place in the configuration."""
        return (*MODELS, self.name)


def _is_ensemble(model: RepositoryModel) -> bool:
    has_scheduling: bool = model.config.HasField("ensemble_scheduling")
    return has_scheduling or model.config.platform == "ensemble"


def _asks_halves(model: RepositoryModel) -> bool:
    return bool({"context_model_name", "generation_model_name"} & set(model.parameters))


def _is_core(model: RepositoryModel) -> bool:
    """The backend is C++, Python or a placeholder."""
    return model.config.backend in BACKENDS or (
        model.inputs >= CORE_INPUTS and not _asks_halves(model)
    )


def _no_steps(_: RepositoryModel) -> list[str]:
    return []


def _ensemble_steps(model: RepositoryModel) -> list[str]:
    return [step.model_name for step in model.config.ensemble_scheduling.step]


def _bls_steps(model: RepositoryModel) -> list[str]:
    core = model.parameters.get("tensorrt_llm_model_name", "")
    return ["preprocessing", "tensorrt_llm" if is_unset(core) else core, "postprocessing"]


def _halves(model: RepositoryModel) -> list[str]:
    names = ("context_model_name", "generation_model_name")
    texts = [model.parameters.get(name, "") for name in names]
    return [text for text in texts if not is_unset(text)]


def _engine_of_parameters(model: RepositoryModel) -> str:
    texts = (model.parameters.get(name, "") for name in ENGINE_PARAMETERS)
    return next((text for text in texts if not is_unset(text)), "")


def _model_of_arguments(model: RepositoryModel) -> str:
    return str((model.engine_arguments or {}).get("model") or "")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The import of one template."""

    template: Template
    recognises: Callable[[RepositoryModel], bool]
    """Asked in the order of RECIPES: directories may have any name."""
    parameters: Mapping[str, Rule] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Triton's defaults of unset parameters, where the mesh has others."""
    steps: Callable[[RepositoryModel], list[str]] = _no_steps
    """The names of the models called by a model."""
    steps_field: str = ""
    """The field with the steps, if any."""
    counts_last_step: bool = False
    """Whether requests count for the last step alone."""
    step_recipes: Sequence[str] = ()
    """The templates allowed as steps."""
    provided_steps: Sequence[str] = ()
    """Steps provided by the mesh if the repository lacks them."""
    says_decoupled: bool = False
    """Whether config.pbtxt decides about streams."""
    has_queue: bool = False
    """Whether the queue policy applies to the engine."""
    engine: Callable[[RepositoryModel], str] = _engine_of_parameters
    """The engine or model named in the repository; '' if none."""
    inherited: Sequence[str] = ()
    """Settings that an ensemble or BLS inherits from this step."""


TEXT_STEPS = (
    "preprocessing",
    "tensorrt_llm",
    "gpt",
    "disaggregated_serving_bls",
    "postprocessing",
)
INHERITED = ("decoupled", "exclude_input_in_output", "max_beam_width", "normalize_log_probs")

RECIPES = (
    Recipe(
        template=TEMPLATES["ensemble"],
        recognises=_is_ensemble,
        steps=_ensemble_steps,
        steps_field="ensemble_scheduling",
        step_recipes=TEXT_STEPS,
    ),
    Recipe(
        template=TEMPLATES["gpt"],
        recognises=lambda model: model.inputs >= CORE_INPUTS and "log_probs" in model.outputs,
        parameters=CORE_PARAMETERS,
        defaults=CORE_DEFAULTS,
        says_decoupled=True,
        has_queue=True,
        inherited=INHERITED,
    ),
    Recipe(
        template=TEMPLATES["tensorrt_llm"],
        recognises=_is_core,
        parameters=CORE_PARAMETERS,
        defaults=CORE_DEFAULTS,
        says_decoupled=True,
        has_queue=True,
        inherited=INHERITED,
    ),
    Recipe(
        template=TEMPLATES["preprocessing"],
        recognises=lambda model: "QUERY" in model.inputs,
        parameters=TEXT_PARAMETERS,
        inherited=("add_special_tokens",),
    ),
    Recipe(
        template=TEMPLATES["postprocessing"],
        recognises=lambda model: "TOKENS_BATCH" in model.inputs,
        parameters=TEXT_PARAMETERS,
        inherited=("skip_special_tokens",),
    ),
    Recipe(
        template=TEMPLATES["disaggregated_serving_bls"],
        recognises=_asks_halves,
        parameters=DISAGGREGATED_PARAMETERS,
        steps=_halves,
        step_recipes=("tensorrt_llm",),
        inherited=INHERITED,
        # Clients get the output of the last half.
        counts_last_step=True,
        says_decoupled=True,
    ),
    Recipe(
        template=TEMPLATES["llmapi"],
        recognises=lambda model: (
            "text_input" in model.inputs
            and (
                model.engine_arguments is not None
                or any(name.startswith("sampling_param_") for name in model.inputs)
            )
        ),
        engine=_model_of_arguments,
    ),
    Recipe(
        template=TEMPLATES["tensorrt_llm_bls"],
        recognises=lambda model: "text_input" in model.inputs,
        parameters=BLS_PARAMETERS,
        steps=_bls_steps,
        step_recipes=TEXT_STEPS,
        provided_steps=("preprocessing", "postprocessing"),
        says_decoupled=True,
    ),
)


def reason_unserved(model: RepositoryModel) -> str:
    """Why a model without a recipe is not served."""
    if "WAV" in model.inputs:
        return NO_SPEECH
    if {"OUT_PROMPT_EMBEDDING_TABLE", "ENCODER_INPUT_FEATURES"} & model.outputs:
        return NO_PICTURES
    return "it is not one of TensorRT-LLM's models, and no code of a repository is run"
