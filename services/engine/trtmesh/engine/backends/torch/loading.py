"""Builds an engine from settings. The only place to distinguish devices."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from trtmesh.chassis import adapter_content
from trtmesh.chassis.cores import weight_bytes
from trtmesh.chassis.device_names import AUTO
from trtmesh.chassis.errors import ModelUnusable, SettingsError, StartupError
from trtmesh.chassis.fingerprint import tokenizer_fingerprint
from trtmesh.chassis.progress import tell_progress
from trtmesh.engine import admission
from trtmesh.engine.adapter_store import StoreLimits
from trtmesh.engine.backend import BackendInfo, Capabilities
from trtmesh.engine.backends.torch.accelerator import Accelerator
from trtmesh.engine.backends.torch.compute.device import Compute, Device
from trtmesh.engine.backends.torch.compute.memory_probe import StepSize
from trtmesh.engine.backends.torch.compute.self_check import check_invariance, check_model
from trtmesh.engine.backends.torch.cpu.device import Cpu, take_threads
from trtmesh.engine.backends.torch.devices import hardware_of, present
from trtmesh.engine.backends.torch.drafts.draft_model import DraftModel
from trtmesh.engine.backends.torch.drafts.drafter import Drafter
from trtmesh.engine.backends.torch.drafts.drafting import Drafting
from trtmesh.engine.backends.torch.drafts.finished_texts import FinishedTexts
from trtmesh.engine.backends.torch.drafts.given_logits import DraftLogits
from trtmesh.engine.backends.torch.drafts.lengths import AdaptiveLengths
from trtmesh.engine.backends.torch.drafts.patience import PatientDrafter
from trtmesh.engine.backends.torch.drafts.prompt_lookup import PromptLookup
from trtmesh.engine.backends.torch.engine import Engine
from trtmesh.engine.backends.torch.fields import supported_fields
from trtmesh.engine.backends.torch.guided.grammars import Grammars, GuideCounts
from trtmesh.engine.backends.torch.guided.guidance import compiler_for
from trtmesh.engine.backends.torch.memory.adapters import AdapterCache, AdapterTargets
from trtmesh.engine.backends.torch.memory.handoff_memory import kv_memory_of
from trtmesh.engine.backends.torch.memory.kvcache import BlockTables, KvCache
from trtmesh.engine.backends.torch.memory.shortage import LESS_STEP, fitting
from trtmesh.engine.backends.torch.memory.tensors import DATA_TYPES
from trtmesh.engine.backends.torch.model import prompt_tables
from trtmesh.engine.backends.torch.model.lora_layers import Room
from trtmesh.engine.backends.torch.model.model import Model, load_model
from trtmesh.engine.backends.torch.model.prompt_tables import PromptTables
from trtmesh.engine.backends.torch.model.rope import freeze_rope
from trtmesh.engine.backends.torch.parallel.group import RankGroup, RankPlace, open_store
from trtmesh.engine.backends.torch.parallel.layers import divide
from trtmesh.engine.backends.torch.parallel.leading import LeadingCompute
from trtmesh.engine.backends.torch.parallel.rank_commands import Follower
from trtmesh.engine.backends.torch.parallel.ranks import Ranks
from trtmesh.engine.backends.torch.sampling.mask_time import Masks, MaskThreads, MaskTime
from trtmesh.engine.backends.torch.sequence import Sequence
from trtmesh.engine.backends.torch.settings import (
    TorchAdapterSettings,
    TorchKvCacheSettings,
    TorchSettings,
)
from trtmesh.engine.kv_memory import KvMemory
from trtmesh.engine.model_fingerprint import model_fingerprint
from trtmesh.engine.scheduling.blocks import BlockPool
from trtmesh.engine.scheduling.handoffs import BlockHandoffs
from trtmesh.engine.scheduling.scheduler import Scheduler
from trtmesh.engine.scheduling.sequence import SchedulingRules
from trtmesh.v1 import engine_pb2 as epb

log = logging.getLogger(__name__)

LESS_MODEL = "engine.torch.adapters.max_batch_adapters, or take another device, dtype or model"
LESS_CACHE = (
    "engine.torch.kv_cache.tokens, bytes or free_memory_fraction, or engine.torch.host_cache.bytes"
)
LESS_DRAFTER = "engine.torch.draft_model, or take a smaller one"
MASK_THREADS = 16
"""Most masks made at once, while a GPU computes."""
LAYERS_PER_PART = 4
"""Layers of KV that a handoff to another worker transfers at once, while later layers are computed."""
ALL_ROLES = (epb.WORKER_ROLE_MIXED, epb.WORKER_ROLE_PREFILL, epb.WORKER_ROLE_DECODE)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model on a device."""

    engine: Engine
    info: BackendInfo
    device: Device
    cache: KvCache
    tables: PromptTables
    draft_logits: DraftLogits
    grammars: Grammars | None
    """None where the model's tokenizer is unknown."""
    adapters: AdapterCache
    kv_memory: KvMemory | None
    """None where the KV of a token depends on a setting, and so may differ between workers, and where several ranks
    have a part each."""
    ranks: Ranks | None
    """The other ranks; None on a single device. To be closed with the engine."""


