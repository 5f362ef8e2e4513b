"""Conversion of a configuration's fields, parameters excepted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from google.protobuf import text_format
from trtmesh.kserve import model_config_pb2
from trtmesh.router.doors.triton.tensors import TensorSpec
from trtmesh.tools.triton_import.findings import Draft, Subject
from trtmesh.tools.triton_import.parameters import (
    NO_ADAPTERS,
    NO_CANDIDATES,
    NO_CODE,
    NO_ENCODER,
    NO_PATHS,
    NO_PICTURES,
    OTHER_DRAFTS,
    has_adapters,
)
from trtmesh.tools.triton_import.recipes import Recipe, RepositoryModel
from trtmesh.tools.triton_import.repository import VERSION
from trtmesh.tools.triton_import.rules import TORCH

LOGITS = ("context_logits", "generation_logits")
MOST_ROWS = 65536
"""Largest batch size of a Triton model."""
SHOWN = 60
"""Characters shown of a value."""

LOOKED_AT = frozenset(
    {"name", "backend", "platform", "parameters", "ensemble_scheduling", "max_batch_size"}
    | {"model_transaction_policy", "instance_group"}
)
"""Fields converted elsewhere."""
OTHER_FIELDS: Mapping[str, str] = {
    "optimization": "it tunes Triton's own execution, which the mesh replaces",
    "model_warmup": "engines always compute once before they serve",
    "response_cache": "responses are not cached; engines keep the KV of prompts",
    "sequence_batching": "no model keeps state between requests",
    "metric_tags": "metrics have the labels of the mesh",
    "batch_input": "the models batch by themselves",
    "batch_output": "the models batch by themselves",
    "model_repository_agents": "nothing of a repository is executed",
    "cc_model_filenames": "nothing of a repository is executed",
    "default_model_filename": "nothing of a repository is executed",
    "runtime": "nothing of a repository is executed",
    "model_operations": "nothing of a repository is executed",
}
"""Fields without a counterpart, with the reason."""


_JOINS = "a request joins the batch at the engine's next step"
_PRIORITY = "the request parameter `priority` takes any level, the lower the earlier"
REPLACED_BATCHING: Mapping[str, str] = {
    "preferred_batch_size": _JOINS,
    "max_queue_delay_microseconds": _JOINS,
    "priority_levels": _PRIORITY,
    "default_priority_level": _PRIORITY,
}
"""Fields of dynamic batching with a replacement."""

REFUSED_INPUTS: Mapping[str, Sequence[str]] = {
    NO_PICTURES: ("image", "IMAGE", "video", "VIDEO", "multimodal_", "mrope_"),
    NO_ENCODER: (
        "encoder_",
        "decoder_",
        "DECODER_",
        "cross_attention_mask",
        "skip_cross_attn_blocks",
    ),
    NO_PATHS: ("lora_path", "lora_ckpt_source"),
    NO_ADAPTERS: ("lora_",),
    OTHER_DRAFTS: (
        "num_draft_tokens",
        "use_draft_logits",
        "lookahead_",
    ),
    NO_CODE: ("sampling_param_logits_post_processor_name",),
    NO_CANDIDATES: ("sampling_param_best_of",),
}
"""Prefixes of declared inputs refused by name, by the reason."""


def refusal(name: str) -> str:
    """Why requests with this input are refused by name; '' if accepted."""
    return next((r for r, begins in REFUSED_INPUTS.items() if name.startswith(tuple(begins))), "")


def convert_fields(model: RepositoryModel, recipe: Recipe, draft: Draft) -> None:
    """Converts every set field but parameters, name, backend and platform."""
    config = model.config
    for field, value in config.ListFields():
        if (convert := CONVERTED.get(field.name)) is not None:
            convert(model, recipe, draft)
        elif field.name not in LOOKED_AT:
            reason = OTHER_FIELDS.get(field.name, "it has no counterpart")
            draft.refuse(Subject(model.name, field.name, _shown(value)), reason)
    if recipe.says_decoupled:
        _convert_decoupled(model, draft)
    if recipe.template.batched:
        _convert_batch_size(model, draft)
    for unfilled in model.unfilled:
        subject = Subject(model.name, unfilled.field or "an element", unfilled.key)
        if unfilled.field == "decoupled" and recipe.says_decoupled:
            draft.leave(subject, "it is false, Triton's default")
        else:
            draft.leave(subject)


def _convert_batch_size(model: RepositoryModel, draft: Draft) -> None:
    size = model.config.max_batch_size
    if not size and _is_unfilled(model, "max_batch_size"):
        return
    subject = Subject(model.name, "max_batch_size", str(size))
    if size > MOST_ROWS:
        draft.refuse(subject, f"the door's limit holds, {MOST_ROWS} at most")
        draft.put((*model.path, "max_batch_size"), MOST_ROWS)
    elif size > 0:
        draft.carry(subject, (*model.path, "max_batch_size"), size)
    else:
        draft.refuse(subject, "tensors have a batch dimension here, as in TensorRT-LLM's template")


def _convert_decoupled(model: RepositoryModel, draft: Draft) -> None:
    """Ensembles inherit the setting from their steps; llmapi has it in model.yaml."""
    path = (*model.path, "decoupled")
    decoupled = model.config.model_transaction_policy.decoupled
    if _is_unfilled(model, "decoupled"):
        # Triton's default differs from the door's. Reported with the unset values.
        draft.put(path, decoupled)
    else:
        subject = Subject(model.name, "model_transaction_policy.decoupled", str(decoupled).lower())
        draft.carry(subject, path, decoupled)


def _is_unfilled(model: RepositoryModel, field: str) -> bool:
    return any(unfilled.field == field for unfilled in model.unfilled)


def _convert_inputs(model: RepositoryModel, recipe: Recipe, draft: Draft) -> None:
    _convert_tensors("input", model, model.config.input, recipe.template.inputs, draft)


def _convert_outputs(model: RepositoryModel, recipe: Recipe, draft: Draft) -> None:
    outputs = model.config.output
    served = recipe.template.all_outputs()
    _convert_tensors("output", model, outputs, served, draft)
    for name in LOGITS:
        types = {data_type_of(out) for out in outputs if out.name == name} - {""}
        for data_type in types & {"FP16", "BF16"}:
            path = (*model.path, "logits_data_type")
            draft.carry(Subject(model.name, f"output.{name}.data_type", data_type), path, data_type)


def _convert_tensors(
    what: str,
    model: RepositoryModel,
    declared: Iterable[Any],
    served: Iterable[TensorSpec],
    draft: Draft,
) -> None:
    """Reports the number of tensors served as declared, and refused tensors by reason."""
    specs = {spec.name: spec for spec in served}
    alike = 0
    refused: dict[str, list[str]] = {}
    now_served = {
        "": True,
        NO_ADAPTERS: has_adapters(draft),
        OTHER_DRAFTS: draft.get((*model.path, "draft_model")) is not None,
    }
    for tensor in {each.name: each for each in declared}.values():
        subject = Subject(model.name, f"{what}.{tensor.name}", data_type_of(tensor))
        spec = specs.get(tensor.name)
        if spec is None:
            draft.refuse(
                subject, f"the model has no such {what} here; requests with it are refused"
            )
        elif subject.value not in ("", *spec.data_types) and tensor.name not in LOGITS:
            draft.refuse(subject, f"it is {spec.data_type} here; another type is refused")
        elif what == "input" and not now_served.get(reason := refusal(tensor.name)):
            refused.setdefault(reason, []).append(tensor.name)
        else:
            alike += 1
    for reason, names in refused.items():
        draft.refuse(Subject(model.name, what, ", ".join(names)), reason)
    draft.count(Subject(model.name, what, f"{alike} tensors"), "as declared")


def data_type_of(tensor: Any) -> str:
    """KServe's name of a data type; '' if unset."""
    if tensor.data_type == model_config_pb2.TYPE_INVALID:
        return ""
    name = model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else str(name)


