"""Settings of the TensorRT-LLM backend. Those that the torch backend also has have its names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from trtmesh.chassis.json_text import load_json
from trtmesh.chassis.settings import CommaList, Settings
from trtmesh.engine.backends.settings import AdapterSettings, KvCacheSettings, LimitSettings

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Size = Annotated[int, Field(ge=1, le=65536)]
Share = Annotated[float, Field(gt=0, lt=1)]
Seconds = Annotated[float, Field(gt=0, le=86400)]


def _parse_json(value: object) -> object:
    """Parses the text of a flag or a variable; anything else stays as it is."""
    if not isinstance(value, str):
        return value
    try:
        return load_json(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from error


Options = Annotated[Mapping[str, Any], BeforeValidator(_parse_json)]
"""Arguments by name; JSON in a flag or a variable."""


class ParallelSettings(Settings):
    """GPUs of the worker. It uses tensor x pipeline of them, the first that CUDA_VISIBLE_DEVICES names."""

    tensor: Size = 1
    """GPUs that share every layer."""
    pipeline: Size = 1
    """Groups of GPUs that have a part of the layers each."""


class TensorRtLlmKvCacheSettings(KvCacheSettings):
    """Size of the KV cache, and reuse of its blocks. The lowest limit applies."""

    free_memory_fraction: Share = 0.9
    """Most memory, as a share of the memory free after the model is loaded."""
    tokens_per_block: Annotated[int, Field(ge=1, le=4096)] = 32
    """Tokens per KV block; a TensorRT engine has its own."""
    dtype: str = "auto"
    """Type of the KV, such as fp8; auto is that of the checkpoint."""
    host_bytes: Annotated[int, Field(ge=0)] = 0
    """Host memory in bytes for blocks evicted from the device; 0 keeps none."""


class TensorRtLlmBatchingSettings(Settings):
    """Start of sequences, and the tokens of a step."""

    policy: Literal["guaranteed_no_evict", "max_utilization", "static_batch"] = (
        "guaranteed_no_evict"
    )
    """guaranteed_no_evict starts a sequence only when its longest form fits the KV cache, max_utilization when its
    present tokens fit, and static_batch after the end of the previous batch."""
    max_step_tokens: Count = 8192
    """Most tokens in a step."""
    chunked_context: bool = True
    """Whether a prompt may take several steps; if not, prompts longer than max_step_tokens are refused."""
    waiting_queue_policy: str = "FCFS"
    """Order of the waiting queue, in the library's words. Requests may have a priority where the release has
    priorities and this is not FCFS."""
    overlap: bool = True
    """Whether a step is launched before the previous one is read. Prefill workers need it off."""


class TensorRtLlmLimitSettings(LimitSettings):
    """Sequences computed and waiting, and the size of an item."""

    max_beam_width: Annotated[int, Field(ge=1, le=256)] = 1
    """Most beams of an item; 1 refuses beam search."""


class TensorRtLlmAdapterSettings(AdapterSettings):
    """LoRA adapters: their files on disk, from which the library loads them, and its memory for them."""

    disk_bytes: Annotated[int, Field(ge=0, le=2**50)] = 0
    """Most bytes of adapters' files; the longest unused are removed. 0 refuses adapters."""
    directory: Path | None = None
    """Directory for these files; unset makes one below the system's directory for temporary files. The worker empties
    what it made when it stops."""
    target_modules: CommaList = ("attn_q", "attn_k", "attn_v", "attn_dense")
    """Layers that adapters may update, in the library's words; each takes memory."""


class SpeculationSettings(Settings):
    """Tokens proposed ahead of the model, for every request."""

    method: Literal["none", "ngram", "mtp", "eagle3", "draft_target"] = "none"
    """Who proposes: a search in the sequence, layers of the model, an EAGLE 3 head, or a smaller model."""
    max_draft_tokens: Size = 4
    """Most tokens proposed at once."""
    model_dir: Path | None = None
    """Directory of the head or of the smaller model."""

    @model_validator(mode="after")
    def _has_a_model(self) -> Self:
        needs = self.method in ("eagle3", "draft_target")
        if needs and self.model_dir is None:
            raise ValueError(f"method {self.method} needs model_dir")
        if not needs and self.model_dir is not None:
            raise ValueError(f"model_dir is set, but method {self.method} has no model of its own")
        return self


class TransceiverSettings(Settings):
    """The library's transfer of KV between a prefill and a decode worker. Both need the same settings and release."""

    backend: Literal["none", "DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"] = "none"
    """What moves the KV; none hands nothing over."""
    timeout_seconds: Seconds = 60.0
    """Time after which KV that nobody fetched is given up."""


class TensorRtLlmSettings(Settings):
    """Model, device and decoding."""

    flow: Literal["pytorch", "tensorrt"] = "pytorch"
    """pytorch runs the model directory; tensorrt runs a built engine, which releases from 1.3 on cannot."""
    engine_dir: Path | None = None
    """Directory of the built engine; the model directory then has the configuration and the tokenizer."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the activations; auto is the checkpoint's own."""
    trust_remote_code: bool = False
    """Whether code of the model directory may run."""
    guided_decoding: Literal["none", "xgrammar", "llguidance"] = "none"
    """What constrains the output to a grammar; none refuses grammars."""
    generation_logits: bool = False
    """Whether requests may ask for the logits of generated tokens; on a single GPU this slows down streams."""
    options: Options = {}  # noqa: RUF012 - frozen with the model
    """Further arguments of the library's constructor by their names there, and of the configurations within it:
    moe_expert_parallel_size: 4, or scheduler_config: {context_chunking_policy: EQUAL_PROGRESS}."""
    stuck_seconds: Annotated[float, Field(ge=0, le=86400)] = 300.0
    """How long sequences may wait without a step before the worker gives up and exits, in seconds; 0 waits for ever."""
    parallel: ParallelSettings = ParallelSettings()
    kv_cache: TensorRtLlmKvCacheSettings = TensorRtLlmKvCacheSettings()
    batching: TensorRtLlmBatchingSettings = TensorRtLlmBatchingSettings()
    limits: TensorRtLlmLimitSettings = TensorRtLlmLimitSettings()
    adapters: TensorRtLlmAdapterSettings = TensorRtLlmAdapterSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    transceiver: TransceiverSettings = TransceiverSettings()

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if (self.flow == "tensorrt") != (self.engine_dir is not None):
            raise ValueError("engine_dir is for flow tensorrt, which needs it")
        if self.flow == "tensorrt" and self.speculation.method != "none":
            raise ValueError(
                "speculation is part of a built engine; leave speculation.method unset"
            )
        if self.hands_over and self.limits.max_beam_width > 1:
            raise ValueError(
                "transceiver.backend hands nothing over with beams; lower limits.max_beam_width to 1"
            )
        return self

    def option(self, of: str, name: str) -> Any:
        """An argument of a configuration in `options`, or None."""
        options = self.options.get(of)
        return options.get(name) if isinstance(options, Mapping) else None

    @property
    def hands_over(self) -> bool:
        """Whether KV moves between workers."""
        return self.transceiver.backend != "none"

    @property
    def reports_blocks(self) -> bool:
        """Whether the library reports changes of cached blocks."""
        return self.kv_cache.events and self.kv_cache.prefix_reuse
