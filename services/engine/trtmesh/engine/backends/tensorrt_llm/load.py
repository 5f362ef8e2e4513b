"""The load of the worker: its own counts, and the library's newest row of statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Counts:
    """What the worker counts itself. Numbers of steps only grow, by deliveries of tokens, by iterations of the library
    without any, and by its refusals of items."""

    steps: int = 0
    computed_prompt_tokens: int = 0
    reused_prompt_tokens: int = 0
    generated_tokens: int = 0
    adapter_hits: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the library's statistics; every key may be absent."""

    max_blocks: int = 0
    used_blocks: int = 0
    tokens_per_block: int = 0
    new_blocks: int = 0
    reused_blocks: int = 0
    paused_sequences: int = 0
    device_bytes: int = 0
    pinned_bytes: int = 0


def row_of(given: Mapping[str, Any]) -> Row:
    cache = given.get("kvCacheStats") or {}
    batching = given.get("inflightBatchingStats") or {}
    return Row(
        max_blocks=_number(cache, "maxNumBlocks"),
        used_blocks=_number(cache, "usedNumBlocks"),
        tokens_per_block=_number(cache, "tokensPerBlock"),
        new_blocks=_number(cache, "allocNewBlocks"),
        reused_blocks=_number(cache, "reusedBlocks"),
        paused_sequences=_number(batching, "numPausedRequests"),
        device_bytes=_number(given, "gpuMemUsage"),
        pinned_bytes=_number(given, "pinnedMemUsage"),
    )


def _number(row: Mapping[str, Any], key: str) -> int:
    value = row.get(key)
    return int(value) if isinstance(value, int | float) else 0
