"""Settings that the torch and the tensorrt_llm backend have alike."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from trtmesh.chassis.settings import Settings


class KvCacheSettings(Settings):
    """Size of the KV cache, and reuse of its blocks. The lowest limit applies."""

    tokens: Annotated[int, Field(ge=0, le=2**40)] = 0
    """Most tokens; 0 sets no limit."""
    bytes: Annotated[int, Field(ge=0)] = 0
    """Most memory in bytes; 0 sets no limit."""
    prefix_reuse: bool = True
    """Whether equal prefixes share KV and stay cached until their blocks are needed."""


class LimitSettings(Settings):
    """Sequences computed and waiting, and the size of an item."""

    max_batch_size: Annotated[int, Field(ge=1, le=65536)] = 256
    """Most sequences computed at once."""
    max_queue_size: Annotated[int, Field(ge=0, le=2**31 - 1)] = 1024
    """Most sequences waiting in addition to the free places of the batch."""
    max_sequence_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Most tokens of a sequence, prompt included; 0 means the model's length, within the KV cache."""
    max_sequences_per_item: Annotated[int, Field(ge=1, le=256)] = 16
    """Most sequences of one item."""


class AdapterSettings(Settings):
    """LoRA adapters, and memory for them."""

    max_batch_adapters: Annotated[int, Field(ge=1, le=4096)] = 8
    """Most adapters computed at once; sequences with another one wait."""
    max_rank: Annotated[int, Field(ge=1, le=4096)] = 64
    """Largest rank of an adapter; memory is reserved for it."""
