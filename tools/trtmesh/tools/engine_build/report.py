"""The dry run: commands in order, with expected sizes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

from trtmesh.tools.engine_build.mesh_file import mesh_file_of
from trtmesh.tools.engine_build.plan_file import BuildPlan
from trtmesh.tools.engine_build.sizes import GIB, as_gib, kv_bytes_per_token, rank_memory
from trtmesh.tools.engine_build.steps import Step
from trtmesh.tools.engine_build.variants import Variant


def in_order(last: Sequence[Step | None]) -> list[Step]:
    """All steps, each after the one that it needs."""
    ordered: dict[Step, None] = {}
    for step in last:
        ordered.update(dict.fromkeys(_chain(step)))
    return list(ordered)


def _chain(step: Step | None) -> list[Step]:
    return [] if step is None else [*_chain(step.needs), step]


def dry_run(plan: BuildPlan, last: Mapping[Variant, Step | None]) -> Iterator[str]:
    """Yields the lines of a dry run."""
    steps = in_order(list(last.values()))
    for number, step in enumerate(steps, 1):
        yield f"[{number}/{len(steps)}] {step.name}: {as_gib(step.size)} in {step.output}"
        yield f"    {shlex.join(step.command())}"
    for variant in last:
        yield f"{mesh_file_of(plan, variant)}"
        yield f"    {_memory(plan, variant)}"


def _memory(plan: BuildPlan, variant: Variant) -> str:
    facts, precision, split = variant.facts, variant.precision, variant.split
    memory = rank_memory(facts, precision, split, variant.batch, variant.lengths.total)
    token = kv_bytes_per_token(facts, precision)
    text = (
        f"{facts.weights / 1e9:.2f} billion weights, KV cache {token} bytes a token; per rank of {split.ranks}:"
        f" weights {as_gib(memory.weights)}, KV cache of a full batch {as_gib(memory.kv_cache)}"
    )
    if plan.gpu.memory_gib is None:
        return text
    # The share of the free memory that the engines take for KV.
    free = 0.9 * (plan.gpu.memory_gib * GIB - memory.weights)
    tokens = int(free / kv_bytes_per_token(facts, precision, split))
    return f"{text}; room for the KV of {tokens} tokens"
