"""Builds an engine from settings. The only place that distinguishes devices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from trtmesh.chassis.errors import ModelUnusable, SettingsError
from trtmesh.chassis.fingerprint import tokenizer_fingerprint
from trtmesh.engine.adapter_store import StoreLimits
from trtmesh.engine.backend import BackendInfo, Capabilities
from trtmesh.engine.backends.torch.accelerator import Accelerator
from trtmesh.engine.backends.torch.compute.device import Device
from trtmesh.engine.backends.torch.compute.self_check import check_invariance, check_model
from trtmesh.engine.backends.torch.cpu.device import Cpu, take_threads
from trtmesh.engine.backends.torch.engine import Engine
from trtmesh.engine.backends.torch.fields import supported_fields
from trtmesh.engine.backends.torch.handoffs import Handoffs
from trtmesh.engine.backends.torch.memory.adapters import AdapterCache, AdapterTargets
from trtmesh.engine.backends.torch.memory.blocks import BlockPool, BlockTables
from trtmesh.engine.backends.torch.memory.handoff_memory import kv_memory_of
from trtmesh.engine.backends.torch.memory.kvcache import KvCache
from trtmesh.engine.backends.torch.memory.tensors import DATA_TYPES
from trtmesh.engine.backends.torch.model.lora_layers import Room
from trtmesh.engine.backends.torch.model.model import Model, load_model
from trtmesh.engine.backends.torch.model.prompt_tables import PromptTables
from trtmesh.engine.backends.torch.model.rope import freeze_rope
from trtmesh.engine.backends.torch.model.weights import model_fingerprint
from trtmesh.engine.backends.torch.scheduling.rules import SchedulingRules
from trtmesh.engine.backends.torch.scheduling.scheduler import Scheduler
from trtmesh.engine.backends.torch.settings import AdapterSettings, KvCacheSettings, TorchSettings
from trtmesh.engine.kv_memory import KvMemory
from trtmesh.v1 import engine_pb2 as epb

ALL_ROLES = (epb.WORKER_ROLE_MIXED, epb.WORKER_ROLE_PREFILL, epb.WORKER_ROLE_DECODE)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model on its device."""

    engine: Engine
    info: BackendInfo
    device: Device
    cache: KvCache
    tables: PromptTables
    adapters: AdapterCache
    kv_memory: KvMemory | None
    """None where the KV of a token depends on a setting, so that other workers may have other KV."""


def load_engine(model_dir: Path, files: list[Path], settings: TorchSettings) -> Loaded:
    """Loads the weights in `files`. Raises ModelUnusable with the reason, or SettingsError for an unfit device."""
    take_threads(settings.threads)
    device = _device(settings)
    dtype = device.default_dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
    model = load_model(model_dir, dtype, device.name, device.fit, room=_room(settings, device))
    dtype = model.dtype
    sizes = size(settings, model, device)
    is_independent = freeze_rope(model.module, sizes.max_sequence_tokens)
    check_model(model, device)
    if settings.batch_invariant:
        check_invariance(model, device)
    cache = _cache(settings.kv_cache, model, sizes, device)
    limits, batching = settings.limits, settings.batching
    info = BackendInfo(
        backend="torch",
        model=model_dir.resolve().name,
        model_fingerprint=model_fingerprint(model_dir, files, str(dtype)),
        tokenizer_fingerprint=_tokenizer_fingerprint(model_dir),
        vocabulary_size=model.vocabulary_size,
        max_sequence_tokens=sizes.max_sequence_tokens,
        max_batch_size=limits.max_batch_size,
        # A larger item than batch and queue together would be refused as retryable and never fit.
        max_sequences_per_item=min(
            limits.max_sequences_per_item, limits.max_batch_size + limits.max_queue_size
        ),
        max_queue_size=limits.max_queue_size,
        max_prompt_tokens=None if batching.chunked_context else batching.max_step_tokens,
        max_logits_bytes=limits.max_logits_bytes,
        tokens_per_block=settings.kv_cache.tokens_per_block,
        total_blocks=sizes.blocks,
        supported_fields=supported_fields(settings.decoding_mode, adapters=bool(model.targets)),
        capabilities=_capabilities(settings, model, hands_over=is_independent),
        end_ids=model.end_ids,
        data_type=DATA_TYPES[dtype],
        static_batching=batching.is_static,
        max_adapter_bytes=_most_adapter_bytes(settings.adapters),
        layers_per_part=min(settings.kv_cache.layers_per_part, model.kv_shape.layers),
    )
    adapters = _adapters(settings.adapters, model)
    scheduler = _scheduler(settings, model, sizes, adapters)
    handoffs = Handoffs(
        scheduler, layers=model.kv_shape.layers, layers_per_part=info.layers_per_part
    )
    engine = Engine(device.compute(model, cache, scheduler.tables), scheduler, adapters, handoffs)
    tables = PromptTables(model.embedding, limits.max_prompt_table_bytes)
    kv_memory = kv_memory_of(cache) if is_independent else None
    return Loaded(engine, info, device, cache, tables, adapters, kv_memory)


