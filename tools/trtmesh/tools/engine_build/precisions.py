"""Precisions of weights and KV cache, and what each needs of a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Flow(StrEnum):
    """How TensorRT-LLM runs a model."""

    PYTORCH = "pytorch"
    TENSORRT = "tensorrt"
    """From an engine that `trtllm-build` compiled; gone after release 1.2."""


class Dtype(StrEnum):
    """Numbers of 16 bits, for whatever is not quantized."""

    FP16 = "fp16"
    BF16 = "bf16"

    @property
    def long(self) -> str:
        """The name in the options of TensorRT-LLM."""
        return {"fp16": "float16", "bf16": "bfloat16"}[self]


class Weights(StrEnum):
    """Precision of the linear layers."""

    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8_weight_only"
    INT8_SMOOTHQUANT = "int8_smoothquant"
    INT4_AWQ = "int4_awq"
    NVFP4 = "nvfp4"

    @property
    def is_quantized(self) -> bool:
        return self not in (Weights.FP16, Weights.BF16)


class KvCache(StrEnum):
    """Precision of the KV cache."""

    AUTO = "auto"
    """That of what is not quantized."""
    INT8 = "int8"
    FP8 = "fp8"

    @property
    def element_bytes(self) -> int:
        return 2 if self is KvCache.AUTO else 1


AWQ_GROUP = 128
"""Weights that share a scale."""
NVFP4_GROUP = 16

WEIGHT_BYTES: Mapping[Weights, float] = {
    Weights.FP16: 2,
    Weights.BF16: 2,
    Weights.FP8: 1,
    Weights.INT8: 1,
    Weights.INT8_SMOOTHQUANT: 1,
    Weights.INT4_AWQ: 0.5 + 2 / AWQ_GROUP,
    Weights.NVFP4: 0.5 + 1 / NVFP4_GROUP,
}
"""Bytes of a weight of a linear layer, with its share of the scales of a group."""

ADA, BLACKWELL = 89, 100
LEAST_ARCHITECTURE: Mapping[Weights, int] = {Weights.FP8: ADA, Weights.NVFP4: BLACKWELL}
"""The first GPU architecture with the precision, where not all have it."""


@dataclass(frozen=True, slots=True)
class Precision:
    """The precision of one variant of a model."""

    weights: Weights
    kv_cache: KvCache
    dtype: Dtype

    @property
    def name(self) -> str:
        """Names directories: `int4_awq`, `int8_weight_only-kv_int8`; `fp8-fp16` has another dtype than usual."""
        usual = usual_dtype(self.weights)
        dtype = "" if self.dtype is usual else f"-{self.dtype}"
        kv_cache = "" if self.kv_cache is KvCache.AUTO else f"-kv_{self.kv_cache}"
        return f"{self.weights}{dtype}{kv_cache}"


def usual_dtype(weights: Weights) -> Dtype:
    """The dtype unless the plan names another."""
    if weights in (Weights.FP16, Weights.INT8_SMOOTHQUANT):
        return Dtype.FP16
    return Dtype.BF16