def load_engine(model_dir: Path, files: list[Path], settings: TorchSettings) -> Loaded:
    """Loads the weights in `files`. Raises ModelUnusable with the reason, or SettingsError for an unfit device."""
    names = _names(settings)
    take_threads(settings.threads, weight_bytes(model_dir), engines=len(names))
    if len(names) == 1:
        device = _device(settings)
        return _engine(
            model_dir, files, settings, _install(model_dir, settings, device, tell=tell_progress)
        )
    ranks = Ranks(names, model_dir, settings)
    try:
        device = _device_of_rank(names[0], settings, ranks.group)
        installed = _install(model_dir, settings, device, ranks.group, tell_progress)
        return _engine(model_dir, files, settings, installed, ranks)
    except BaseException as error:
        cause = ranks.cause_of(error) if isinstance(error, Exception) else error
        ranks.close()
        if cause is error:
            raise
        raise StartupError(str(cause)) from error


def load_follower(
    model_dir: Path, settings: TorchSettings, name: str, place: RankPlace, store: Path
) -> Follower:
    """The same on another rank: the parts for steps."""
    take_threads(settings.threads, weight_bytes(model_dir), engines=place.ranks)
    group = RankGroup(open_store(store, place.ranks), place, torch.device(name))
    device = _device_of_rank(name, settings, group)
    installed = _install(model_dir, settings, device, group)
    tables = _tables(settings, installed.sizes)
    most_tokens = _most_step_tokens(settings)
    compute = device.compute(installed.model, installed.cache, tables, most_tokens)
    group.wait()
    return Follower(compute, tables)


@dataclass(frozen=True, slots=True)
class _Installed:
    """A model, or the part of a rank, on a device with memory for KV."""

    model: Model
    device: Device
    sizes: Sizes
    cache: KvCache
    is_independent: bool
    """Whether the KV of a token does not depend on a setting."""
    draft_model: Model | None
    """Beside the other, with as many blocks for its KV."""


def _install(
    model_dir: Path,
    settings: TorchSettings,
    device: Device,
    group: RankGroup | None = None,
    tell: Callable[[str], None] = lambda _doing: None,
) -> _Installed:
    tell(f"reads the weights of {model_dir.resolve().name}, {weight_bytes(model_dir) / 1e6:.0f} MB")
    dtype = device.default_dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
    with fitting("the model", LESS_MODEL):
        model = load_model(
            model_dir,
            dtype,
            device.name,
            device.fit,
            room=_room(settings, device),
            divide=partial(divide, place=group.place) if group else None,
        )
    draft_model = None
    if settings.draft_model is not None and _may_draft(settings):
        # Before the cache is sized, which leaves room for it.
        draft_model = _read_draft_model(model_dir, settings.draft_model, dtype, device)
    with fitting("a step", LESS_STEP):
        sizes = size(settings, model, device, draft_model)
    if group:
        # Ranks have the same blocks, also where the memory of their devices differs.
        sizes = Sizes(*group.least(astuple(sizes)))
    is_independent = freeze_rope(model.module, sizes.max_sequence_tokens)
    tell("checks the model")
    check_model(model, device)
    if settings.batch_invariant:
        check_invariance(model, device)
    blocks = f"a KV cache of {sizes.blocks} blocks, and {sizes.host_blocks} on the host,"
    with fitting(blocks, LESS_CACHE):
        cache = _cache(settings.kv_cache, model, sizes, device)
    return _Installed(model, device, sizes, cache, is_independent, draft_model)


