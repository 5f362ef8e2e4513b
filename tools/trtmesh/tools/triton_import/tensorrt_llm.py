"""The import for TensorRT-LLM workers: their settings in place of those of the embedded engine, and their ranks.

The rules write the settings of the embedded engine. Those that TensorRT-LLM's backend also has are renamed at the end,
and the others are reported as unsupported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtmesh.chassis.errors import SettingsError
from trtmesh.chassis.json_text import load_json
from trtmesh.tools.triton_import.config_file import is_unset, read_limited
from trtmesh.tools.triton_import.findings import Draft, Outcome, Subject
from trtmesh.tools.triton_import.parameters import ARGUMENTS
from trtmesh.tools.triton_import.recipes import ENGINE_PARAMETERS, RepositoryModel
from trtmesh.tools.triton_import.repository import ENGINE_ARGUMENTS
from trtmesh.tools.triton_import.rules import (
    TORCH,
    Rule,
    one_of,
    only,
    own,
    positive,
    replaced,
    truth,
    unsupported,
    whole,
)

BACKEND = "tensorrt_llm"
SECTION = ("engine", BACKEND)
PARALLEL = (*SECTION, "parallel")

POLICY = "batching.policy"
"""The library writes its values in capitals."""

RENAMED: Mapping[str, str] = {
    "dtype": "options.dtype",
    "kv_cache.tokens": "kv_cache.tokens",
    "kv_cache.free_memory_fraction": "options.kv_cache_config.free_gpu_memory_fraction",
    "kv_cache.prefix_reuse": "kv_cache.prefix_reuse",
    "kv_cache.tokens_per_block": "options.kv_cache_config.tokens_per_block",
    "host_cache.bytes": "options.kv_cache_config.host_cache_size",
    POLICY: "options.scheduler_config.capacity_scheduler_policy",
    "batching.max_step_tokens": "batching.max_step_tokens",
    "batching.chunked_context": "batching.chunked_context",
    "limits.max_batch_size": "limits.max_batch_size",
    "limits.max_queue_size": "limits.max_queue_size",
    "limits.max_sequence_tokens": "limits.max_sequence_tokens",
    "limits.max_sequences_per_item": "limits.max_sequences_per_item",
    "adapters.host_bytes": "adapters.disk_bytes",
    "adapters.max_rank": "adapters.max_rank",
    "adapters.max_batch_adapters": "adapters.max_batch_adapters",
}
"""Settings of TensorRT-LLM's backend by those of the embedded engine."""

NO_SETTING = "the TensorRT-LLM backend has no such setting"
RANKS = "the worker starts its ranks itself, tensor x pipeline of them; there is no leader and no orchestrator"
SEVERAL_NODES = (
    "`trtmesh up` starts the workers of one machine; docs/parallel.md starts a worker over several, and the router is"
    " given its address"
)
THE_LIBRARY = "TensorRT-LLM decides about its kernels"
OWN_SPECULATION = (
    "speculation is a setting of the worker: speculative_config in engine.tensorrt_llm.options"
)


def _setting(name: str, read: Any) -> Rule:
    def rule(subject: Subject, draft: Draft) -> None:
        draft.carry(subject, (*SECTION, *name.split(".")), read(subject))

    return rule


def _beam_width(subject: Subject, draft: Draft) -> None:
    own("max_beam_width", positive)(subject, draft)
    path = (*SECTION, "limits", "max_beam_width")
    draft.put(path, max(positive(subject), draft.get(path) or 1))


GUIDES = _setting("options.guided_decoding_backend", one_of("xgrammar", "llguidance"))

CORE_OVERRIDES: Mapping[str, Rule] = {
    "max_beam_width": _beam_width,
    "participant_ids": replaced(RANKS),
    "num_nodes": only(whole, value=1, text=RANKS, reason=SEVERAL_NODES),
    "executor_worker_path": replaced(RANKS),
    "worker_path": replaced(RANKS),
    "guided_decoding_backend": GUIDES,
    "decoding_mode": replaced("each request says how it is decoded"),
    "medusa_choices": unsupported(OWN_SPECULATION),
    "eagle_choices": unsupported(OWN_SPECULATION),
    "enable_context_fmha_fp32_acc": replaced(THE_LIBRARY),
    "multi_block_mode": replaced(THE_LIBRARY),
    "cuda_graph_mode": replaced(THE_LIBRARY),
    "cuda_graph_cache_size": replaced(THE_LIBRARY),
}
"""Rules in place of those for the embedded engine."""

