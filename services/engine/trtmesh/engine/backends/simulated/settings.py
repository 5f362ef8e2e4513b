"""Settings of the simulated backend."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator
from trtmesh.chassis.fingerprint import ANY_TOKENIZER
from trtmesh.chassis.settings import Settings

Milliseconds = Annotated[float, Field(ge=0, le=3_600_000)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class TimingSettings(Settings):
    """Speed of loading, prefill and decode."""

    step_ms: Milliseconds = 10.0
    """Time of a step in milliseconds; 0 runs as fast as the event loop allows."""
    step_ms_per_sequence: Milliseconds = 0.0
    """Additional step time per running sequence, in milliseconds."""
    prefill_tokens_per_second: Annotated[float, Field(ge=0)] = 0.0
    """Prompt tokens computed a second, on top of the step time; 0 computes prompts in no time."""
    prefill_tokens_per_step: Count = 8192
    """Most prompt tokens of one step; longer prompts take several."""
    load_ms: Milliseconds = 0.0
    """Time to load the model, in milliseconds."""


MAX_KV_BYTES = 2**40
"""Only written pages take memory."""


class SimulatedKvCacheSettings(Settings):
    """Size of the KV cache."""

    total_blocks: Count = 16384
    """KV blocks in the pool."""
    tokens_per_block: Annotated[int, Field(ge=1, le=4096)] = 32
    """Tokens of a KV block."""
    token_bytes: Annotated[int, Field(ge=64, le=2**20, multiple_of=64)] = 64
    """Bytes of a token's KV, written for handoffs alone; the cache has at most 1 TiB of addresses."""
    shards: Annotated[int, Field(ge=1, le=2)] = 1
    """Pools that share the KV heads, as with tensor parallelism."""

    @model_validator(mode="after")
    def _is_small_enough(self) -> Self:
        size = (self.total_blocks + 1) * self.tokens_per_block * self.token_bytes
        if size > MAX_KV_BYTES:
            raise ValueError(
                f"total_blocks {self.total_blocks} of tokens_per_block {self.tokens_per_block} and token_bytes"
                f" {self.token_bytes} take {size} bytes, but at most {MAX_KV_BYTES} may be; lower token_bytes"
            )
        return self


class SimulatedLimitSettings(Settings):
    """Sequences computed and waiting, and the size of an item."""

    max_batch_size: Annotated[int, Field(ge=1, le=65536)] = 1024
    """Most sequences computed at once."""
    max_queue_size: Annotated[int, Field(ge=0, le=2**31 - 1)] = 4096
    """Most sequences waiting in addition to the free places of the batch."""
    max_sequence_tokens: Count = 32768
    """Most tokens of a sequence, prompt included."""
    max_sequences_per_item: Annotated[int, Field(ge=1, le=256)] = 16
    """Most sequences of one item."""


class VocabularySettings(Settings):
    """Ids of prompts and of generated tokens."""

    size: Count = 32000
    """Ids below this may be prompt tokens."""
    first_token_id: TokenId = 32
    """Lowest generated id."""
    last_token_id: TokenId = 126
    """Highest generated id except the end id; a longer range contributes 256 evenly spread ids."""
    end_id: TokenId = 2
    """The model's own end id."""
    end_probability: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of positions that hold the end id."""
    tokenizer_fingerprint: str = ANY_TOKENIZER
    """Reported fingerprint of the tokenizer; `any` suits every tokenizer, empty reports none."""

    @model_validator(mode="after")
    def _ids_are_in_the_vocabulary(self) -> Self:
        if not self.first_token_id <= self.last_token_id < self.size:
            raise ValueError(
                f"first_token_id {self.first_token_id} must be at most last_token_id {self.last_token_id}, which must"
                f" be below size {self.size}"
            )
        if self.end_id >= self.size:
            raise ValueError(f"end_id {self.end_id} must be below size {self.size}")
        return self


class SimulatedAdapterSettings(Settings):
    """LoRA adapters without weights: their identity decides the tokens."""

    slots: Annotated[int, Field(ge=0, le=65536)] = 0
    """Adapters ready to run at once; 0 refuses adapters."""
    host_adapters: Count = 1024
    """Adapters in host memory; each counts as 1 MiB."""
    max_rank: Annotated[int, Field(ge=1, le=4096)] = 1024
    """Largest rank of an adapter."""
    load_ms: Milliseconds = 0.0
    """Time to load an adapter from its content, in milliseconds; one at a time."""


class SimulatedHandoffSettings(Settings):
    """How KV moves to another worker."""

    by: Literal["leases", "state"] = "leases"
    """By leases of blocks, or by a state of the backend, which then moves the KV itself to workers of its host."""
    compatibility: Annotated[str, Field(max_length=256)] = ""
    """With `state`: only workers with equal texts hand over to each other."""
    kept_seconds: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """With `state`: time for which KV waits for another worker, in seconds."""
    transfer_ms: Milliseconds = 0.0
    """With `state`: time of a transfer, in milliseconds."""


class FaultSettings(Settings):
    """Faults, for tests of the mesh."""

    crash_after_steps: Count | None = None
    """The process dies silently after this many steps."""
    freeze_after_steps: Count | None = None
    """The backend freezes after this many steps, but the process stays alive."""
    break_after_steps: Count | None = None
    """The backend reports a failure of its own after this many steps."""
    slow_after_steps: Count | None = None
    """Steps take `slow_factor` times as long after this many steps."""
    slow_factor: Annotated[float, Field(ge=1, le=1e6)] = 10.0
    """Factor for the duration of slow steps."""
    fail_item: Count | None = None
    """Number, counted from 1, of the item that is admitted and fails at its first token."""


class SimulatedSettings(Settings):
    """A backend without a model, for tests of the mesh: a mapping of the groups timing, kv_cache, limits, vocabulary,
    adapters, handoff and faults, whose settings the module of this class describes."""

    for_tests: ClassVar[bool] = True

    timing: TimingSettings = TimingSettings()
    kv_cache: SimulatedKvCacheSettings = SimulatedKvCacheSettings()
    limits: SimulatedLimitSettings = SimulatedLimitSettings()
    vocabulary: VocabularySettings = VocabularySettings()
    adapters: SimulatedAdapterSettings = SimulatedAdapterSettings()
    handoff: SimulatedHandoffSettings = SimulatedHandoffSettings()
    faults: FaultSettings = FaultSettings()
