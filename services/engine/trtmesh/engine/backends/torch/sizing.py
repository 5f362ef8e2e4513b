"""The number of KV blocks and the longest sequence."""

from __future__ import annotations

from dataclasses import dataclass

from trtmesh.chassis.errors import ModelUnusable
from trtmesh.engine.backends.torch.compute.device import Device
from trtmesh.engine.backends.torch.model.model import Model
from trtmesh.engine.backends.torch.settings import TorchSettings


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that the settings give a model."""

    blocks: int
    host_blocks: int
    max_sequence_tokens: int


def size(settings: TorchSettings, model: Model, device: Device) -> Sizes:
    """Raises ModelUnusable where the settings do not fit the model."""
    longest = settings.max_sequence_tokens or model.max_positions
    if longest > model.max_positions:
        raise ModelUnusable(
            f"max_sequence_tokens is {longest} but the model has {model.max_positions} positions"
        )
    token_bytes = model.kv_shape.bytes_per_token(model.dtype)
    tokens = _tokens(settings, token_bytes, longest, device)
    blocks = tokens // settings.tokens_per_block
    if not blocks:
        raise ModelUnusable(
            f"a KV cache of {tokens} tokens holds no block of {settings.tokens_per_block}; raise kv_cache_tokens,"
            " kv_cache_bytes or kv_cache_free_memory_fraction, whichever is set"
        )
    if not settings.max_sequence_tokens:
        longest = min(longest, blocks * settings.tokens_per_block)
    return Sizes(
        blocks, settings.host_cache_bytes // (token_bytes * settings.tokens_per_block), longest
    )


def _tokens(settings: TorchSettings, bytes_per_token: int, longest: int, device: Device) -> int:
    """Tokens of the pool: the lowest limit that is set, or the device's default."""
    limits = []
    if settings.kv_cache_tokens:
        limits.append(settings.kv_cache_tokens)
    if settings.kv_cache_bytes:
        limits.append(settings.kv_cache_bytes // bytes_per_token)
    fraction = settings.kv_cache_free_memory_fraction
    if fraction:
        limits.append(int(fraction * device.free_memory()) // bytes_per_token)
    if limits:
        return min(limits)
    most = settings.max_batch_size * longest
    return min(device.default_cache_bytes() // bytes_per_token, most)