def _room(settings: TorchSettings, device: Device) -> Room | None:
    adapters = settings.adapters
    if not adapters.host_bytes:
        return None
    # Every sequence of a batch gets a token, also beyond `max_step_tokens`.
    tokens = settings.batching.max_step_tokens + settings.limits.max_batch_size
    return Room(
        adapters.max_rank,
        lambda slot_bytes: _slots(adapters, slot_bytes, device),
        lambda tables: device.products(tables, tokens),
    )


def _slots(settings: AdapterSettings, slot_bytes: int, device: Device) -> int:
    """Slots for adapters. Raises ModelUnusable where the device's memory for them is less than one."""
    most = settings.max_batch_adapters
    if settings.device_fraction:
        given = int(settings.device_fraction * device.free_memory())
    elif settings.device_bytes:
        given = settings.device_bytes
    else:
        return most
    if given < slot_bytes:
        raise ModelUnusable(
            f"gives adapters {given} bytes of the device, but a slot of rank {settings.max_rank} takes {slot_bytes};"
            " raise it, or lower engine.torch.adapters.max_rank",
            setting=f"engine.torch.{_slots_setting(settings, 0)}",
        )
    return min(most, given // slot_bytes)


def _slots_setting(settings: AdapterSettings, slots: int) -> str:
    """The setting that limits the slots to this number."""
    if slots == settings.max_batch_adapters:
        return "adapters.max_batch_adapters"
    return f"adapters.{'device_fraction' if settings.device_fraction else 'device_bytes'}"


def _adapters(settings: AdapterSettings, model: Model) -> AdapterCache:
    slots = model.adapters.slots if model.adapters else 0
    limits = StoreLimits(settings.host_bytes, slots, slots_setting=_slots_setting(settings, slots))
    return AdapterCache(
        AdapterTargets(
            model.targets, model.compute_dtype, settings.max_rank, _most_adapter_bytes(settings)
        ),
        limits,
        model.adapters.load if model.adapters else None,
    )


def _most_adapter_bytes(settings: AdapterSettings) -> int:
    return min(settings.max_adapter_bytes, settings.host_bytes)


def _device(settings: TorchSettings) -> Device:
    name = _present(settings.device)
    if name.type == "cpu":
        return Cpu(settings)
    if settings.batch_invariant:
        raise SettingsError(
            f"engine.torch.batch_invariant needs device cpu, but engine.torch.device is {settings.device!r}"
        )
    return Accelerator(name)


def _present(text: str) -> torch.device:
    """Raises SettingsError for a device that this machine lacks."""
    try:
        name = torch.device(text)
        known = name.type in ("cpu", "cuda")
    except RuntimeError:
        known = False
    if not known:
        raise SettingsError(
            f"is {text!r} but must be cpu, cuda or cuda:NUMBER", setting="engine.torch.device"
        )
    count = torch.cuda.device_count()
    if name.type == "cuda" and (name.index or 0) >= count:
        why = "" if torch.version.cuda else ", being built without CUDA"
        raise SettingsError(
            f"is {text!r} but PyTorch finds {count} CUDA devices here{why}",
            setting="engine.torch.device",
        )
    return name


def _capabilities(settings: TorchSettings, model: Model, *, hands_over: bool) -> Capabilities:
    # Otherwise rounding depends on the batch, and decides between tokens that nearly tie.
    exact = settings.batch_invariant
    return Capabilities(
        deterministic=exact,
        resumes_exactly=exact,
        stops_single_sequences=True,
        roles=ALL_ROLES if hands_over else (epb.WORKER_ROLE_MIXED,),
        max_adapters=model.adapters.slots if model.adapters else 0,
    )


def _cache(settings: KvCacheSettings, model: Model, sizes: Sizes, device: Device) -> KvCache:
    return KvCache(
        model.kv_shape,
        blocks=sizes.blocks,
        host_blocks=sizes.host_blocks,
        tokens_per_block=settings.tokens_per_block,
        dtype=model.dtype,
        device=device.name,
        pins_memory=device.pins_memory,
        shares_memory=device.shares_memory,
    )


def _scheduler(
    settings: TorchSettings, model: Model, sizes: Sizes, adapters: AdapterCache
) -> Scheduler:
    blocks_per_sequence = -(-sizes.max_sequence_tokens // settings.kv_cache.tokens_per_block)
    tables = BlockTables(settings.limits.max_batch_size, blocks_per_sequence)
    pool = BlockPool(
        sizes.blocks,
        host_blocks=sizes.host_blocks,
        offload_min_priority=settings.host_cache.min_priority,
        events=settings.kv_cache.events,
    )
    return Scheduler(pool, tables, _rules(settings, model), adapters)


def _rules(settings: TorchSettings, model: Model) -> SchedulingRules:
    cache, batching = settings.kv_cache, settings.batching
    return SchedulingRules(
        cache.tokens_per_block,
        batching.max_step_tokens,
        chunk_tokens=batching.chunk_tokens,
        never_pause=batching.never_pauses,
        static_batch=batching.is_static,
        prefix_reuse=cache.prefix_reuse,
        partial_reuse=cache.partial_reuse,
        max_adapters=model.adapters.slots if model.adapters else 0,
        window=model.window,
    )


def _tokenizer_fingerprint(model_dir: Path) -> str:
    try:
        return tokenizer_fingerprint(model_dir)
    except ValueError as error:
        raise ModelUnusable(str(error)) from error


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that the settings give a model."""

    blocks: int
    host_blocks: int
    max_sequence_tokens: int


def size(settings: TorchSettings, model: Model, device: Device) -> Sizes:
    """Raises ModelUnusable where the settings do not fit the model."""
    most, tokens_per_block = settings.limits.max_sequence_tokens, settings.kv_cache.tokens_per_block
    longest = most or model.max_positions
    if longest > model.max_positions:
        raise ModelUnusable(
            f"is {longest} but the model has {model.max_positions} positions",
            setting="engine.torch.limits.max_sequence_tokens",
        )
    token_bytes = model.kv_shape.bytes_per_token(model.dtype)
    tokens = _tokens(settings, token_bytes, longest, device)
    blocks = tokens // tokens_per_block
    if not blocks:
        raise ModelUnusable(
            f"a KV cache of {tokens} tokens holds no block of {tokens_per_block}; raise engine.torch.kv_cache.tokens,"
            " engine.torch.kv_cache.bytes or engine.torch.kv_cache.free_memory_fraction, whichever is set"
        )
    if not most:
        longest = min(longest, blocks * tokens_per_block)
    return Sizes(blocks, settings.host_cache.bytes // (token_bytes * tokens_per_block), longest)


def _tokens(settings: TorchSettings, bytes_per_token: int, longest: int, device: Device) -> int:
    """Tokens of the pool: the lowest limit that is set, or the device's default."""
    cache, limits = settings.kv_cache, []
    if cache.tokens:
        limits.append(cache.tokens)
    if cache.bytes:
        limits.append(cache.bytes // bytes_per_token)
    if cache.free_memory_fraction:
        limits.append(int(cache.free_memory_fraction * device.free_memory()) // bytes_per_token)
    if limits:
        return min(limits)
    most = settings.limits.max_batch_size * longest
    return min(device.default_cache_bytes() // bytes_per_token, most)
