"""The configuration of a mesh that serves a variant."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from trtmesh.tools.engine_build.commands import reuses_kv, source_of
from trtmesh.tools.engine_build.plan_file import BuildPlan
from trtmesh.tools.engine_build.precisions import Flow, KvCache
from trtmesh.tools.engine_build.steps import Step
from trtmesh.tools.engine_build.variants import Variant


def mesh_file_of(plan: BuildPlan, variant: Variant) -> Path:
    return plan.output / "mesh" / f"{variant.name}.yaml"


def mesh_sections(plan: BuildPlan, variant: Variant, last: Step | None) -> Mapping[str, Any]:
    """The sections for the result of the last step."""
    model = source_of(plan, variant.model)
    if plan.flow is Flow.PYTORCH and last is not None:
        model = last.output
    return {
        "mesh": {"model": str(model.resolve()), "backend": "tensorrt_llm"},
        "engine": {"tensorrt_llm": _backend(plan, variant, last)},
    }


def _backend(plan: BuildPlan, variant: Variant, last: Step | None) -> dict[str, Any]:
    split, precision = variant.split, variant.precision
    backend: dict[str, Any] = {}
    options: dict[str, Any] = {}
    kv_cache: dict[str, Any] = {}
    batching: dict[str, Any] = {"max_step_tokens": variant.model.max_num_tokens}
    if plan.flow is Flow.PYTORCH:
        options["dtype"] = precision.dtype.long
        if precision.kv_cache is KvCache.FP8:
            options["kv_cache_config"] = {"dtype": "fp8"}
    else:
        assert last is not None
        backend["engine_dir"] = str(last.output.resolve())
        if not reuses_kv(precision):
            kv_cache["prefix_reuse"] = False
            batching["chunked_context"] = False
    backend["parallel"] = {"tensor": split.tensor, "pipeline": split.pipeline}
    if split.expert > 1:
        options["moe_expert_parallel_size"] = split.expert
    backend |= {"options": options} if options else {}
    backend |= {"kv_cache": kv_cache} if kv_cache else {}
    backend["batching"] = batching
    backend["limits"] = {
        "max_batch_size": variant.batch,
        "max_sequence_tokens": variant.lengths.total,
        "max_beam_width": variant.model.beam_width,
    }
    return backend


def write_mesh_file(file: Path, sections: Mapping[str, Any]) -> None:
    """Writes the file whole, or leaves the old one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}")
    text = yaml.safe_dump(dict(sections), sort_keys=False, allow_unicode=True)
    with partial.open("w", encoding="utf-8") as stream:
        stream.write(f"# Written by `trtmesh build`: trtmesh up --config {file}\n{text}")
        stream.flush()
        os.fsync(stream.fileno())
    partial.rename(file)
