"""What the torch backend can be told."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from trtmesh.chassis.settings import Settings
from trtmesh.engine.backends.torch.memory.eviction import DEFAULT_PRIORITY

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]


class TorchSettings(Settings):
    """How the model is loaded, its memory and the size of a step."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and KV cache; auto is float32 on a CPU (exact and reproducible), elsewhere the model's own."""
    weight_copies: bool = True
    """Whether a CPU without half-precision instructions keeps a float32 copy of half-precision weights, which makes
    steps of more than two tokens up to seven times as fast and takes twice the memory of the weights on top."""
    device: str = "cpu"
    """Device in PyTorch's words, such as cpu or cuda:0."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Threads of one CPU operation; 0 takes OMP_NUM_THREADS where it is set, and else the physical cores."""

    kv_cache_tokens: Annotated[int, Field(ge=0, le=2**40)] = 0
    """Most tokens that the KV cache holds; 0 sets no limit. The least limit counts; with none set it is 1 GiB on a CPU
    and 0.9 of the free memory elsewhere, and not more than max_batch_size sequences of full length need."""
    kv_cache_bytes: Annotated[int, Field(ge=0)] = 0
    """Most memory of the KV cache in bytes; 0 sets no limit."""
    kv_cache_free_memory_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Most memory of the KV cache, as a part of what is free once the model is loaded; 0 sets no limit."""
    tokens_per_block: Annotated[int, Field(ge=1, le=4096)] = 16
    """Tokens of a KV block."""
    prefix_reuse: bool = True
    """Whether the KV of equal beginnings is computed once and kept until its blocks are needed."""
    partial_reuse: bool = True
    """Whether a cached block that begins with the wanted tokens is copied and used for these."""
    decode_copy_bytes: Annotated[int, Field(ge=0)] = 2**30
    """Memory, on a CPU, for copies of the KV of sequences that decode together, in bytes. What fits need not be
    gathered from its blocks in every step; 0 keeps none."""
    host_cache_bytes: Annotated[int, Field(ge=0)] = 0
    """Memory of the host's for cached blocks that the KV cache has no room for, in bytes."""
    host_cache_min_priority: Annotated[int, Field(ge=0, le=100)] = DEFAULT_PRIORITY
    """Lowest retention priority of the blocks that go there; 35 is that of blocks without one."""
    kv_events: bool = True
    """Whether changes of what is cached are told."""

    batching_type: Literal["inflight_fused_batching", "V1"] = "inflight_fused_batching"
    """V1 starts a batch only when the one before has wholly ended; else sequences join and leave at every step."""
    batch_scheduler_policy: Literal["max_utilization", "guaranteed_no_evict"] | None = None
    """guaranteed_no_evict starts a sequence only when its longest form fits the KV cache; max_utilization starts it
    when its present tokens do, and pauses the newest when blocks run out. Unset is max_utilization, with V1 the other.
    """
    chunked_context: bool = True
    """Whether a prompt may be computed in several steps; else one longer than max_step_tokens is refused."""
    context_chunk_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Most prompt tokens of one sequence in a step; 0 takes all that the step has room for."""

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
    prompt_tables_bytes: Annotated[int, Field(ge=1, le=2**40)] = 2**30
    """Most memory of the prompt tables of all items that wait or run, in bytes, each counted as it came and as the
    model computes with it; an item whose table finds no room is refused."""
    normalize_log_probs: bool = False
    """Whether log-probabilities are those among the tokens that could be chosen, where an item does not say."""

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
        """Whether a sequence that has started goes on to its end."""
        return self.batching_type == "V1" or self.batch_scheduler_policy == "guaranteed_no_evict"

    @property
    def longest_prompt(self) -> int | None:
        """Most tokens of a prompt, where a step bounds it."""
        return None if self.chunked_context else self.max_step_tokens
