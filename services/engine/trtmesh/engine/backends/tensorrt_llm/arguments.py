"""Translates settings into arguments of the library's constructor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trtmesh.chassis.errors import SettingsError
from trtmesh.engine.backends.tensorrt_llm.library import (
    CONSTRUCTOR,
    NESTED,
    SECTION,
    Given,
    Library,
)
from trtmesh.engine.backends.tensorrt_llm.settings import TensorRtLlmSettings

TARGET_MODULES = "lora_target_modules"
OWN = frozenset({"model", "skip_tokenizer_init", "tokenizer"})
"""Arguments that no option may change."""

EVENT_BUFFER = 65536
"""Changes of blocks that may wait in the library to be read."""

HOST_ADAPTERS = 64
"""Adapters in the library's host memory."""

DEFAULTS = frozenset(
    {
        (CONSTRUCTOR, "stream_interval"),
        ("KvCacheConfig", "event_buffer_max_size"),
        ("LoraConfig", "max_cpu_loras"),
        ("NGramDecodingConfig", "max_matching_ngram_size"),
        ("CacheTransceiverConfig", "max_tokens_in_buffer"),
    }
)
"""Arguments that no setting gives but this module; an option may give another value."""


def arguments(
    settings: TensorRtLlmSettings, max_sequence_tokens: int, library: Library
) -> list[Given]:
    """Every argument with the setting it comes from. Raises SettingsError for an option that a setting covers."""
    given = [
        *_model(settings),
        *_parallel(settings),
        *_kv_cache(settings),
        *_batching(settings),
        *_adapters(settings, library),
    ]
    if settings.flow == "pytorch":
        given += [*_pytorch(settings, max_sequence_tokens), *_speculation(settings, library)]
    else:
        given.append(Given(CONSTRUCTOR, "iter_stats_max_iterations", 1000, "flow"))
    if settings.hands_over:
        given += _transceiver(settings, max_sequence_tokens)
    options = list(_options(settings, given))
    chosen = {(each.of, each.name) for each in options}
    return [each for each in given if (each.of, each.name) not in chosen] + options


def _model(settings: TensorRtLlmSettings) -> Iterator[Given]:
    yield Given(CONSTRUCTOR, "dtype", settings.dtype, "dtype")
    yield Given(CONSTRUCTOR, "trust_remote_code", settings.trust_remote_code, "trust_remote_code")
    yield Given(CONSTRUCTOR, "return_perf_metrics", True, "flow")  # noqa: FBT003 - a row
    if settings.guided_decoding != "none":
        backend = settings.guided_decoding
        yield Given(CONSTRUCTOR, "guided_decoding_backend", backend, "guided_decoding")
    if settings.generation_logits:
        yield Given(CONSTRUCTOR, "gather_generation_logits", True, "generation_logits")  # noqa: FBT003 - a row


def _parallel(settings: TensorRtLlmSettings) -> Iterator[Given]:
    sizes = settings.parallel
    yield Given(CONSTRUCTOR, "tensor_parallel_size", sizes.tensor, "parallel.tensor")
    yield Given(CONSTRUCTOR, "pipeline_parallel_size", sizes.pipeline, "parallel.pipeline")


def _kv_cache(settings: TensorRtLlmSettings) -> Iterator[Given]:
    cache = settings.kv_cache
    rows: list[tuple[str, object, str]] = [
        ("enable_block_reuse", cache.prefix_reuse, "prefix_reuse"),
        ("enable_partial_reuse", cache.partial_reuse, "partial_reuse"),
        ("free_gpu_memory_fraction", cache.free_memory_fraction, "free_memory_fraction"),
    ]
    if settings.flow == "pytorch":
        # A built engine has both in it.
        rows.append(("tokens_per_block", cache.tokens_per_block, "tokens_per_block"))
        rows.append(("dtype", cache.dtype, "dtype"))
    if cache.tokens:
        rows.append(("max_tokens", cache.tokens, "tokens"))
    if cache.bytes:
        rows.append(("max_gpu_total_bytes", cache.bytes, "bytes"))
    if settings.reports_blocks:
        rows.append(("event_buffer_max_size", EVENT_BUFFER, "events"))
    if cache.host_bytes:
        rows.append(("host_cache_size", cache.host_bytes, "host_bytes"))
    for name, value, setting in rows:
        yield Given("KvCacheConfig", name, value, f"kv_cache.{setting}")


def _batching(settings: TensorRtLlmSettings) -> Iterator[Given]:
    batching, limits = settings.batching, settings.limits
    policy = batching.policy.upper()
    yield Given("SchedulerConfig", "capacity_scheduler_policy", policy, "batching.policy")
    if batching.waiting_queue_policy.upper() != "FCFS":
        order, name = batching.waiting_queue_policy, "waiting_queue_policy"
        yield Given("SchedulerConfig", name, order, "batching.waiting_queue_policy")
    rows = (
        ("max_batch_size", limits.max_batch_size, "limits.max_batch_size"),
        ("max_num_tokens", batching.max_step_tokens, "batching.max_step_tokens"),
        ("enable_chunked_prefill", batching.chunked_context, "batching.chunked_context"),
    )
    for name, value, setting in rows:
        yield Given(CONSTRUCTOR, name, value, setting)


