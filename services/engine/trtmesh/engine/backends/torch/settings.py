"""What the torch backend can be told."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from trtmesh.chassis.settings import Settings

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]


class TorchSettings(Settings):
    """How the model is loaded, its memory and the size of a step."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and KV cache; auto is float32 on a CPU (exact and reproducible), elsewhere the model's own."""
    device: str = "cpu"
    """Device in PyTorch's words, such as cpu or cuda:0."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Threads of one CPU operation; 0 takes the physical cores."""

    kv_cache_tokens: Annotated[int, Field(ge=0, le=2**40)] = 0
    """Tokens that the KV cache holds; 0 takes what kv_cache_bytes holds, at most max_batch_size full sequences."""
    kv_cache_bytes: Annotated[int, Field(ge=1)] = 2**30
    """Memory of the KV cache in bytes where kv_cache_tokens is 0."""
    tokens_per_block: Annotated[int, Field(ge=1, le=4096)] = 16
    """Tokens of a KV block."""
    prefix_reuse: bool = True
    """Whether the KV of equal beginnings is computed once and kept until its blocks are needed."""

    max_batch_size: Annotated[int, Field(ge=1, le=65536)] = 256
    """Most sequences computed at once."""
    max_step_tokens: Count = 512
    """Most tokens computed in a step, except that every sequence in the batch gets at least one."""
    max_sequence_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Most tokens of a sequence, prompt included; 0 takes the model's length, at most what the KV cache holds."""
    max_sequences_per_item: Annotated[int, Field(ge=1, le=256)] = 16
    """Most sequences of one item."""
    max_queue_size: Annotated[int, Field(ge=0, le=2**31 - 1)] = 1024
    """Most sequences waiting beyond those that a free place in the batch awaits."""

    decoding_mode: Literal["auto", "top_k", "top_p", "top_k_top_p", "beam_search"] = "auto"
    """How tokens may be chosen; fields of another mode are refused. auto allows all, top_k and top_p one filter,
    top_k_top_p both, beam_search beams alone."""
    max_logits_bytes: Annotated[int, Field(ge=1, le=2**40)] = 2**30
    """Most bytes of logits that one item may ask for; what asks for more is refused before anything is computed."""
    normalize_log_probs: bool = False
    """Whether log-probabilities are those among the tokens that could be chosen, where an item does not say."""
