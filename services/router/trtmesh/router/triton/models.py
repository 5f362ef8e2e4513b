"""The Triton models that the door serves: their tensors, and how they answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from tritonclient.grpc import model_config_pb2, service_pb2
from trtmesh.router.settings import TritonSettings
from trtmesh.router.triton.inputs import BLS_INPUTS, TEXT_INPUTS, TOKEN_INPUTS, InputSpec
from trtmesh.router.triton.model_settings import LogitsDataType, Template, TritonModelSettings
from trtmesh.router.triton.specs import (
    DISAGGREGATED_INPUTS,
    HANDOFF_OUTPUT,
    POSTPROCESSING_INPUTS,
    POSTPROCESSING_OUTPUTS,
    PREPROCESSING_INPUTS,
    PREPROCESSING_OUTPUTS,
    TEXT_OUTPUT,
    TOKEN_OUTPUTS,
    generation_outputs,
)
from trtmesh.router.triton.tensors import TensorSpec

MODEL_VERSION = "1"

T = TypeVar("T")


class Kind(Enum):
    """What a model makes of a request."""

    TEXT = "text"
    """Text in, text out."""
    TOKENS = "tokens"
    """Token ids in, token ids out."""
    PREPROCESSING = "preprocessing"
    """Text in, the inputs of the core model out."""
    POSTPROCESSING = "postprocessing"
    """Token ids in, text out."""


@dataclass(frozen=True, slots=True)
class Model:
    """One model as clients see it, everything about it settled."""

    name: str
    template: Template
    kind: Kind
    backend: str
    inputs: Mapping[str, InputSpec]
    outputs: Mapping[str, TensorSpec]
    mesh_model: str
    """The model of the mesh behind it; '' is the only one."""
    decoupled: bool
    max_batch_size: int
    max_beam_width: int | None
    """Most beams of a search, where it is bounded here."""
    exclude_input_in_output: bool
    accumulate: bool
    """Whether every response of a stream holds the whole text so far."""
    final_alone: bool
    """Whether the end of a stream is a response of its own, without outputs."""
    logits_data_type: LogitsDataType
    add_special_tokens: bool
    skip_special_tokens: bool
    steps: tuple[str, ...]
    """Models that an ensemble tells as its steps."""

    @property
    def is_ensemble(self) -> bool:
        return self.backend == ""

    @property
    def parameters(self) -> Mapping[str, str]:
        """What ModelConfig tells as parameters."""
        if self.template == "tensorrt_llm_bls":
            return {"accumulate_tokens": str(self.accumulate).lower()}
        if self.kind is Kind.TOKENS:
            return {"exclude_input_in_output": str(self.exclude_input_in_output).lower()}
        return {}


@dataclass(frozen=True, slots=True)
class _Form:
    """What the models of one template have in common."""

    kind: Kind
    backend: str
    inputs: tuple[InputSpec, ...]
    outputs: tuple[TensorSpec, ...]
    generates: bool = True
    """Whether it has the outputs of every generation too."""
    final_alone: bool = False


FORMS: Mapping[Template, _Form] = {
    "ensemble": _Form(Kind.TEXT, "", TEXT_INPUTS, (TEXT_OUTPUT,)),
    "tensorrt_llm_bls": _Form(Kind.TEXT, "python", BLS_INPUTS, (TEXT_OUTPUT,), final_alone=True),
    "tensorrt_llm": _Form(
        Kind.TOKENS, "tensorrtllm", TOKEN_INPUTS, (*TOKEN_OUTPUTS, HANDOFF_OUTPUT)
    ),
    "disaggregated_serving_bls": _Form(
        Kind.TOKENS, "python", DISAGGREGATED_INPUTS, TOKEN_OUTPUTS, final_alone=True
    ),
    "preprocessing": _Form(
        Kind.PREPROCESSING, "python", PREPROCESSING_INPUTS, PREPROCESSING_OUTPUTS, generates=False
    ),
    "postprocessing": _Form(
        Kind.POSTPROCESSING,
        "python",
        POSTPROCESSING_INPUTS,
        POSTPROCESSING_OUTPUTS,
        generates=False,
    ),
}
FIVE_MODELS: tuple[Template, ...] = (
    "ensemble",
    "tensorrt_llm_bls",
    "tensorrt_llm",
    "preprocessing",
    "postprocessing",
)
"""Served under the names of their templates where no models are configured."""
DEFAULT_STEPS = ("preprocessing", "tensorrt_llm", "postprocessing")


def triton_models(settings: TritonSettings) -> dict[str, Model]:
    """The models by name."""
    configured = settings.models or {
        template: TritonModelSettings(template=template) for template in FIVE_MODELS
    }
    return {name: _settle(name, own, settings) for name, own in configured.items()}


def _settle(name: str, own: TritonModelSettings, door: TritonSettings) -> Model:
    """A model with what it says of itself, and else what the door's settings say."""
    form = FORMS[own.template]
    logits_data_type = _own(own.logits_data_type, door.logits_data_type)
    outputs = (*form.outputs, *(generation_outputs(logits_data_type) if form.generates else ()))
    return Model(
        name=name,
        template=own.template,
        kind=form.kind,
        backend=form.backend,
        inputs={spec.name: spec for spec in form.inputs},
        outputs={spec.name: spec for spec in outputs},
        mesh_model=_own(own.model, door.model),
        decoupled=form.generates and _own(own.decoupled, own.template in door.decoupled),
        max_batch_size=_own(own.max_batch_size, door.max_batch_size),
        max_beam_width=own.max_beam_width,
        exclude_input_in_output=_own(own.exclude_input_in_output, door.exclude_input_in_output),
        accumulate=own.template == "tensorrt_llm_bls"
        and _own(own.accumulate_tokens, door.accumulate_tokens),
        final_alone=form.final_alone,
        logits_data_type=logits_data_type,
        add_special_tokens=_own(own.add_special_tokens, door.add_special_tokens),
        skip_special_tokens=_own(own.skip_special_tokens, door.skip_special_tokens),
        steps=own.steps or DEFAULT_STEPS,
    )