def _engine(
    model_dir: Path,
    files: list[Path],
    settings: TorchSettings,
    installed: _Installed,
    ranks: Ranks | None = None,
) -> Loaded:
    model, device, sizes, cache = (
        installed.model,
        installed.device,
        installed.sizes,
        installed.cache,
    )
    limits, batching = settings.limits, settings.batching
    tell_progress("reads the tokenizer")
    compile_guide = compiler_for(model_dir, model.vocabulary_size, model.end_ids)
    # The KV of several ranks cannot be handed over yet.
    hands_over = installed.is_independent and ranks is None
    info = BackendInfo(
        backend="torch",
        model=model_dir.resolve().name,
        model_fingerprint=model_fingerprint(model_dir, files, str(model.dtype)),
        tokenizer_fingerprint=tokenizer_fingerprint(model_dir),
        vocabulary_size=model.vocabulary_size,
        max_sequence_tokens=sizes.max_sequence_tokens,
        max_batch_size=limits.max_batch_size,
        # A larger item than batch and queue together would be refused as retryable and never fit.
        max_sequences_per_item=min(
            limits.max_sequences_per_item, limits.max_batch_size + limits.max_queue_size
        ),
        max_queue_size=limits.max_queue_size,
        max_prompt_tokens=None if batching.chunked_context else batching.max_step_tokens,
        tokens_per_block=settings.kv_cache.tokens_per_block,
        total_blocks=sizes.blocks,
        supported_fields=supported_fields(
            adapters=bool(model.targets),
            prompt_tables=ranks is None,
            guides=compile_guide is not None,
            drafts=_may_draft(settings),
        ),
        capabilities=_capabilities(settings, model, hands_over=hands_over),
        end_ids=model.end_ids,
        data_type=DATA_TYPES[model.dtype],
        static_batching=batching.is_static,
        max_adapter_bytes=_most_adapter_bytes(settings.adapters),
        layers_per_part=min(LAYERS_PER_PART, model.kv_shape.layers),
        computation={
            "device": f"{len(settings.device.names)} of {hardware_of(device.name)}",
            "libraries": f"torch {torch.__version__}, transformers {transformers.__version__}",
            "batch_invariant": str(settings.batch_invariant),
        },
    )
    adapters = _adapters(settings.adapters, model)
    block_tables = _tables(settings, sizes)
    rules = _rules(settings, model)
    scheduler = Scheduler[Sequence](
        BlockPool(sizes.blocks, host_blocks=sizes.host_blocks), block_tables, rules, adapters
    )
    handoffs = BlockHandoffs(
        scheduler, layers=model.kv_shape.layers, layers_per_part=info.layers_per_part
    )
    tell_progress("prepares its steps")
    with fitting("what steps need beside the KV cache", f"{LESS_CACHE}, or {LESS_STEP}"):
        most_tokens, drafts = _most_step_tokens(settings), settings.drafts != "off"
        compute = device.compute(model, cache, block_tables, most_tokens, drafts=drafts)
    if ranks:
        ranks.group.wait()
        tokens_per_block = settings.kv_cache.tokens_per_block
        compute = LeadingCompute(compute, block_tables, tokens_per_block, ranks)
    threads = _mask_threads(device) if compile_guide else 0
    # Sequences that share an automaton wait for each other's masks.
    grammars = Grammars(compile_guide, max(1, 2 * threads)) if compile_guide else None
    drafting = _drafting(settings, installed, info, compute)
    counts = grammars.counts if grammars else GuideCounts()
    masks: Masks = MaskThreads(counts, threads) if threads else MaskTime(counts)
    engine = Engine(compute, scheduler, adapters, handoffs, drafting, masks)
    tables = PromptTables(model.embedding, prompt_tables.MAX_PROMPT_TABLE_BYTES)
    draft_logits = DraftLogits(info.vocabulary_size, admission.MAX_LOGITS_BYTES)
    kv_memory = kv_memory_of(cache) if hands_over else None
    return Loaded(
        engine, info, device, cache, tables, draft_logits, grammars, adapters, kv_memory, ranks
    )


