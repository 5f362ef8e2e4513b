"""The Triton models that the door serves: their tensors, and how they answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from tritonclient.grpc import model_config_pb2, service_pb2
from trtmesh.router.doors.triton.model_settings import (
    DEFAULT_STEPS,
    LogitsDataType,
    Template,
    TritonModelSettings,
)
from trtmesh.router.doors.triton.templates.inputs import InputSpec
from trtmesh.router.doors.triton.templates.template import FORMS, Kind
from trtmesh.router.doors.triton.tensors import TensorSpec
from trtmesh.router.settings import TritonSettings

MODEL_VERSION = "1"

T = TypeVar("T")


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
    """0 where tensors have no batch dimension."""
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
    """Models that its requests count for too; an ensemble tells them as its steps."""

    @property
    def is_ensemble(self) -> bool:
        return self.backend == ""

    @property
    def is_core(self) -> bool:
        """Whether it generates by itself, where ensembles and BLS have other models do that."""
        return self.template in ("tensorrt_llm", "llmapi")

    @property
    def batch_dims(self) -> tuple[int, ...]:
        """What stands before the dims of every tensor."""
        return (-1,) if self.max_batch_size else ()

    @property
    def parameters(self) -> Mapping[str, str]:
        """What ModelConfig tells as parameters."""
        if self.template in ("tensorrt_llm_bls", "llmapi"):
            return {"accumulate_tokens": str(self.accumulate).lower()}
        if self.kind is Kind.TOKENS:
            return {"exclude_input_in_output": str(self.exclude_input_in_output).lower()}
        return {}


FIVE_MODELS: tuple[Template, ...] = (
    "ensemble",
    "tensorrt_llm_bls",
    "tensorrt_llm",
    "preprocessing",
    "postprocessing",
)
"""Served under the names of their templates where no models are configured."""


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
    return Model(
        name=name,
        template=own.template,
        kind=form.kind,
        backend=form.backend,
        inputs={spec.name: spec for spec in form.inputs},
        outputs={spec.name: spec for spec in form.all_outputs(logits_data_type)},
        mesh_model=_own(own.model, door.model),
        decoupled=form.generates and _own(own.decoupled, own.template in door.decoupled),
        max_batch_size=_own(own.max_batch_size, door.max_batch_size) if form.batched else 0,
        max_beam_width=own.max_beam_width,
        exclude_input_in_output=_own(own.exclude_input_in_output, door.exclude_input_in_output),
        accumulate=_own(own.accumulate_tokens, _own(form.accumulates, door.accumulate_tokens)),
        final_alone=form.final_alone,
        logits_data_type=logits_data_type,
        add_special_tokens=_own(own.add_special_tokens, door.add_special_tokens),
        skip_special_tokens=_own(own.skip_special_tokens, door.skip_special_tokens),
        steps=own.steps or DEFAULT_STEPS.get(own.template, ()),
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
            shape = (*model.batch_dims, *spec.dims)
            listed.add(name=spec.name, datatype=spec.data_type, shape=shape)
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