def _pytorch(settings: TensorRtLlmSettings, max_sequence_tokens: int) -> Iterator[Given]:
    batching, limits = settings.batching, settings.limits
    rows = (
        ("max_seq_len", max_sequence_tokens, "limits.max_sequence_tokens"),
        ("max_beam_width", limits.max_beam_width, "limits.max_beam_width"),
        ("disable_overlap_scheduler", not batching.overlap, "batching.overlap"),
        ("stream_interval", 1, "flow"),
        ("enable_iter_perf_stats", True, "flow"),
    )
    for name, value, setting in rows:
        yield Given(CONSTRUCTOR, name, value, setting)


def target_modules(settings: TensorRtLlmSettings, library: Library) -> tuple[str, ...] | None:
    """The layers that adapters may update; None where the release decides."""
    adapters = settings.adapters
    is_told = "target_modules" in adapters.model_fields_set
    return (
        adapters.target_modules if is_told or library.offers("LoraConfig", TARGET_MODULES) else None
    )


def _adapters(settings: TensorRtLlmSettings, library: Library) -> Iterator[Given]:
    adapters = settings.adapters
    if not adapters.disk_bytes:
        return
    rows: list[tuple[str, object, str]] = [
        ("max_lora_rank", adapters.max_rank, "max_rank"),
        ("max_loras", adapters.max_batch_adapters, "max_batch_adapters"),
        ("max_cpu_loras", max(adapters.max_batch_adapters, HOST_ADAPTERS), "disk_bytes"),
    ]
    if (modules := target_modules(settings, library)) is not None:
        rows.append((TARGET_MODULES, list(modules), "target_modules"))
    yield Given(CONSTRUCTOR, "enable_lora", True, "adapters.disk_bytes")  # noqa: FBT003 - a row
    for name, value, setting in rows:
        yield Given("LoraConfig", name, value, f"adapters.{setting}")


def _speculation(settings: TensorRtLlmSettings, library: Library) -> Iterator[Given]:
    speculation = settings.speculation
    most = speculation.max_draft_tokens
    # EAGLE 3 has a class of its own in newer releases.
    eagle = next(
        name for name in ("Eagle3DecodingConfig", "EagleDecodingConfig") if library.has(name)
    )
    kinds = {
        "ngram": "NGramDecodingConfig",
        "mtp": "MTPDecodingConfig",
        "eagle3": eagle,
        "draft_target": "DraftTargetDecodingConfig",
    }
    kind = kinds.get(speculation.method)
    if kind is None:
        return
    # Layers of the model itself are counted, and give a token each.
    length = "num_nextn_predict_layers" if speculation.method == "mtp" else "max_draft_len"
    yield Given(kind, length, most, "speculation.max_draft_tokens")
    if speculation.method == "ngram":
        yield Given(kind, "max_matching_ngram_size", 2, "speculation.method")
    if speculation.model_dir is not None:
        head = str(speculation.model_dir)
        yield Given(kind, "speculative_model", head, "speculation.model_dir")


def _transceiver(settings: TensorRtLlmSettings, max_sequence_tokens: int) -> Iterator[Given]:
    transceiver, kind = settings.transceiver, "CacheTransceiverConfig"
    milliseconds = int(transceiver.timeout_seconds * 1000)
    yield Given(kind, "backend", transceiver.backend, "transceiver.backend")
    yield Given(kind, "max_tokens_in_buffer", max_sequence_tokens, "transceiver.backend")
    # Without one, 1.2 keeps the KV that nobody fetches for ever.
    yield Given(kind, "kv_transfer_timeout_ms", milliseconds, "transceiver.timeout_seconds")


def _options(settings: TensorRtLlmSettings, given: Sequence[Given]) -> Iterator[Given]:
    covered = {(each.of, each.name) for each in given} - DEFAULTS
    homes = {NESTED[each.of]: each.of for each in given if each.of in NESTED}
    for name, value in settings.options.items():
        home = homes.get(name)
        if home is not None and isinstance(value, Mapping):
            inner = [(home, key, content, f"{name}.{key}") for key, content in value.items()]
        else:
            inner = [(CONSTRUCTOR, name, value, name)]
        for of, argument, content, path in inner:
            is_ours = of == CONSTRUCTOR and argument in {*OWN, *NESTED.values()}
            if is_ours or (of, argument) in covered:
                raise SettingsError(
                    f"has {path}, which other settings give; use those",
                    setting=f"{SECTION}.options",
                )
            yield Given(of, argument, content, f"options.{path}")


def model_of(settings: TensorRtLlmSettings, model_dir: Path) -> Path:
    """The directory that the library loads."""
    return settings.engine_dir or model_dir