def _mask_threads(device: Device) -> int:
    """Where the device computes apart, other threads of this process are idle meanwhile; a core is the engine's."""
    if device.name.type == "cpu":
        return 0
    return max(0, min(MASK_THREADS, (os.cpu_count() or 1) - 2))


def _drafting(
    settings: TorchSettings, installed: _Installed, info: BackendInfo, compute: Compute
) -> Drafting | None:
    device = installed.device
    if not _may_draft(settings):
        if settings.drafts == "off":
            return None
        raise SettingsError(
            f"is {settings.drafts!r} but drafts need a single device, and engine.torch.device is"
            f" {settings.device.text!r}",
            setting="engine.torch.drafts",
        )
    drafter: Drafter | None = None
    if settings.drafts == "ngram":
        drafter = PromptLookup()
    elif settings.drafts == "suffix":
        drafter = FinishedTexts()
    elif settings.draft_model is not None:
        drafter = PatientDrafter(_draft_model(installed, settings, info))
    most = settings.batching.max_step_tokens
    return Drafting(
        drafter,
        AdaptiveLengths(),
        most_step_tokens=min(most, compute.most_run_tokens or most),
        vocabulary_size=info.vocabulary_size,
        is_apart=device.name.type != "cpu",
    )


def _read_draft_model(
    model_dir: Path, drafter_dir: Path, dtype: torch.dtype | None, device: Device
) -> Model:
    name = drafter_dir.resolve().name
    tell_progress(f"reads the weights of {name}, {weight_bytes(drafter_dir) / 1e6:.0f} MB")
    if tokenizer_fingerprint(drafter_dir) != tokenizer_fingerprint(model_dir):
        raise ModelUnusable(
            f"is {name}, which has another tokenizer than {model_dir.resolve().name}",
            setting="engine.torch.draft_model",
        )
    with fitting("the model for drafts", LESS_DRAFTER):
        return load_model(drafter_dir, dtype, device.name, device.fit)


def _draft_model(installed: _Installed, settings: TorchSettings, info: BackendInfo) -> DraftModel:
    model, device = installed.draft_model, installed.device
    assert model
    with fitting("the KV of the model for drafts", f"{LESS_DRAFTER}, or lower {LESS_CACHE}"):
        most = min(info.max_sequence_tokens, model.max_positions)
        freeze_rope(model.module, most)
        check_model(model, device)
        cache = _cache(settings.kv_cache, model, replace(installed.sizes, host_blocks=0), device)
        tables = _tables(settings, installed.sizes)
        compute = device.compute(model, cache, tables, _most_step_tokens(settings))
    return DraftModel(
        compute,
        tables,
        device.name,
        blocks=info.total_blocks,
        tokens_per_block=info.tokens_per_block,
        most_tokens=most,
    )


def _may_draft(settings: TorchSettings) -> bool:
    return len(settings.device.names) == 1


def _room(settings: TorchSettings, device: Device) -> Room | None:
    adapters = settings.adapters
    if not adapters.host_bytes:
        return None
    tokens = _most_step_tokens(settings)
    return Room(
        adapters.max_rank,
        adapters.max_batch_adapters,
        lambda tables: device.products(tables, tokens),
        device.slot_memory,
    )


def _adapters(settings: TorchAdapterSettings, model: Model) -> AdapterCache:
    slots = model.adapters.slots if model.adapters else 0
    limits = StoreLimits(settings.host_bytes, slots)
    return AdapterCache(
        AdapterTargets(
            model.targets, model.compute_dtype, settings.max_rank, _most_adapter_bytes(settings)
        ),
        limits,
        model.adapters.load if model.adapters else None,
    )