def _own(own: T | None, default: T) -> T:
    return default if own is None else own


def describe_metadata(model: Model) -> service_pb2.ModelMetadataResponse:
    """The model as ModelMetadata answers."""
    response = service_pb2.ModelMetadataResponse(
        name=model.name, versions=[MODEL_VERSION], platform=model.backend or "ensemble"
    )
    for specs, listed in (
        (model.inputs.values(), response.inputs),
        (model.outputs.values(), response.outputs),
    ):
        for spec in specs:
            listed.add(name=spec.name, datatype=spec.data_type, shape=(-1, *spec.dims))
    return response


def describe_config(model: Model) -> model_config_pb2.ModelConfig:
    """The model as ModelConfig answers."""
    config = model_config_pb2.ModelConfig(
        name=model.name,
        backend=model.backend,
        platform="ensemble" if model.is_ensemble else "",
        max_batch_size=model.max_batch_size,
    )
    config.version_policy.latest.num_versions = 1
    config.model_transaction_policy.decoupled = model.decoupled
    for spec in model.inputs.values():
        given = config.input.add(
            name=spec.name,
            data_type=_config_type(spec),
            dims=spec.dims,
            optional=spec.optional,
            allow_ragged_batch=spec.ragged and not model.is_ensemble,
        )
        if spec.scalar and model.template == "tensorrt_llm":
            # An empty shape is a reshape too: of one value a row, to none.
            given.reshape.SetInParent()
    for output in model.outputs.values():
        config.output.add(name=output.name, data_type=_config_type(output), dims=output.dims)
    if model.is_ensemble:
        for step in model.steps:
            config.ensemble_scheduling.step.add(model_name=step, model_version=-1)
    for key, text in model.parameters.items():
        config.parameters[key].string_value = text
    return config


def _config_type(spec: TensorSpec) -> int:
    name = "STRING" if spec.data_type == "BYTES" else spec.data_type
    return int(model_config_pb2.DataType.Value(f"TYPE_{name}"))
