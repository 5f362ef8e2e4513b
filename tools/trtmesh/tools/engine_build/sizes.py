"""Expected sizes: files on disk, and the GPU memory of each rank."""

from __future__ import annotations

from dataclasses import dataclass

from trtmesh.tools.engine_build.model_facts import ModelFacts
from trtmesh.tools.engine_build.precisions import WEIGHT_BYTES, Precision

GIB = 2**30
HALF = 2
"""Bytes of a weight that is not quantized."""


@dataclass(frozen=True, slots=True)
class Split:
    """Ranks of a model by kind of parallelism."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    """Of the `tensor` ranks of a stage, those that divide the experts among them."""

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline

    @property
    def name(self) -> str:
        expert = f"-ep{self.expert}" if self.expert > 1 else ""
        return f"tp{self.tensor}-pp{self.pipeline}{expert}"


def model_bytes(facts: ModelFacts) -> int:
    """The files of the model, in 16 bits."""
    return HALF * facts.weights


def checkpoint_bytes(facts: ModelFacts, precision: Precision) -> int:
    """A checkpoint or an engine, over all ranks: the output has weights of its own even if it shares those of the
    embedding in the model."""
    linear = int(facts.linear_weights * WEIGHT_BYTES[precision.weights])
    return linear + HALF * (2 * facts.embedding_weights + facts.other_weights)


def exported_bytes(facts: ModelFacts, precision: Precision) -> int:
    """A quantized model in Hugging Face's format."""
    linear = int(facts.linear_weights * WEIGHT_BYTES[precision.weights])
    return linear + HALF * (facts.weights - facts.linear_weights)


def kv_bytes_per_token(facts: ModelFacts, precision: Precision, split: Split | None = None) -> int:
    """The KV of one token on the rank with most layers, or with all of them."""
    split = split or Split()
    layers = -(-facts.layers // split.pipeline)
    heads = -(-facts.kv_heads // split.tensor)
    return 2 * layers * heads * facts.head_dim * precision.kv_cache.element_bytes


@dataclass(frozen=True, slots=True)
class RankMemory:
    """GPU memory of the fullest rank, without activations and CUDA's own."""

    weights: int
    kv_cache: int
    """For a full batch of the longest sequences; less is enough, with fewer of them at a time."""


def rank_memory(
    facts: ModelFacts, precision: Precision, split: Split, batch: int, length: int
) -> RankMemory:
    """Estimates the rank of a stage with most weights: layers, with the whole embedding or its part of the output."""
    layers = -(-facts.layers // split.pipeline)
    linear = layers * facts.layer_weights * WEIGHT_BYTES[precision.weights] / split.tensor
    first = HALF * (facts.embedding_weights + facts.other_weights)
    last = HALF * facts.embedding_weights / split.tensor
    ends = first + last if split.pipeline == 1 else max(first, last)
    kv_cache = kv_bytes_per_token(facts, precision, split) * batch * length
    return RankMemory(int(linear + ends), kv_cache)


def as_gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
