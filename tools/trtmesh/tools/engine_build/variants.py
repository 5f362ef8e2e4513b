"""The variants of a plan: each is one model as the mesh serves it. Impossible ones are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from trtmesh.chassis.errors import SettingsError
from trtmesh.tools.engine_build.model_facts import ModelFacts
from trtmesh.tools.engine_build.plan_file import BuildPlan, Lengths, ModelPlan
from trtmesh.tools.engine_build.precisions import (
    ADA,
    AWQ_GROUP,
    BLACKWELL,
    LEAST_ARCHITECTURE,
    Flow,
    KvCache,
    Precision,
    Weights,
)
from trtmesh.tools.engine_build.sizes import GIB, Split, as_gib, rank_memory


@dataclass(frozen=True, slots=True)
class Variant:
    """One combination of a model's lists."""

    model: ModelPlan
    facts: ModelFacts
    precision: Precision
    split: Split
    lengths: Lengths
    batch: int

    @property
    def shape(self) -> str:
        return f"b{self.batch}-i{self.lengths.input}-o{self.lengths.output}"

    @property
    def name(self) -> str:
        return f"{self.model.name}-{self.precision.name}-{self.split.name}-{self.shape}"


def variants_of(plan: BuildPlan, index: int, facts: ModelFacts) -> Iterator[Variant]:
    """Yields the variants of a model of the plan. Raises SettingsError for an impossible one."""
    model = plan.models[index]
    place = f"models[{index}] ({model.name})"
    for precision in (each.precision for each in model.precisions):
        _check_precision(plan, facts, precision, f"{place}: {precision.name}")
    splits = [Split(*sizes) for sizes in product(model.tensor, model.pipeline, model.expert)]
    for split in splits:
        _check_split(plan, facts, split, f"{place}: {split.name}")
    for lengths in model.lengths:
        _check_length(plan, facts, lengths, place)
    for each in product(model.precisions, splits, model.lengths, model.batch_sizes):
        choice, split, lengths, batch = each
        variant = Variant(model, facts, choice.precision, split, lengths, batch)
        _check_variant(plan, variant, f"{place}: {variant.precision.name} {split.name}")
        yield variant


def _check_precision(plan: BuildPlan, facts: ModelFacts, precision: Precision, place: str) -> None:
    architecture = plan.gpu.architecture
    least = LEAST_ARCHITECTURE.get(precision.weights, 0)
    if architecture < least:
        needed = "a Blackwell GPU, 100 or above" if least == BLACKWELL else f"{least} or above"
        raise SettingsError(f"{place} needs gpu.architecture {needed}, but it is {architecture}")
    if reason := facts.family.refusal(precision, plan.flow):
        raise SettingsError(f"{place}: {reason}")
    if plan.flow is Flow.PYTORCH and precision.weights is Weights.INT4_AWQ:
        # The library's table of hardware has it for Ampere, Ada and Hopper alone.
        if architecture >= BLACKWELL:
            raise SettingsError(
                f"{place}: the pytorch flow has no int4_awq on gpu.architecture {architecture}"
            )
    elif plan.flow is Flow.TENSORRT and precision.kv_cache is KvCache.FP8 and architecture < ADA:
        raise SettingsError(f"{place} needs gpu.architecture {ADA} or above")


def _check_split(plan: BuildPlan, facts: ModelFacts, split: Split, place: str) -> None:
    tensor, family = split.tensor, facts.family
    if facts.heads % tensor:
        raise SettingsError(f"{place}: {facts.heads} heads are not divisible by tensor {tensor}")
    if facts.kv_heads % tensor and tensor % facts.kv_heads:
        raise SettingsError(
            f"{place}: {facts.kv_heads} KV heads are neither divisible by tensor {tensor} nor divide it"
        )
    if facts.inner % tensor:
        raise SettingsError(
            f"{place}: the MLP's width {facts.inner} is not divisible by tensor {tensor}"
        )
    if split.pipeline > facts.layers:
        raise SettingsError(
            f"{place}: pipeline is {split.pipeline}, but there are {facts.layers} layers"
        )
    if split.expert > 1:
        if not facts.experts:
            raise SettingsError(f"{place}: expert is {split.expert}, but the model has no experts")
        if tensor % split.expert or facts.experts % split.expert:
            raise SettingsError(
                f"{place}: expert {split.expert} must divide tensor {tensor} and the {facts.experts} experts"
            )
    if plan.flow is Flow.TENSORRT:
        if tensor > 1 and not family.splits_tensors:
            raise SettingsError(
                f"{place}: the converter of {family.name} has no tensor parallelism"
            )
        if split.pipeline > 1 and not family.splits_layers:
            raise SettingsError(
                f"{place}: the converter of {family.name} has no pipeline parallelism"
            )


def _check_length(plan: BuildPlan, facts: ModelFacts, lengths: Lengths, place: str) -> None:
    limits = [facts.positions] if facts.positions is not None else []
    if plan.flow is Flow.TENSORRT and facts.family.longest is not None:
        limits.append(facts.family.longest)
    if limits and lengths.total > min(limits):
        raise SettingsError(
            f"{place}: input {lengths.input} and output {lengths.output} exceed the model's {min(limits)} tokens"
        )


def _check_variant(plan: BuildPlan, variant: Variant, place: str) -> None:
    facts, precision, split = variant.facts, variant.precision, variant.split
    if precision.weights is Weights.INT4_AWQ:
        for width in (facts.inner, facts.heads * facts.head_dim):
            if width % (split.tensor * AWQ_GROUP):
                raise SettingsError(
                    f"{place}: a width of {width} in {split.tensor} parts has no whole groups of {AWQ_GROUP} weights"
                )
    quantizes = precision.weights in facts.family.quantizes
    if plan.flow is Flow.TENSORRT and split.expert > 1 and quantizes:
        raise SettingsError(
            f"{place}: quantize.py has no expert parallelism; leave expert out for {precision.weights}"
        )
    if plan.gpu.memory_gib is not None:
        memory = rank_memory(facts, precision, split, variant.batch, variant.lengths.total)
        if memory.weights > plan.gpu.memory_gib * GIB:
            raise SettingsError(
                f"{place}: each rank has {as_gib(memory.weights)} of weights, more than gpu.memory_gib"
                f" {plan.gpu.memory_gib:g}"
            )
