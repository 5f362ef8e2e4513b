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

ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_dense")
"""Layers that adapters may update unless an option names others; each takes memory."""

EVENT_BUFFER = 65536
"""Changes of blocks that may wait in the library to be read."""

HOST_ADAPTERS = 64
"""Adapters in the library's host memory."""

DEFAULTS = frozenset(
    {
        (CONSTRUCTOR, "stream_interval"),
        ("KvCacheConfig", "event_buffer_max_size"),
        ("LoraConfig", "max_cpu_loras"),
        ("LoraConfig", TARGET_MODULES),
        ("NGramDecodingConfig", "max_matching_ngram_size"),
        ("CacheTransceiverConfig", "max_tokens_in_buffer"),
        ("CacheTransceiverConfig", "kv_transfer_timeout_ms"),
    }
)
"""Arguments that no setting gives but this module; an option may give another value."""

DRAFTS = {
    "NGram": "NGramDecodingConfig",
    "MTP": "MTPDecodingConfig",
    "Eagle": "Eagle3DecodingConfig",
    "Eagle3": "Eagle3DecodingConfig",
    "DraftTarget": "DraftTargetDecodingConfig",
    "Draft_Target": "DraftTargetDecodingConfig",
}
"""Configurations of speculation by the `decoding_type` that the library's files have for them."""


def arguments(
    settings: TensorRtLlmSettings, max_sequence_tokens: int, library: Library
) -> list[Given]:
    """Every argument with the setting it comes from. Raises SettingsError for an option that a setting covers."""
    given = [
        Given(CONSTRUCTOR, "return_perf_metrics", True, "engine_dir"),  # noqa: FBT003 - a row
        *_parallel(settings),
        *_kv_cache(settings),
        *_batching(settings),
        *_adapters(settings, library),
    ]
    if settings.flow == "pytorch":
        given += _pytorch(settings, max_sequence_tokens)
    else:
        given.append(Given(CONSTRUCTOR, "iter_stats_max_iterations", 1000, "engine_dir"))
    if settings.hands_over:
        given += _transceiver(settings, max_sequence_tokens)
    if settings.drafts == "NGram":
        given.append(Given("NGramDecodingConfig", "max_matching_ngram_size", 2, "options"))
    options = list(_options(settings, library, given))
    chosen = {(each.of, each.name) for each in options}
    return [each for each in given if (each.of, each.name) not in chosen] + options


def _parallel(settings: TensorRtLlmSettings) -> Iterator[Given]:
    sizes = settings.parallel
    yield Given(CONSTRUCTOR, "tensor_parallel_size", sizes.tensor, "parallel.tensor")
    yield Given(CONSTRUCTOR, "pipeline_parallel_size", sizes.pipeline, "parallel.pipeline")


def _kv_cache(settings: TensorRtLlmSettings) -> Iterator[Given]:
    cache = settings.kv_cache
    rows: list[tuple[str, object, str]] = [
        ("enable_block_reuse", cache.prefix_reuse, "prefix_reuse"),
    ]
    if cache.tokens:
        rows.append(("max_tokens", cache.tokens, "tokens"))
    if cache.bytes:
        rows.append(("max_gpu_total_bytes", cache.bytes, "bytes"))
    if settings.reports_blocks:
        rows.append(("event_buffer_max_size", EVENT_BUFFER, "prefix_reuse"))
    for name, value, setting in rows:
        yield Given("KvCacheConfig", name, value, f"kv_cache.{setting}")


def _batching(settings: TensorRtLlmSettings) -> Iterator[Given]:
    batching, limits = settings.batching, settings.limits
    rows = (
        ("max_batch_size", limits.max_batch_size, "limits.max_batch_size"),
        ("max_num_tokens", batching.max_step_tokens, "batching.max_step_tokens"),
        ("enable_chunked_prefill", batching.chunked_context, "batching.chunked_context"),
    )
    for name, value, setting in rows:
        yield Given(CONSTRUCTOR, name, value, setting)


def _pytorch(settings: TensorRtLlmSettings, max_sequence_tokens: int) -> Iterator[Given]:
    rows = (
        ("max_seq_len", max_sequence_tokens, "limits.max_sequence_tokens"),
        ("max_beam_width", settings.limits.max_beam_width, "limits.max_beam_width"),
        ("stream_interval", 1, "engine_dir"),
        ("enable_iter_perf_stats", True, "engine_dir"),
    )
    for name, value, setting in rows:
        yield Given(CONSTRUCTOR, name, value, setting)


def target_modules(settings: TensorRtLlmSettings, library: Library) -> tuple[str, ...] | None:
    """The layers that adapters may update; None where the release decides."""
    told = settings.option("lora_config", TARGET_MODULES)
    if told is None and library.offers("LoraConfig", TARGET_MODULES):
        return ATTENTION
    return None if told is None else tuple(told)


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


def _transceiver(settings: TensorRtLlmSettings, max_sequence_tokens: int) -> Iterator[Given]:
    kind = "CacheTransceiverConfig"
    yield Given(kind, "max_tokens_in_buffer", max_sequence_tokens, "options")
    yield Given(kind, "kv_transfer_timeout_ms", settings.transfer_milliseconds, "options")


def _options(
    settings: TensorRtLlmSettings, library: Library, given: Sequence[Given]
) -> Iterator[Given]:
    covered = {(each.of, each.name) for each in given} - DEFAULTS
    homes: dict[str, str | None] = {
        name: of for of, name in NESTED.items() if not of.endswith("DecodingConfig")
    }
    homes["speculative_config"] = _drafts(settings, library)
    for name, value in settings.options.items():
        home = homes.get(name)
        if home is not None and isinstance(value, Mapping):
            inner = [
                (home, key, content, f"{name}.{key}")
                for key, content in value.items()
                if key != "decoding_type"
            ]
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


def _drafts(settings: TensorRtLlmSettings, library: Library) -> str | None:
    """The class of the configuration of speculation, or None without one."""
    if settings.option("speculative_config") is None:
        return None
    kind = DRAFTS.get(settings.drafts)
    if kind is None:
        raise SettingsError(
            f"has speculative_config without a decoding_type of {', '.join(DRAFTS)}",
            setting=f"{SECTION}.options",
        )
    # EAGLE 3 has a class of its own in newer releases.
    return "EagleDecodingConfig" if kind.startswith("Eagle") and not library.has(kind) else kind


def model_of(settings: TensorRtLlmSettings, model_dir: Path) -> Path:
    """The directory that the library loads."""
    return settings.engine_dir or model_dir
