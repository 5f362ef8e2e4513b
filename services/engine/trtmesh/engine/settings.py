"""Settings of an engine process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator
from trtmesh.chassis.tls.settings import SecuredSettings
from trtmesh.engine.backends.foreign.settings import ForeignSettings
from trtmesh.engine.backends.simulated.settings import SimulatedSettings
from trtmesh.engine.backends.tensorrt_llm.settings import TensorRtLlmSettings

# The settings of the torch backend, and with them the package around them, do not import torch.
from trtmesh.engine.backends.torch.settings import TorchSettings
from trtmesh.engine.handoff.settings import HandoffSettings

Seconds = Annotated[float, Field(gt=0, le=86400)]


class EngineSettings(SecuredSettings):
    """Settings of an engine process."""

    section: ClassVar[str] = "engine"
    renamed: ClassVar[Mapping[str, str]] = {
        "torch.kv_cache_tokens": "torch.kv_cache.tokens",
        "torch.kv_cache_bytes": "torch.kv_cache.bytes",
        "torch.kv_cache_free_memory_fraction": "torch.kv_cache.free_memory_fraction",
        "torch.tokens_per_block": "torch.kv_cache.tokens_per_block",
        "torch.prefix_reuse": "torch.kv_cache.prefix_reuse",
        "torch.partial_reuse": "torch.kv_cache.partial_reuse",
        "torch.decode_copy_bytes": "torch.kv_cache.decode_copy_bytes",
        "torch.kv_events": "torch.kv_cache.events",
        "torch.host_cache_bytes": "torch.host_cache.bytes",
        "torch.host_cache_min_priority": "torch.host_cache.min_priority",
        "torch.batching_type": "torch.batching.type",
        "torch.batch_scheduler_policy": "torch.batching.policy",
        "torch.max_step_tokens": "torch.batching.max_step_tokens",
        "torch.chunked_context": "torch.batching.chunked_context",
        "torch.context_chunk_tokens": "torch.batching.context_chunk_tokens",
        "torch.max_batch_size": "torch.limits.max_batch_size",
        "torch.max_queue_size": "torch.limits.max_queue_size",
        "torch.max_sequence_tokens": "torch.limits.max_sequence_tokens",
        "torch.max_sequences_per_item": "torch.limits.max_sequences_per_item",
        "torch.max_logits_bytes": "torch.limits.max_logits_bytes",
        "torch.prompt_tables_bytes": "torch.limits.max_prompt_table_bytes",
        "torch.adapters.bytes": "torch.adapters.host_bytes",
        "simulated.step_ms": "simulated.timing.step_ms",
        "simulated.step_ms_per_sequence": "simulated.timing.step_ms_per_sequence",
        "simulated.prefill_tokens_per_second": "simulated.timing.prefill_tokens_per_second",
        "simulated.prefill_tokens_per_step": "simulated.timing.prefill_tokens_per_step",
        "simulated.load_ms": "simulated.timing.load_ms",
        "simulated.total_blocks": "simulated.kv_cache.total_blocks",
        "simulated.tokens_per_block": "simulated.kv_cache.tokens_per_block",
        "simulated.max_batch_size": "simulated.limits.max_batch_size",
        "simulated.max_queue_size": "simulated.limits.max_queue_size",
        "simulated.max_sequence_tokens": "simulated.limits.max_sequence_tokens",
        "simulated.max_sequences_per_item": "simulated.limits.max_sequences_per_item",
        "simulated.vocabulary_size": "simulated.vocabulary.size",
        "simulated.first_token_id": "simulated.vocabulary.first_token_id",
        "simulated.last_token_id": "simulated.vocabulary.last_token_id",
        "simulated.end_id": "simulated.vocabulary.end_id",
        "simulated.end_probability": "simulated.vocabulary.end_probability",
        "simulated.tokenizer_fingerprint": "simulated.vocabulary.tokenizer_fingerprint",
        "simulated.crash_after_steps": "simulated.faults.crash_after_steps",
        "simulated.freeze_after_steps": "simulated.faults.freeze_after_steps",
        "simulated.break_after_steps": "simulated.faults.break_after_steps",
        "simulated.slow_after_steps": "simulated.faults.slow_after_steps",
        "simulated.slow_factor": "simulated.faults.slow_factor",
        "simulated.fail_item": "simulated.faults.fail_item",
        "simulated.refuse_after_items": "simulated.faults.refuse_after_items",
    }

    backend: Literal["torch", "tensorrt_llm", "simulated", "foreign"] = "torch"
    """What executes the model."""
    worker: str = ""
    """Name of the worker, unique in the fleet; unset makes one from host name and process id."""
    model_dir: Path | None = None
    """Directory of the model; the simulated and the foreign backend need none."""
    model: str = ""
    """Name that requests ask for; unset takes the directory's name, or "simulated"."""
    role: Literal["mixed", "prefill", "decode"] = "mixed"
    """Phases that the worker is for."""
    load_interval_seconds: Seconds = 0.1
    """Time between two Load events, in seconds."""
    stall_seconds: Seconds = 10.0
    """How long sequences may wait without a step before the worker counts as stuck, in seconds."""
    max_handles_per_stream: Annotated[int, Field(ge=1, le=1_000_000)] = 16384
    """Most sequences of one router."""
    trtllm_service: bool = False
    """Whether gateways may call trtllm.TrtllmService on the same port; needs the extra `gateways`."""
    handoff: HandoffSettings = HandoffSettings()
    torch: TorchSettings = TorchSettings()
    tensorrt_llm: TensorRtLlmSettings = TensorRtLlmSettings()
    simulated: SimulatedSettings = SimulatedSettings()
    foreign: ForeignSettings = ForeignSettings()

    @model_validator(mode="after")
    def _backend_has_the_role(self) -> Self:
        """The library computes prompts for others without overlap only, and hands over by a transfer of its own."""
        if self.backend != "tensorrt_llm" or self.role == "mixed":
            return self
        if not self.tensorrt_llm.hands_over:
            raise ValueError(
                f"role {self.role} needs tensorrt_llm.transceiver.backend, which moves the KV"
            )
        if self.role == "prefill" and self.tensorrt_llm.batching.overlap:
            raise ValueError("role prefill needs tensorrt_llm.batching.overlap off")
        return self
