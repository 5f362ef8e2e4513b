"""The fields that the torch backend supports; all others are refused when set."""

from __future__ import annotations

from trtmesh.engine import stopping

SUPPORTED_FIELDS = stopping.FIELDS | frozenset(
    {
        "stopping.bad_token_ids",
        "sampling.temperature",
        "sampling.top_k",
        "sampling.top_p",
        "sampling.min_p",
        "sampling.top_p_min",
        "sampling.top_p_decay",
        "sampling.top_p_reset_id",
        "sampling.seed",
        "sampling.num_return_sequences",
        "sampling.repetition_penalty",
        "sampling.presence_penalty",
        "sampling.frequency_penalty",
        "sampling.prompt_ignore_length",
        "sampling.no_repeat_ngram_size",
        "sampling.embedding_bias",
        "sampling.embedding_bias_token_ids",
        "sampling.embedding_bias_weights",
        "beam_search.beam_width",
        "beam_search.diversity_rate",
        "beam_search.early_stopping",
        "beam_search.length_penalty",
        "prompt_tuning.embedding_table",
        "prompt_tuning.extra_ids",
        "prompt_tuning.vocabulary_size",
        "output.log_probs",
        "output.top_log_probs",
        "output.normalize_log_probs",
        "output.prompt_log_probs",
        "output.context_logits",
        "output.generation_logits",
        "output.logits_data_type",
        "output.perf_metrics",
        "kv_cache.reuse",
        "kv_cache.salt",
        "kv_cache.token_ranges",
        "kv_cache.decode_priority",
        "kv_cache.decode_duration_ms",
        "priority",
    }
)

TOP_K = frozenset({"sampling.top_k"})
TOP_P = frozenset(
    {"sampling.top_p", "sampling.top_p_min", "sampling.top_p_decay", "sampling.top_p_reset_id"}
)
DRAWS = TOP_K | TOP_P | {"sampling.temperature", "sampling.min_p"}
BEAMS = frozenset(field for field in SUPPORTED_FIELDS if field.startswith("beam_search."))
PROMPT_TABLES = frozenset(field for field in SUPPORTED_FIELDS if field.startswith("prompt_tuning."))

# Fields without effect in a decoding mode. Not the seed, which is always sent.
_REFUSED = {
    "auto": frozenset[str](),
    "top_k": BEAMS | TOP_P,
    "top_p": BEAMS | TOP_K,
    "top_k_top_p": BEAMS,
    "beam_search": DRAWS,
}


ADAPTERS = frozenset({"lora.id", "lora.name", "lora.version"})


def supported_fields(
    decoding_mode: str, *, adapters: bool, prompt_tables: bool = True
) -> frozenset[str]:
    """The fields supported in a mode of Triton's parameter `decoding_mode`, with or without adapters and tables."""
    fields = SUPPORTED_FIELDS - _REFUSED[decoding_mode]
    if not prompt_tables:
        fields -= PROMPT_TABLES
    return fields | ADAPTERS if adapters else fields