ARGUMENT_OVERRIDES: Mapping[str, Rule] = {
    "backend": replaced("the worker runs the PyTorch flow"),
    "tensor_parallel_size": _setting("parallel.tensor", positive),
    "pipeline_parallel_size": _setting("parallel.pipeline", positive),
    "moe_expert_parallel_size": _setting("options.moe_expert_parallel_size", positive),
    "moe_tensor_parallel_size": _setting("options.moe_tensor_parallel_size", positive),
    "gpus_per_node": _setting("options.gpus_per_node", positive),
    "max_beam_width": _beam_width,
    "guided_decoding_backend": GUIDES,
    "kv_cache_config.dtype": _setting(
        "options.kv_cache_config.dtype", lambda subject: subject.value
    ),
    "kv_cache_config.enable_partial_reuse": _setting(
        "options.kv_cache_config.enable_partial_reuse", truth
    ),
    "kv_cache_config.secondary_offload_min_priority": _setting(
        "options.kv_cache_config.secondary_offload_min_priority", whole
    ),
    "speculative_config": unsupported(OWN_SPECULATION),
    "cuda_graph_config": replaced(THE_LIBRARY),
    "attn_backend": replaced(THE_LIBRARY),
    "torch_compile_config": replaced(THE_LIBRARY),
}
ALL_ARGUMENTS: Mapping[str, Rule] = {**ARGUMENTS, **ARGUMENT_OVERRIDES}


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a worker, and what says so."""

    tensor: int
    pipeline: int
    source: str


def ranks_of(core: RepositoryModel, groups: Sequence[Sequence[int]]) -> Ranks:
    """The sizes in model.yaml, else those of the TensorRT engine if it is on this machine, else one tensor rank for
    each GPU of an instance. Raises SettingsError where they disagree with the GPUs."""
    widths = {len(group) for group in groups}
    if len(widths) > 1:
        raise SettingsError(
            f"model '{core.name}': gpu_device_ids has instances of {' and '.join(map(str, sorted(widths)))} GPUs, but"
            " all are the same model"
        )
    width = widths.pop() if widths else 0
    ranks = _of_arguments(core) or _of_engine(core)
    if ranks is None:
        return Ranks(max(1, width), 1, "the GPUs of an instance" if width else "the default")
    if width and width != ranks.tensor * ranks.pipeline:
        raise SettingsError(
            f"model '{core.name}': an instance has {width} GPUs in gpu_device_ids, but {ranks.source} says tensor"
            f" {ranks.tensor} x pipeline {ranks.pipeline}"
        )
    return ranks


def _of_arguments(core: RepositoryModel) -> Ranks | None:
    arguments = core.engine_arguments
    if arguments is None:
        return None
    tensor, pipeline = (
        arguments.get(f"{name}_parallel_size", 1) for name in ("tensor", "pipeline")
    )
    return _ranks(core, tensor, pipeline, ENGINE_ARGUMENTS)


def _of_engine(core: RepositoryModel) -> Ranks | None:
    """The sizes with which a TensorRT engine was built."""
    texts = (core.parameters.get(name, "") for name in ENGINE_PARAMETERS)
    for text in texts:
        file = Path(text) / "config.json"
        if is_unset(text) or not file.is_file():
            continue
        try:
            mapping = load_json(read_limited(file))["pretrained_config"]["mapping"]
            tensor, pipeline = mapping.get("tp_size", 1), mapping.get("pp_size", 1)
        except (ValueError, KeyError, TypeError, AttributeError):
            # It belongs to a Hugging Face model, or to a release before this form.
            continue
        return _ranks(core, tensor, pipeline, str(file))
    return None


def _ranks(core: RepositoryModel, tensor: object, pipeline: object, source: str) -> Ranks:
    for size in (tensor, pipeline):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise SettingsError(
                f"model '{core.name}': {source} has a parallel size of {size!r} but it must be a whole number of at"
                " least 1"
            )
    assert isinstance(tensor, int)
    assert isinstance(pipeline, int)
    return Ranks(tensor, pipeline, source)


def put_ranks(cores: Sequence[RepositoryModel], ranks: Mapping[str, Ranks], draft: Draft) -> None:
    """Sets the sizes of all workers of the stack, which share them."""
    for core in cores:
        sizes = ranks[core.name]
        for name, size in (("tensor", sizes.tensor), ("pipeline", sizes.pipeline)):
            path = (*PARALLEL, name)
            if sizes.source == ENGINE_ARGUMENTS:
                # Reported with the other arguments.
                draft.imply(Subject(core.name, name, str(size)), path, size)
            else:
                what = f"{name} parallelism, by {sizes.source}"
                draft.carry(Subject(core.name, what, str(size)), path, size)


def rename_settings(draft: Draft) -> None:
    """Moves the settings of the embedded engine to those of TensorRT-LLM's backend, findings too."""
    engine = draft.sections.get("engine", {})
    for path, value in _leaves(engine.pop("torch", {})):
        if (name := RENAMED.get(path)) is not None:
            draft.put((*SECTION, *name.split(".")), value.upper() if path == POLICY else value)
    prefix = ".".join(TORCH) + "."
    for index, finding in enumerate(draft.findings):
        path, colon, value = finding.text.partition(": ")
        if finding.outcome is not Outcome.CARRIED or not path.startswith(prefix):
            continue
        name = RENAMED.get(path.removeprefix(prefix))
        value = value.upper() if path == prefix + POLICY else value
        draft.findings[index] = (
            replace(finding, outcome=Outcome.UNSUPPORTED, text=NO_SETTING)
            if name is None
            else replace(finding, text=f"{'.'.join(SECTION)}.{name}{colon}{value}")
        )


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
