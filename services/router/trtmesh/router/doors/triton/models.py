"""The Triton models that the door serves: from settings to models, and models as ModelMetadata and ModelConfig."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from trtmesh.kserve import grpc_service_pb2, model_config_pb2
from trtmesh.router.doors.triton.releases import Declaration
from trtmesh.router.doors.triton.settings import (
    DEFAULT_STEPS,
    NEWEST_RELEASE,
    TritonModelSettings,
    TritonSettings,
)
from trtmesh.router.doors.triton.templates.catalogue import DEFAULT_MODELS, TEMPLATES
from trtmesh.router.doors.triton.templates.template import Model
from trtmesh.router.doors.triton.tensors import TensorSpec

MODEL_VERSION = "1"

T = TypeVar("T")
S = TypeVar("S", bound=TensorSpec)


def triton_models(settings: TritonSettings, mesh_models: Sequence[str] = ()) -> dict[str, Model]:
    """The models by name. Where none are configured, each of several models of the mesh has those of the template."""
    configured = dict(settings.models or _of_template())
    if not settings.models and len(mesh_models) > 1:
        for name in mesh_models:
            configured |= _of_template(name)
    return {name: _settle(name, own, settings) for name, own in configured.items()}


def _of_template(mesh_model: str = "") -> Mapping[str, TritonModelSettings]:
    """Returns the models of the template: the default models, or the models of a model of the mesh."""
    prefix = f"{mesh_model}_" if mesh_model else ""
    return {
        f"{prefix}{template.name}": TritonModelSettings(
            template=template.name,
            model=mesh_model,
            steps=tuple(f"{prefix}{step}" for step in DEFAULT_STEPS.get(template.name, ())),
        )
        for template in DEFAULT_MODELS
    }


def _settle(name: str, own: TritonModelSettings, door: TritonSettings) -> Model:
    """A model with its own settings, completed by the door's."""
    template = TEMPLATES[own.template]
    return Model(
        name=name,
        template=template,
        inputs={spec.name: spec for spec in template.inputs},
        outputs={spec.name: spec for spec in template.all_outputs(own.logits_data_type)},
        required=frozenset(spec.name for spec in template.inputs if spec.required),
        mesh_model=own.model,
        draft_model=own.draft_model,
        decoupled=template.decoupled and _own(own.decoupled, own.template in door.decoupled),
        strict_transaction_policy=_own(
            own.strict_transaction_policy, door.strict_transaction_policy
        ),
        release=_own(own.release, door.release) if template.dated else NEWEST_RELEASE,
        max_batch_size=_own(own.max_batch_size, door.max_batch_size) if template.batched else 0,
        max_beam_width=own.max_beam_width,
        exclude_input_in_output=_own(own.exclude_input_in_output, door.exclude_input_in_output),
        accumulate_tokens=_own(own.accumulate_tokens, template.accumulates),
        merge_tokens=_own(own.merge_tokens, door.merge_tokens),
        logits_data_type=own.logits_data_type,
        add_special_tokens=own.add_special_tokens,
        skip_special_tokens=own.skip_special_tokens,
        default_seed=door.default_seed,
        normalize_log_probs=own.normalize_log_probs,
        wrap_token_ids=_own(own.wrap_token_ids, door.wrap_token_ids),
        steps=own.steps or DEFAULT_STEPS.get(own.template, ()),
    )


def _own(own: T | None, default: T) -> T:
    return default if own is None else own


def describe_metadata(model: Model) -> grpc_service_pb2.ModelMetadataResponse:
    response = grpc_service_pb2.ModelMetadataResponse(
        name=model.name, versions=[MODEL_VERSION], platform=model.template.backend or "ensemble"
    )
    for specs, listed in (
        (model.inputs.values(), response.inputs),
        (model.outputs.values(), response.outputs),
    ):
        for spec, declared in _declared(specs, model):
            shape = (*model.batch_dims, *declared.dims)
            listed.add(name=spec.name, datatype=declared.data_types[0], shape=shape)
    return response


def _declared(specs: Iterable[S], model: Model) -> Iterator[tuple[S, Declaration]]:
    """The tensors of the model's release, in the order of the table."""
    for spec in specs:
        if (declared := spec.history.at(model.release)) is not None:
            yield spec, declared


def describe_config(model: Model) -> model_config_pb2.ModelConfig:
    config = model_config_pb2.ModelConfig(
        name=model.name,
        backend=model.template.backend,
        platform="ensemble" if model.is_ensemble else "",
        max_batch_size=model.max_batch_size,
    )
    config.version_policy.latest.num_versions = 1
    config.model_transaction_policy.decoupled = model.decoupled
    for spec, declared in _declared(model.inputs.values(), model):
        given = config.input.add(
            name=spec.name,
            data_type=_config_type(declared),
            dims=declared.dims,
            optional=not declared.required,
            allow_ragged_batch=spec.ragged and not model.is_ensemble,
        )
        if spec.scalar and model.template.reshapes_scalars:
            # To the empty shape.
            given.reshape.SetInParent()
    for output, declared in _declared(model.outputs.values(), model):
        config.output.add(name=output.name, data_type=_config_type(declared), dims=declared.dims)
    if model.is_ensemble:
        for step in model.steps:
            config.ensemble_scheduling.step.add(model_name=step, model_version=-1)
    for name in model.template.parameters:
        config.parameters[name].string_value = str(getattr(model, name)).lower()
    return config


def _config_type(declared: Declaration) -> int:
    data_type = declared.data_types[0]
    name = "STRING" if data_type == "BYTES" else data_type
    return int(model_config_pb2.DataType.Value(f"TYPE_{name}"))
