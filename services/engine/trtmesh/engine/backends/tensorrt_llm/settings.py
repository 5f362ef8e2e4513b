"""Settings of the TensorRT-LLM backend. Settings shared with the torch backend have the same names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from trtmesh.chassis.json_text import load_json
from trtmesh.chassis.settings import Settings
from trtmesh.engine.backends.settings import AdapterSettings, KvCacheSettings, LimitSettings

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Size = Annotated[int, Field(ge=1, le=65536)]


TOKENS_PER_BLOCK = 32
"""The library's default."""

TRANSFER_MILLISECONDS = 60_000
"""Life of KV without a fetch; by default, 1.2 keeps such KV for ever."""


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
    """GPUs of the worker. The first tensor x pipeline devices of CUDA_VISIBLE_DEVICES are used."""

    tensor: Size = 1
    """GPUs sharing every layer."""
    pipeline: Size = 1
    """Groups of GPUs with a part of the layers each."""


class TensorRtLlmBatchingSettings(Settings):
    """The tokens of a step."""

    max_step_tokens: Count = 8192
    """Most tokens in a step."""
    chunked_context: bool = True
    """Whether a prompt may take several steps; if not, prompts longer than max_step_tokens are refused."""


class TensorRtLlmLimitSettings(LimitSettings):
    """Sequences computed and waiting, and the size of an item."""

    max_beam_width: Annotated[int, Field(ge=1, le=256)] = 1
    """Most beams of an item; 1 refuses beam search."""


class TensorRtLlmAdapterSettings(AdapterSettings):
    """LoRA adapters: the files on disk, for the library to load, and the library's memory."""

    disk_bytes: Annotated[int, Field(ge=0, le=2**50)] = 0
    """Most bytes of adapters' files, below the directory for temporary files (TMPDIR); the longest unused are removed.
    0 refuses adapters."""


class TensorRtLlmSettings(Settings):
    """The model, and the facts needed by a worker; all else are `options` in the library's words."""

    engine_dir: Path | None = None
    """Directory of a built engine, which releases from 1.3 on cannot run; the model directory then has the
    configuration and the tokenizer. Unset runs the model directory, in PyTorch."""
    options: Options = {}  # noqa: RUF012 - frozen with the model
    """Further arguments of the library's constructor, by the library's names, and of the configurations within:
    guided_decoding_backend: xgrammar, or kv_cache_config: {dtype: fp8}."""
    parallel: ParallelSettings = ParallelSettings()
    kv_cache: KvCacheSettings = KvCacheSettings()
    batching: TensorRtLlmBatchingSettings = TensorRtLlmBatchingSettings()
    limits: TensorRtLlmLimitSettings = TensorRtLlmLimitSettings()
    adapters: TensorRtLlmAdapterSettings = TensorRtLlmAdapterSettings()

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if self.engine_dir and self.drafts:
            raise ValueError("speculation is part of a built engine; leave speculative_config out")
        if self.hands_over and self.limits.max_beam_width > 1:
            raise ValueError(
                "cache_transceiver_config hands nothing over with beams; lower limits.max_beam_width to 1"
            )
        return self

    def option(self, *names: str) -> Any:
        """Returns an argument in `options`, or of a configuration there, or None."""
        found: Any = self.options
        for name in names:
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    @property
    def flow(self) -> Literal["pytorch", "tensorrt"]:
        """The library's name for how it runs the model."""
        return "tensorrt" if self.engine_dir else "pytorch"

    @property
    def hands_over(self) -> bool:
        """Whether KV moves between workers."""
        return self.option("cache_transceiver_config", "backend") is not None

    @property
    def overlaps(self) -> bool:
        """Whether a step is launched before the previous step is read."""
        return not self.option("disable_overlap_scheduler")

    @property
    def tokens_per_block(self) -> int:
        """Tokens of a KV block, unless a built engine says otherwise."""
        return self.option("kv_cache_config", "tokens_per_block") or TOKENS_PER_BLOCK

    @property
    def transfer_milliseconds(self) -> int:
        """Time after which KV without a fetch is given up."""
        named = self.option("cache_transceiver_config", "kv_transfer_timeout_ms")
        return named or TRANSFER_MILLISECONDS

    @property
    def drafts(self) -> str:
        """The source of draft tokens, in the library's words; empty without drafts."""
        return str(self.option("speculative_config", "decoding_type") or "")

    @property
    def reports_blocks(self) -> bool:
        """Whether the library reports changes of cached blocks."""
        return self.kv_cache.prefix_reuse
