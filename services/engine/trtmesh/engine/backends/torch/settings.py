"""Settings of the torch backend."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from trtmesh.chassis.settings import Settings
from trtmesh.engine.backends.torch.memory.eviction import DEFAULT_PRIORITY

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]


class TorchSettings(Settings):
    """Loading, memory, and the size of a step."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and KV cache; auto is float32 on a CPU (exact and reproducible) and the model's own elsewhere."""
    weight_copies: bool = True
    """Whether a CPU without half-precision instructions keeps a float32 copy of half-precision weights: steps of more
    than two tokens are up to seven times as fast, for three times the memory of the weights."""
    device: str = "cpu"
    """Device in PyTorch's words, such as cpu or cuda:0."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Threads of a CPU operation; 0 means OMP_NUM_THREADS where set, or the physical cores."""

    kv_cache_tokens: Annotated[int, Field(ge=0, le=2**40)] = 0
    """Most tokens in the KV cache; 0 sets no limit. The lowest limit applies. The default is 1 GiB on a CPU and 0.9 of
    the free memory elsewhere, but no more than max_batch_size sequences of full length need."""
    kv_cache_bytes: Annotated[int, Field(ge=0)] = 0
    """Most memory of the KV cache in bytes; 0 sets no limit."""
    kv_cache_free_memory_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Most memory of the KV cache, as a share of the memory free after the model is loaded; 0 sets no limit."""
    tokens_per_block: Annotated[int, Field(ge=1, le=4096)] = 16
    """Tokens per KV block."""
    prefix_reuse: bool = True
    """Whether equal prefixes share KV and stay cached until their blocks are needed."""
    partial_reuse: bool = True
    """Whether the matching part of a cached block is copied and used."""
    decode_copy_bytes: Annotated[int, Field(ge=0)] = 2**30
    """Memory in bytes, on a CPU, for contiguous copies of the KV of decoding sequences, instead of gathering blocks in
    every step; 0 keeps no copies."""
    host_cache_bytes: Annotated[int, Field(ge=0)] = 0
    """Host memory in bytes for cached blocks evicted from the KV cache."""
    host_cache_min_priority: Annotated[int, Field(ge=0, le=100)] = DEFAULT_PRIORITY
    """Lowest retention priority of blocks moved to host memory; blocks without a priority have 35."""
    kv_events: bool = True
    """Whether changes of cached blocks are reported to routers."""

    batching_type: Literal["inflight_fused_batching", "V1"] = "inflight_fused_batching"
    """V1 starts a batch only after the end of the previous batch; otherwise sequences join and leave at every step."""
    batch_scheduler_policy: Literal["max_utilization", "guaranteed_no_evict"] | None = None
    """guaranteed_no_evict starts a sequence only when its longest form fits the KV cache. max_utilization starts it
    when its present tokens fit, and pauses the newest sequence when blocks run out. The default is max_utilization,
    with V1 guaranteed_no_evict."""
    chunked_context: bool = True
    """Whether a prompt may take several steps; if not, prompts longer than max_step_tokens are refused."""
    context_chunk_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Most prompt tokens of one sequence in a step; 0 means as many as the step has room for."""

    max_batch_size: Annotated[int, Field(ge=1, le=65536)] = 256
    """Most sequences computed at once."""
    max_step_tokens: Count = 512
    """Most tokens in a step, except that every sequence in the batch gets at least one."""
    max_sequence_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Most tokens of a sequence, prompt included; 0 means the model's length, within the KV cache."""
    max_sequences_per_item: Annotated[int, Field(ge=1, le=256)] = 16
    """Most sequences of one item."""
    max_queue_size: Annotated[int, Field(ge=0, le=2**31 - 1)] = 1024
    """Most sequences waiting in addition to the free places of the batch."""

    decoding_mode: Literal["auto", "top_k", "top_p", "top_k_top_p", "beam_search"] = "auto"
    """Decoding that requests may ask for; other fields are refused. auto allows everything, top_k and top_p one filter,
    top_k_top_p both, beam_search only beams."""
    max_logits_bytes: Annotated[int, Field(ge=1, le=2**40)] = 2**30
    """Most bytes of logits that an item may ask for; larger requests are refused."""
    prompt_tables_bytes: Annotated[int, Field(ge=1, le=2**40)] = 2**30
    """Most memory in bytes for the prompt tables of all items, each counted as received and as computed with; an item
    is refused when its table does not fit."""
    normalize_log_probs: bool = False
    """Default of output.normalize_log_probs: whether log-probabilities count only the tokens that could be chosen."""

    @model_validator(mode="after")
    def _batching_fits_policy(self) -> TorchSettings:
        if self.batching_type == "V1" and self.batch_scheduler_policy == "max_utilization":
            raise ValueError(
                "batching_type V1 never pauses a sequence; leave batch_scheduler_policy unset"
            )
        if self.context_chunk_tokens and not self.chunked_context:
            raise ValueError("context_chunk_tokens is set but chunked_context is off")
        return self

    @property
    def never_pause(self) -> bool:
        """Whether a started sequence runs to its end."""
        return self.batching_type == "V1" or self.batch_scheduler_policy == "guaranteed_no_evict"