def _convert_batching(model: RepositoryModel, recipe: Recipe, draft: Draft) -> None:
    batching = model.config.dynamic_batching

    for field, value in batching.ListFields():
        subject = Subject(model.name, f"dynamic_batching.{field.name}", _shown(value))
        if field.name == "default_queue_policy":
            _convert_queue_policy(model, recipe, value, draft)
        elif (replacement := REPLACED_BATCHING.get(field.name)) is not None:
            draft.replace(subject, replacement)
        else:
            draft.refuse(
                subject, "responses come as they are ready, in one queue by priority and arrival"
            )


def _convert_queue_policy(
    model: RepositoryModel, recipe: Recipe, policy: Any, draft: Draft
) -> None:
    for field, value in policy.ListFields():
        name = f"dynamic_batching.default_queue_policy.{field.name}"
        subject = Subject(model.name, name, _shown(value))
        match field.name:
            case "max_queue_size" if recipe.has_queue:
                draft.carry(subject, (*TORCH, "limits", "max_queue_size"), value)
            case "default_timeout_microseconds" if recipe.has_queue:
                draft.carry(subject, ("router", "admission", "queue_seconds"), value / 1e6)
            case "max_queue_size":
                draft.replace(subject, "tokenizers have bounded queues")
            case _:
                draft.refuse(subject, "a request that waits too long ends with an error")


def _convert_versions(model: RepositoryModel, _: Recipe, draft: Draft) -> None:
    policy = model.config.version_policy
    other = policy.HasField("specific") and list(policy.specific.versions) != [int(VERSION)]
    report = draft.refuse if other else draft.replace
    subject = Subject(model.name, "version_policy", _shown(policy))
    report(subject, f"models have one version, {VERSION}")


CONVERTED: Mapping[str, Callable[[RepositoryModel, Recipe, Draft], None]] = {
    "input": _convert_inputs,
    "output": _convert_outputs,
    "dynamic_batching": _convert_batching,
    "version_policy": _convert_versions,
}


def _shown(value: Any) -> str:
    """A value in one short line."""
    if hasattr(value, "ListFields"):
        text = text_format.MessageToString(value, as_one_line=True)
    elif hasattr(value, "add"):
        text = f"{len(value)} entries"
    else:
        text = str(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
