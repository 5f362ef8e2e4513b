"""The fields that the torch backend acts on; the caller refuses every other one that is set."""

SUPPORTED_FIELDS = frozenset(
    {
        "stopping.max_tokens",
        "stopping.min_tokens",
        "stopping.end_id",
        "stopping.ignore_end_id",
        "stopping.stop_token_ids",
        "sampling.temperature",
        "sampling.top_k",
        "sampling.top_p",
        "sampling.min_p",
        "sampling.seed",
        "sampling.num_return_sequences",
        "sampling.repetition_penalty",
        "sampling.presence_penalty",
        "sampling.frequency_penalty",
        "sampling.prompt_ignore_length",
        "output.log_probs",
        "output.top_log_probs",
        "output.perf_metrics",
        "kv_cache.reuse",
        "kv_cache.salt",
        "priority",
    }
)