def _most_adapter_bytes(settings: TorchAdapterSettings) -> int:
    return min(adapter_content.MAX_ADAPTER_BYTES, settings.host_bytes)


def _names(settings: TorchSettings) -> list[str]:
    """The devices of the worker, one for each rank. Raises SettingsError for several devices unable to share a model,
    or a setting for a single device."""
    names = settings.device.names
    texts = [name.text for name in names]
    if len(names) == 1:
        return texts
    if any(name.text == AUTO or name.is_identity for name in names):
        raise SettingsError(
            f"is {settings.device.text!r} but must be different GPUs by number, such as cuda:0,cuda:1",
            setting="engine.torch.device",
        )
    devices = [present(name) for name in names]
    kinds = {each.type for each in devices}
    indexes = [each.index or 0 for each in devices]
    if len(kinds) > 1 or ("cuda" in kinds and len({*indexes}) < len(indexes)):
        raise SettingsError(
            f"is {settings.device.text!r} but must be different GPUs, such as cuda:0,cuda:1, or the CPU several times",
            setting="engine.torch.device",
        )
    for name, is_set in (
        ("batch_invariant", settings.batch_invariant),
        ("adapters.host_bytes", bool(settings.adapters.host_bytes)),
    ):
        if is_set:
            raise SettingsError(
                f"needs a single device, but engine.torch.device is {settings.device.text!r}",
                setting=f"engine.torch.{name}",
            )
    # NCCL and NVIDIA's runtime want the number.
    return [f"cuda:{index}" for index in indexes] if "cuda" in kinds else texts


def _device_of_rank(name: str, settings: TorchSettings, group: RankGroup) -> Device:
    """The device with a part of the model."""
    if name == "cpu":
        return Cpu(settings, group)
    device = torch.device(name)
    found = _with_kernels(device, settings, group)
    if found is None:
        raise SettingsError(
            f"is {settings.device.text!r}, but several GPUs need the kernels, which do not run on {name}; the log has"
            " the reason",
            setting="engine.torch.device",
        )
    return found


def _device(settings: TorchSettings) -> Device:
    if settings.device.text == AUTO:
        return _gpu(settings) or Cpu(settings)
    name = present(settings.device.names[0])
    if name.type == "cpu":
        return Cpu(settings)
    device = _with_kernels(name, settings)
    if device is None and settings.batch_invariant:
        raise SettingsError(
            "is on but the kernels that it needs on a GPU do not run on"
            f" {settings.device.text}, as the log explains; use device cpu",
            setting="engine.torch.batch_invariant",
        )
    return device or Accelerator(name)


def _gpu(settings: TorchSettings) -> Device | None:
    """The current GPU of this machine, if able to run the kernels."""
    if not torch.cuda.is_available():
        return None
    return _with_kernels(torch.device("cuda", torch.cuda.current_device()), settings)


def _with_kernels(
    name: torch.device, settings: TorchSettings, group: RankGroup | None = None
) -> Device | None:
    """A GPU with kernels; None where these do not run, with the reason in the log."""
    if find_spec("triton") is None:
        log.warning("triton is not installed, so %s has no kernels for paged attention", name)
        return None
    # Only here: triton comes with builds of PyTorch for a GPU.
    from trtmesh.engine.backends.torch.cuda.device import Cuda, works
    from trtmesh.engine.backends.torch.cuda.invariant_device import InvariantCuda

    with fitting("a first kernel", f"what else runs on {name}, or take another device"):
        # Triton runs kernels on the current device of the thread.
        torch.cuda.set_device(name)
        if not works(name):
            return None
    return InvariantCuda(name) if settings.batch_invariant else Cuda(name, group)


def _capabilities(settings: TorchSettings, model: Model, *, hands_over: bool) -> Capabilities:
    drafts = ["draft_tokens"] if _may_draft(settings) else []
    drafts += [] if settings.drafts == "off" else [settings.drafts]
    # Otherwise rounding depends on the batch, and decides between nearly tied tokens.
    exact = settings.batch_invariant
    return Capabilities(
        deterministic=exact,
        resumes_exactly=exact,
        stops_single_sequences=True,
        roles=ALL_ROLES if hands_over else (epb.WORKER_ROLE_MIXED,),
        max_adapters=model.adapters.slots if model.adapters else 0,
        draft_methods=tuple(drafts),
    )


