"""The model families that TensorRT-LLM has a converter for, with the precisions of each.

TensorRT-engine flow: the options of `convert_checkpoint.py` and the support tables beside it, as of release 1.2.
PyTorch flow: the tables of supported models and of quantization.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trtmesh.tools.engine_build.precisions import Flow, KvCache, Precision, Weights

FP16, BF16 = Weights.FP16, Weights.BF16
FP8, NVFP4 = Weights.FP8, Weights.NVFP4
INT8, SMOOTH, AWQ = Weights.INT8, Weights.INT8_SMOOTHQUANT, Weights.INT4_AWQ


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Family:
    """Models with one converter, and what it can do."""

    name: str
    model_type: str
    """`model_type` of config.json."""
    directory: str
    """Of convert_checkpoint.py, below the examples of TensorRT-LLM."""
    converts: frozenset[Weights]
    """Written by convert_checkpoint.py."""
    quantizes: frozenset[Weights] = frozenset()
    """Written by quantize.py, from ModelOpt."""
    pytorch: frozenset[Weights] = frozenset()
    """Served by the PyTorch flow; empty for models that it lacks."""
    converts_int8_kv: bool = False
    """Whether the converter calibrates an INT8 KV cache."""
    calibration: Mapping[str, str]
    """Options of the converter by setting of the plan's calibration."""
    splits_tensors: bool = True
    splits_layers: bool = True
    """Whether the converter has tensor and pipeline parallelism."""
    is_world_sized: bool = False
    """Whether the converter has `--world-size` in place of sizes by kind."""
    longest: int | None = None
    """Longest sequence of an engine."""
    gated: bool = True
    """Whether the MLP has a gate: three matrices instead of two."""
    ties: bool = False
    """Whether embedding and output share weights unless config.json says otherwise."""

    def weights(self, flow: Flow) -> frozenset[Weights]:
        return self.pytorch if flow is Flow.PYTORCH else self.converts | self.quantizes

    def refusal(self, precision: Precision, flow: Flow) -> str:
        """Why TensorRT-LLM lacks a precision of the family; '' if it has it."""
        known = self.weights(flow)
        if not known:
            return f"the {flow} flow has no {self.name} models"
        if precision.weights not in known:
            names = ", ".join(sorted(known))
            return f"the {flow} flow has no {precision.weights} of {self.name} models, only {names}"
        return self._kv_refusal(precision, flow)

    def _kv_refusal(self, precision: Precision, flow: Flow) -> str:
        weights, kv_cache = precision.weights, precision.kv_cache
        if kv_cache is KvCache.AUTO:
            return ""
        if flow is Flow.PYTORCH:
            return "" if kv_cache is KvCache.FP8 else "the pytorch flow has no int8 KV cache"
        if kv_cache is KvCache.FP8:
            fits = weights in (FP8, NVFP4)
            return "" if fits else "the tensorrt flow has an fp8 KV cache for fp8 and nvfp4 only"
        if weights in self.quantizes:
            fits = weights in (AWQ, SMOOTH)
            return "" if fits else f"an int8 KV cache does not go with {weights}"
        return "" if self.converts_int8_kv else f"the converter of {self.name} has no int8 KV cache"


_DATASET = {"dataset": "--calib_dataset"}

FAMILIES = (
    Family(
        name="llama",
        model_type="llama",
        directory="models/core/llama",
        converts=frozenset({FP16, BF16, INT8, SMOOTH}),
        quantizes=frozenset({FP8, AWQ, NVFP4}),
        pytorch=frozenset({FP16, BF16, FP8, AWQ, NVFP4}),
        converts_int8_kv=True,
        calibration={
            **_DATASET,
            "samples": "--calib_size",
            "tokens": "--calib_max_seq_length",
        },
    ),
    Family(
        name="mistral",
        model_type="mistral",
        directory="models/core/llama",
        converts=frozenset({FP16, BF16, INT8, SMOOTH}),
        quantizes=frozenset({FP8, AWQ}),
        pytorch=frozenset({FP16, BF16, FP8, AWQ}),
        converts_int8_kv=True,
        calibration={
            **_DATASET,
            "samples": "--calib_size",
            "tokens": "--calib_max_seq_length",
        },
    ),
    Family(
        name="mixtral",
        model_type="mixtral",
        directory="models/core/llama",
        converts=frozenset({FP16, BF16, INT8}),
        quantizes=frozenset({FP8, NVFP4}),
        pytorch=frozenset({FP16, BF16, FP8, NVFP4}),
        calibration={},
    ),
    Family(
        name="qwen",
        model_type="qwen2",
        directory="models/core/qwen",
        converts=frozenset({FP16, BF16, INT8, SMOOTH}),
        quantizes=frozenset({FP8, AWQ}),
        pytorch=frozenset({FP16, BF16, FP8, AWQ, NVFP4}),
        converts_int8_kv=True,
        calibration=_DATASET,
    ),
    Family(
        name="gemma2",
        model_type="gemma2",
        directory="models/core/gemma",
        converts=frozenset({FP16, BF16, INT8}),
        quantizes=frozenset({FP8, AWQ, SMOOTH}),
        converts_int8_kv=True,
        calibration=_DATASET,
        splits_layers=False,
        is_world_sized=True,
        longest=4096,
        ties=True,
    ),
    Family(
        name="phi3",
        model_type="phi3",
        directory="models/core/phi",
        converts=frozenset({FP16, BF16, INT8}),
        quantizes=frozenset({FP8, SMOOTH}),
        pytorch=frozenset({FP16, BF16}),
        calibration={},
        splits_tensors=False,
        splits_layers=False,
    ),
    Family(
        name="gpt2",
        model_type="gpt2",
        directory="models/core/gpt",
        converts=frozenset({FP16, BF16, INT8, SMOOTH}),
        quantizes=frozenset({FP8}),
        converts_int8_kv=True,
        calibration=_DATASET,
        gated=False,
        ties=True,
    ),
    Family(
        name="opt",
        model_type="opt",
        directory="models/contrib/opt",
        converts=frozenset({FP16, BF16, INT8}),
        calibration={},
        splits_layers=False,
        gated=False,
        ties=True,
    ),
    Family(
        name="falcon",
        model_type="falcon",
        directory="models/contrib/falcon",
        converts=frozenset({FP16, BF16, INT8}),
        quantizes=frozenset({FP8, AWQ}),
        calibration={},
        gated=False,
        ties=True,
    ),
    Family(
        name="bloom",
        model_type="bloom",
        directory="models/contrib/bloom",
        converts=frozenset({FP16, BF16, INT8, SMOOTH}),
        quantizes=frozenset({FP8}),
        converts_int8_kv=True,
        calibration=_DATASET,
        splits_layers=False,
        gated=False,
        ties=True,
    ),
)

FAMILY_BY_TYPE: Mapping[str, Family] = {family.model_type: family for family in FAMILIES}
