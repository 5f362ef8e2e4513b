"""How many KV blocks there are, and how long a sequence may be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from trtmesh.chassis.errors import ModelUnusable
from trtmesh.engine.backends.torch.model.model import Model
from trtmesh.engine.backends.torch.settings import TorchSettings

CPU_BYTES = 2**30
FRACTION = 0.9

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the settings come to for a model."""

    blocks: int
    host_blocks: int
    max_sequence_tokens: int


def size(settings: TorchSettings, model: Model, dtype: torch.dtype, device: torch.device) -> Sizes:
    """Blocks of the pools, and the longest sequence: the model's length as far as the pool holds it.

    Raises ModelUnusable where the settings do not fit the model.
    """
    longest = settings.max_sequence_tokens or model.max_positions
    if longest > model.max_positions:
        raise ModelUnusable(
            f"max_sequence_tokens is {longest} but the model has {model.max_positions} positions"
        )
    block_bytes = model.kv_shape.bytes_per_token(dtype) * settings.tokens_per_block
    tokens = _tokens(settings, model.kv_shape.bytes_per_token(dtype), longest, device)
    blocks = tokens // settings.tokens_per_block
    if not blocks:
        raise ModelUnusable(
            f"a KV cache of {tokens} tokens holds no block of {settings.tokens_per_block}; raise kv_cache_tokens,"
            " kv_cache_bytes or kv_cache_free_memory_fraction, whichever is set"
        )
    if not settings.max_sequence_tokens:
        longest = min(longest, blocks * settings.tokens_per_block)
    return Sizes(blocks, settings.host_cache_bytes // block_bytes, longest)


def _tokens(
    settings: TorchSettings, bytes_per_token: int, longest: int, device: torch.device
) -> int:
    """Tokens of the pool: the least of the limits that are set."""
    limits = []
    if settings.kv_cache_tokens:
        limits.append(settings.kv_cache_tokens)
    if settings.kv_cache_bytes:
        limits.append(settings.kv_cache_bytes // bytes_per_token)
    fraction = settings.kv_cache_free_memory_fraction
    if fraction:
        limits.append(int(fraction * free_memory(device)) // bytes_per_token)
    if limits:
        return min(limits)
    room = CPU_BYTES if device.type == "cpu" else int(FRACTION * free_memory(device))
    return min(room // bytes_per_token, settings.max_batch_size * longest)


def free_memory(device: torch.device, meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Bytes that can still be had on a device; of a CPU what the machine has and the container allows."""
    if device.type != "cpu":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    available = next(
        int(line.split()[1]) * 1024
        for line in meminfo.read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.is_file() and used.is_file() and limit.read_text().strip() != "max":
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return max(0, available)
