"""The fields supported by the worker's settings and release; all others are refused when set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trtmesh.engine.backends.tensorrt_llm.library import Library
from trtmesh.engine.backends.tensorrt_llm.model_files import BuiltEngine
from trtmesh.engine.backends.tensorrt_llm.settings import TensorRtLlmSettings
from trtmesh.v1.generation_fields import supported_by

SUPPORTED = supported_by("tensorrt_llm")
"""All fields supported by some settings and release."""

COMPUTED: Mapping[str, str] = {
    "sampling.seed": "seed",
    "sampling.embedding_bias": "embedding_bias",
    "sampling.embedding_bias_token_ids": "embedding_bias",
    "sampling.embedding_bias_weights": "embedding_bias",
    "sampling.num_return_sequences": "n",
    "sampling.best_of": "best_of",
    "stopping.bad_token_ids": "bad_token_ids",
    "output.perf_metrics": "return_perf_metrics",
}
"""Computed arguments of the library's sampling parameters, by field."""

PLAIN: Mapping[str, str] = {
    **{
        path: path.removeprefix("sampling.")
        for path in sorted(SUPPORTED - COMPUTED.keys())
        if path.startswith("sampling.")
    },
    "sampling.top_p_reset_id": "top_p_reset_ids",
    "stopping.pad_id": "pad_id",
}
"""Arguments with the field's value, unchanged."""

BEAMS: Mapping[str, str] = {
    "beam_search.beam_width": "use_beam_search",
    "beam_search.length_penalty": "length_penalty",
    "beam_search.diversity_rate": "beam_search_diversity_rate",
    "beam_search.early_stopping": "early_stopping",
}

LOG_PROBS: Mapping[str, str] = {
    "output.log_probs": "logprobs",
    "output.top_log_probs": "logprobs",
}
CONTEXT_LOGITS: Mapping[str, str] = {
    # Log-probabilities of the prompt are computed from its logits.
    "output.prompt_log_probs": "return_context_logits",
    "output.context_logits": "return_context_logits",
    "output.logits_data_type": "return_context_logits",
}
GENERATION_LOGITS: Mapping[str, str] = {
    "output.generation_logits": "return_generation_logits",
    "output.logits_data_type": "return_generation_logits",
}
GUIDES: Mapping[str, str] = {
    "guided_decoding.guide_type": "guided_decoding",
    "guided_decoding.guide": "guided_decoding",
}

REQUEST: Mapping[str, str] = {"kv_cache.reuse": "cache_salt", "kv_cache.salt": "cache_salt"}
"""Arguments of a call by field."""
RETENTION: Mapping[str, str] = dict.fromkeys(
    ("kv_cache.token_ranges", "kv_cache.decode_priority", "kv_cache.decode_duration_ms"),
    "kv_cache_retention_config",
)
ADAPTERS: Mapping[str, str] = dict.fromkeys(
    ("lora.id", "lora.name", "lora.version"), "lora_request"
)
PRIORITY: Mapping[str, str] = {"priority": "priority"}

ENDS = frozenset(path for path in SUPPORTED if path.startswith("stopping.")).difference(
    COMPUTED, PLAIN
)
"""Fields applied by the worker to the library's results."""


def supported_fields(
    settings: TensorRtLlmSettings, engine: BuiltEngine | None, library: Library
) -> frozenset[str]:
    """Fields with an argument in the release, and allowed by the settings."""
    sampled = {
        field: name for table in _sampling(settings, engine) for field, name in table.items()
    }
    called = {field: name for table in _calls(settings, library) for field, name in table.items()}
    return ENDS | {
        *(field for field, name in sampled.items() if name in library.sampling_arguments),
        *(field for field, name in called.items() if name in library.request_arguments),
    }


def _sampling(
    settings: TensorRtLlmSettings, engine: BuiltEngine | None
) -> Iterator[Mapping[str, str]]:
    yield COMPUTED
    yield PLAIN
    if settings.limits.max_beam_width > 1:
        yield BEAMS
    if engine is None or engine.has_generation_logits:
        yield LOG_PROBS
    if engine is None or engine.has_context_logits:
        yield CONTEXT_LOGITS
    if settings.option("gather_generation_logits"):
        yield GENERATION_LOGITS
    if settings.option("guided_decoding_backend"):
        yield GUIDES


def _calls(settings: TensorRtLlmSettings, library: Library) -> Iterator[Mapping[str, str]]:
    yield REQUEST
    if library.has("KvCacheRetentionConfig"):
        yield RETENTION
    if settings.adapters.disk_bytes:
        yield ADAPTERS
    # First come, first served has no use for it.
    order = settings.option("scheduler_config", "waiting_queue_policy")
    if order and order.upper() != "FCFS":
        yield PRIORITY