def _cache(settings: TorchKvCacheSettings, model: Model, sizes: Sizes, device: Device) -> KvCache:
    return KvCache(
        model.kv_shape,
        blocks=sizes.blocks,
        host_blocks=sizes.host_blocks,
        tokens_per_block=settings.tokens_per_block,
        dtype=model.dtype,
        device=device.name,
        pins_memory=device.pins_memory,
        shares_memory=device.shares_memory,
        copies_blocks=device.copies_blocks,
    )


def _tables(settings: TorchSettings, sizes: Sizes) -> BlockTables:
    blocks_per_sequence = -(-sizes.max_sequence_tokens // settings.kv_cache.tokens_per_block)
    return BlockTables(settings.limits.max_batch_size, blocks_per_sequence)


def _rules(settings: TorchSettings, model: Model) -> SchedulingRules:
    cache, batching = settings.kv_cache, settings.batching
    return SchedulingRules(
        cache.tokens_per_block,
        batching.max_step_tokens,
        chunk_tokens=batching.max_step_tokens if batching.chunked_context else None,
        never_pause=batching.never_pauses,
        static_batch=batching.is_static,
        prefix_reuse=cache.prefix_reuse,
        max_adapters=model.adapters.slots if model.adapters else 0,
        window=model.window,
    )


@dataclass(frozen=True, slots=True)
class Sizes:
    blocks: int
    host_blocks: int
    max_sequence_tokens: int


def size(
    settings: TorchSettings, model: Model, device: Device, draft_model: Model | None = None
) -> Sizes:
    """The memory for KV is that of both models. Raises ModelUnusable where the settings do not fit the model."""
    most, tokens_per_block = settings.limits.max_sequence_tokens, settings.kv_cache.tokens_per_block
    longest = most or model.max_positions
    if longest > model.max_positions:
        raise ModelUnusable(
            f"is {longest} but the model has {model.max_positions} positions",
            setting="engine.torch.limits.max_sequence_tokens",
        )
    token_bytes = model.kv_shape.bytes_per_token(model.dtype)
    drafter_bytes = draft_model.kv_shape.bytes_per_token(draft_model.dtype) if draft_model else 0
    tokens = _tokens(settings, token_bytes + drafter_bytes, longest, model, device)
    blocks = tokens // tokens_per_block
    if not blocks:
        raise ModelUnusable(
            f"a KV cache of {tokens} tokens holds no block of {tokens_per_block}; raise engine.torch.kv_cache.tokens,"
            " engine.torch.kv_cache.bytes or engine.torch.kv_cache.free_memory_fraction, whichever is set"
        )
    if not most:
        longest = min(longest, blocks * tokens_per_block)
    return Sizes(blocks, settings.host_cache.bytes // (token_bytes * tokens_per_block), longest)


def _tokens(
    settings: TorchSettings, bytes_per_token: int, longest: int, model: Model, device: Device
) -> int:
    """Tokens of the pool: the lowest set limit, or the device's default."""
    cache, limits = settings.kv_cache, []
    rows, drafts = settings.limits.max_batch_size, settings.drafts != "off"
    largest = StepSize(_most_step_tokens(settings), rows, drafts)
    if cache.tokens:
        limits.append(cache.tokens)
    if cache.bytes:
        limits.append(cache.bytes // bytes_per_token)
    if cache.free_memory_fraction:
        spare = device.spare_memory(model, largest)
        limits.append(int(cache.free_memory_fraction * spare) // bytes_per_token)
    if limits:
        return min(limits)
    most = settings.limits.max_batch_size * longest
    return min(device.default_cache_bytes(model, largest) // bytes_per_token, most)


def _most_step_tokens(settings: TorchSettings) -> int:
    """Every sequence of a batch gets a token, also beyond `max_step_tokens`."""
    return settings.batching.max_step_tokens + settings.limits.max_batch_size
