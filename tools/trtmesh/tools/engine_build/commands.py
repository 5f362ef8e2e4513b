"""The commands of a build, for each model, precision and shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from trtmesh.chassis.errors import SettingsError
from trtmesh.tools.engine_build.model_facts import ModelFacts
from trtmesh.tools.engine_build.plan_file import BuildPlan, ModelPlan
from trtmesh.tools.engine_build.precisions import (
    AWQ_GROUP,
    Flow,
    KvCache,
    Precision,
    Weights,
)
from trtmesh.tools.engine_build.sizes import Split, checkpoint_bytes, exported_bytes, model_bytes
from trtmesh.tools.engine_build.steps import Content, Step
from trtmesh.tools.engine_build.variants import Variant

NOT_DOWNLOADED = ("*.gguf", "*.onnx", "*.h5", "*.msgpack", "*.ot", "original/*")
"""Copies of the weights in formats that no step reads. The commonest is last: `hf` before 1.0 heeds the last alone."""

QUANTIZE_CALIBRATION = {
    "dataset": "--calib_dataset",
    "samples": "--calib_size",
    "tokens": "--calib_max_seq_length",
    "batch_size": "--batch_size",
}
"""Options of quantize.py by setting."""
PTQ_CALIBRATION = {"dataset": "--dataset", "samples": "--calib_size", "batch_size": "--batch_size"}
"""Options of hf_ptq.py by setting."""

SMOOTHING = "0.5"
"""The strength of SmoothQuant that the converters recommend."""

QFORMATS: Mapping[Weights, str] = {
    Weights.FP8: "fp8",
    Weights.INT8_SMOOTHQUANT: "int8_sq",
    Weights.INT4_AWQ: "int4_awq",
    Weights.NVFP4: "nvfp4",
}
"""Names of ModelOpt."""


def download(plan: BuildPlan, model: ModelPlan, size: int = 0) -> Step | None:
    """Fetches a model of the hub; None for a local directory."""
    if model.hub is None:
        return None
    revision = ("--revision", model.revision) if model.revision else ()
    excluded = [word for pattern in NOT_DOWNLOADED for word in ("--exclude", pattern)]
    return Step(
        name=f"download {model.name}",
        before=(*plan.tools.hub, "download", model.hub, *revision, *excluded, "--local-dir"),
        after=(),
        output=plan.output / "models" / model.name,
        content=Content.MODEL,
        ranks=1,
        size=size,
    )


def config_command(plan: BuildPlan, model: ModelPlan, directory: Path) -> list[str]:
    """Fetches config.json alone, to check the plan before the weights."""
    assert model.hub is not None
    revision = ("--revision", model.revision) if model.revision else ()
    return [
        *(*plan.tools.hub, "download", model.hub, "config.json", *revision),
        *("--local-dir", str(directory)),
    ]


def steps_of(plan: BuildPlan, variants: Iterable[Variant]) -> Mapping[Variant, Step | None]:
    """The last step of each variant, None where the given directory is served as it is.

    Variants share the steps that are equal for them. Raises SettingsError for a calibration that a tool lacks.
    """
    planned: dict[Path, Step] = {}

    def once(step: Step | None) -> Step | None:
        return None if step is None else planned.setdefault(step.output, step)

    last: dict[Variant, Step | None] = {}
    for variant in variants:
        model = once(download(plan, variant.model, model_bytes(variant.facts)))
        if plan.flow is Flow.PYTORCH:
            quantized = variant.precision.weights.is_quantized
            last[variant] = once(_exported(plan, variant, model)) if quantized else model
        else:
            checkpoint = once(_checkpoint(plan, variant, model))
            assert checkpoint is not None
            last[variant] = once(_engine(plan, variant, checkpoint))
    return last


def source_of(plan: BuildPlan, model: ModelPlan) -> Path:
    """The directory of the model in Hugging Face's format."""
    return model.directory or plan.output / "models" / model.name


def _exported(plan: BuildPlan, variant: Variant, model: Step | None) -> Step:
    """Quantizes for the PyTorch flow."""
    precision = variant.precision
    source = source_of(plan, variant.model)
    kv_cache = "none" if precision.kv_cache is KvCache.AUTO else str(precision.kv_cache)
    return Step(
        name=f"quantize {variant.model.name}/{precision.name}",
        before=(
            *plan.tools.python,
            str(plan.tools.hf_ptq),
            *("--pyt_ckpt_path", str(source)),
            "--export_path",
        ),
        after=(
            *("--qformat", QFORMATS[precision.weights]),
            *("--kv_cache_qformat", kv_cache),
            *_calibration(plan, variant, PTQ_CALIBRATION, "hf_ptq.py"),
        ),
        output=plan.output / "quantized" / f"{variant.model.name}-{precision.name}",
        content=Content.QUANTIZED,
        ranks=1,
        size=exported_bytes(variant.facts, precision),
        source=source,
        needs=model,
    )


def _checkpoint(plan: BuildPlan, variant: Variant, model: Step | None) -> Step:
    """Converts for `trtllm-build`, or quantizes with ModelOpt."""
    source = source_of(plan, variant.model)
    quantizes = variant.precision.weights in variant.facts.family.quantizes
    before, after = (_quantize if quantizes else _convert)(plan, variant, source)
    name = f"{variant.precision.name}-{variant.split.name}"
    verb = "quantize" if quantizes else "convert"
    return Step(
        name=f"{verb} {variant.model.name}/{name}",
        before=before,
        after=after,
        output=plan.output / "checkpoints" / variant.model.name / name,
        content=Content.CHECKPOINT,
        ranks=variant.split.ranks,
        size=checkpoint_bytes(variant.facts, variant.precision),
        source=source,
        needs=model,
    )


Words = tuple[str, ...]


def _convert(plan: BuildPlan, variant: Variant, source: Path) -> tuple[Words, Words]:
    family, precision, split = variant.facts.family, variant.precision, variant.split
    script = plan.tools.examples / family.directory / "convert_checkpoint.py"
    kind = ("--ckpt-type", "hf") if family.is_world_sized else ()
    before = (*plan.tools.python, str(script), *kind, "--model_dir", str(source), "--output_dir")
    after = [
        *("--dtype", precision.dtype.long),
        *_weight_options(precision.weights),
        *_split_options(variant.facts, split),
    ]
    if precision.kv_cache is KvCache.INT8:
        after.append("--int8_kv_cache")
        after += ["--tokenizer_dir", str(source)] if family.is_world_sized else []
    if precision.kv_cache is KvCache.INT8 or precision.weights is Weights.INT8_SMOOTHQUANT:
        script_name = f"the converter of {family.name}"
        after += _calibration(plan, variant, family.calibration, script_name)
    return before, tuple(after)


def _weight_options(weights: Weights) -> Words:
    if weights is Weights.INT8:
        return ("--use_weight_only", "--weight_only_precision", "int8")
    if weights is Weights.INT8_SMOOTHQUANT:
        return ("--smoothquant", SMOOTHING, "--per_token", "--per_channel")
    return ()


def _split_options(facts: ModelFacts, split: Split) -> Words:
    if facts.family.is_world_sized:
        return ("--world-size", str(split.ranks))
    sizes = ("--tp_size", str(split.tensor), "--pp_size", str(split.pipeline))
    if not facts.experts:
        return sizes
    whole = split.tensor // split.expert
    return (*sizes, "--moe_tp_size", str(whole), "--moe_ep_size", str(split.expert))


def _quantize(plan: BuildPlan, variant: Variant, source: Path) -> tuple[Words, Words]:
    precision, split = variant.precision, variant.split
    script = plan.tools.examples / "quantization" / "quantize.py"
    before = (*plan.tools.python, str(script), "--model_dir", str(source), "--output_dir")
    grouped = precision.weights is Weights.INT4_AWQ
    after = (
        *("--dtype", precision.dtype.long),
        *("--qformat", QFORMATS[precision.weights]),
        *(("--awq_block_size", str(AWQ_GROUP)) if grouped else ()),
        *(() if precision.kv_cache is KvCache.AUTO else ("--kv_cache_dtype", precision.kv_cache)),
        *("--tp_size", str(split.tensor), "--pp_size", str(split.pipeline)),
        *_calibration(plan, variant, QUANTIZE_CALIBRATION, "quantize.py"),
    )
    return before, tuple(map(str, after))


def _calibration(
    plan: BuildPlan, variant: Variant, options: Mapping[str, str], tool: str
) -> Sequence[str]:
    words: list[str] = []
    for name, value in plan.calibration.given.items():
        if name not in options:
            raise SettingsError(
                f"calibration.{name} is {value}, but {tool} has no such option, and makes"
                f" {variant.precision.name} of {variant.model.name}; leave it out"
            )
        words += [options[name], value]
    return words


def _engine(plan: BuildPlan, variant: Variant, checkpoint: Step) -> Step:
    precision, lengths = variant.precision, variant.lengths
    eight_bits = precision.weights in (Weights.FP8, Weights.NVFP4)
    return Step(
        name=f"build {variant.model.name}/{checkpoint.output.name}/{variant.shape}",
        before=(
            *plan.tools.trtllm_build,
            *("--checkpoint_dir", str(checkpoint.output)),
            "--output_dir",
        ),
        after=(
            *("--max_batch_size", str(variant.batch)),
            *("--max_input_len", str(lengths.input)),
            *("--max_seq_len", str(lengths.total)),
            *("--max_num_tokens", str(variant.model.max_num_tokens)),
            *("--max_beam_width", str(variant.model.beam_width)),
            *("--kv_cache_type", "paged"),
            # ModelOpt's formats below 16 bits have kernels of TensorRT's own.
            *(() if eight_bits else ("--gemm_plugin", "auto")),
            *("--use_paged_context_fmha", "enable" if reuses_kv(precision) else "disable"),
            *(
                ("--use_fp8_context_fmha", "enable")
                if eight_bits and precision.kv_cache is KvCache.FP8
                else ()
            ),
            *("--workers", str(min(plan.build_workers, variant.split.ranks))),
        ),
        output=plan.output
        / "engines"
        / variant.model.name
        / checkpoint.output.name
        / variant.shape,
        content=Content.ENGINE,
        ranks=variant.split.ranks,
        size=checkpoint.size,
        source=checkpoint.output,
        needs=checkpoint,
    )


def reuses_kv(precision: Precision) -> bool:
    """Whether an engine can reuse KV and compute prompts in chunks: its kernels read no INT8 KV in blocks."""
    return precision.kv_cache is not KvCache.INT8
