"""Every input tensor of the five models and the field of a GenerateItem that it sets.

`protos/trtmesh/v1/README.md` has the same table for readers. The inputs of a request are put in the order of these
lists, so one that needs another (a length its ids) stands behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtmesh.router.doors.triton.templates import put
from trtmesh.router.doors.triton.templates.put import Put
from trtmesh.router.doors.triton.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class InputSpec(TensorSpec):
    """An input and where it goes; without `put` the door acts on it itself, or nothing does (`pad_id`)."""

    put: Put | None = None


ONE = (1,)
ANY = (-1,)
FLOATS = ("FP16", "FP32", "BF16")


def _one(name: str, data_type: str, where: Put | None, *, optional: bool = True) -> InputSpec:
    """One value a row, which the model sees without its last dimension."""
    return InputSpec(name, (data_type,), ONE, optional, scalar=True, put=where)


def _list(
    name: str, data_type: str, dims: tuple[int, ...], where: Put | None, *, optional: bool = True
) -> InputSpec:
    """Values in a row's own shape, which may differ from that of other rows."""
    return InputSpec(name, (data_type,), dims, optional, ragged=True, put=where)


def _matrix(name: str, path: str, *data_types: str, columns: int = -1) -> InputSpec:
    """A dense array of any of the types, passed on as it is."""
    return InputSpec(name, data_types, (-1, columns), ragged=True, put=put.dense(path))


def _sampling(prefix: str, length_penalty: str) -> tuple[InputSpec, ...]:
    return (
        _one("num_return_sequences", "INT32", put.value("sampling.num_return_sequences")),
        _one("beam_width", "INT32", put.value("beam_search.beam_width")),
        _one("end_id", "INT32", put.end_id),
        # Declared and without effect, as in Triton: shorter rows of `output_ids` end in -1, whatever it is.
        _one("pad_id", "INT32", None),
        _one(prefix + "top_k", "INT32", put.value("sampling.top_k")),
        _one(prefix + "top_p", "FP32", put.positive("sampling.top_p")),
        _one("temperature", "FP32", put.value("sampling.temperature")),
        _one("repetition_penalty", "FP32", put.value("sampling.repetition_penalty")),
        _one("presence_penalty", "FP32", put.value("sampling.presence_penalty")),
        _one("frequency_penalty", "FP32", put.value("sampling.frequency_penalty")),
        _one(length_penalty, "FP32", put.value("beam_search.length_penalty")),
        InputSpec("early_stopping", ("INT32", "BOOL"), ONE, scalar=True, put=put.early_stopping),
        _one("min_tokens", "INT32", put.value("stopping.min_tokens")),
        _one("seed", "UINT64", put.value("sampling.seed")),
        _one("return_log_probs", "BOOL", put.value("output.log_probs")),
        _one("return_context_logits", "BOOL", put.value("output.context_logits")),
        _one("return_generation_logits", "BOOL", put.value("output.generation_logits")),
        _one("return_perf_metrics", "BOOL", put.positive("output.perf_metrics")),
        _one("return_num_input_tokens", "BOOL", None),
        _one("return_num_output_tokens", "BOOL", None),
        _one("exclude_input_in_output", "BOOL", put.value("output.exclude_prompt")),
        _one("stop", "BOOL", None),
        _matrix("prompt_embedding_table", "prompt_tuning.embedding_table", *FLOATS),
        _one("prompt_vocab_size", "INT32", put.value("prompt_tuning.vocabulary_size")),
        _one("lora_task_id", "UINT64", put.value("lora.id")),
        _matrix("lora_weights", "lora.weights", "FP16", "BF16"),
        _matrix("lora_config", "lora.config", "INT32", columns=3),
        _list("guided_decoding_guide_type", "BYTES", ONE, put.guide_type),
        _list("guided_decoding_guide", "BYTES", ONE, put.text("guided_decoding.guide")),
    )


TEXT_INPUTS = (
    _list("text_input", "BYTES", ONE, put.prompt_text, optional=False),
    _list("decoder_text_input", "BYTES", ONE, put.text("encoder_decoder.decoder_prompt.text")),
    _one("max_tokens", "INT32", put.max_tokens, optional=False),
    _list("bad_words", "BYTES", ANY, put.texts("stopping.bad_texts")),
    _list("stop_words", "BYTES", ANY, put.stop_texts),
    _one("stream", "BOOL", None),
    _list(
        "embedding_bias_words", "BYTES", ANY, put.weighted_texts("sampling.embedding_bias_texts")
    ),
    _list("embedding_bias_weights", "FP32", ANY, put.values("sampling.embedding_bias_weights")),
    _one("prompt_table_extra_id", "UINT64", put.values("prompt_tuning.extra_ids")),
    *_sampling("", "length_penalty"),
)
"""What `ensemble` takes."""

BLS_INPUTS = (
    *TEXT_INPUTS,
    _list("image_input", "FP16", (-1, 3, -1, -1), put.image_pixels),
    _list("image_bytes_input", "UINT8", (-1, -1, -1, -1), put.image_pixels),
    _list("image_url_input", "BYTES", ONE, put.image_urls),
    _list("video_bytes_input", "UINT8", (-1, -1, -1, -1), put.dense("multimodal.video")),
    _one("num_draft_tokens", "INT32", put.positive("draft.num_draft_tokens")),
    _one("use_draft_logits", "BOOL", put.value("draft.use_draft_logits")),
)
"""What `tensorrt_llm_bls` takes."""

TOKEN_INPUTS = (
    _list("input_ids", "INT32", ANY, put.prompt_ids),
    _one("input_lengths", "INT32", put.prompt_length, optional=False),
    _one("request_output_len", "INT32", put.max_tokens, optional=False),
    _matrix("encoder_input_features", "encoder_decoder.encoder_features", *FLOATS),
    _one("encoder_output_lengths", "INT32", put.value("encoder_decoder.encoder_output_length")),
    _list("decoder_input_ids", "INT32", ANY, put.decoder_ids),
    _one("decoder_input_lengths", "INT32", put.decoder_length),
    _list("draft_input_ids", "INT32", ANY, put.values("draft.token_ids")),
    _matrix("draft_logits", "draft.logits", "FP32", "FP16", "BF16"),
    _one("draft_acceptance_threshold", "FP32", put.value("draft.acceptance_threshold")),
    _list("stop_words_list", "INT32", (2, -1), put.words("stopping.stop_token_ids")),
    _list("bad_words_list", "INT32", (2, -1), put.words("stopping.bad_token_ids")),
    _list("embedding_bias", "FP32", ANY, put.values("sampling.embedding_bias")),
    *_sampling("runtime_", "len_penalty"),
    _one("beam_search_diversity_rate", "FP32", put.value("beam_search.diversity_rate")),
    _one("runtime_top_p_min", "FP32", put.value("sampling.top_p_min")),
    # The name under which Triton's C++ backend reads the same number.
    _one("runtime_top_k_min", "FP32", put.value("sampling.top_p_min")),
    _one("runtime_top_p_decay", "FP32", put.value("sampling.top_p_decay")),
    _one("runtime_top_p_reset_ids", "INT32", put.value("sampling.top_p_reset_id")),
    _one("prompt_ignore_length", "INT32", put.value("sampling.prompt_ignore_length")),
    _one("no_repeat_ngram_size", "INT32", put.value("sampling.no_repeat_ngram_size")),
    _one("return_kv_cache_reuse_stats", "BOOL", put.positive("output.perf_metrics")),
    _one("streaming", "BOOL", None),
    _list("prompt_table_extra_ids", "UINT64", ANY, put.extra_ids),
    _matrix("cross_attention_mask", "encoder_decoder.cross_attention_mask", "BOOL"),
    _list("skip_cross_attn_blocks", "BOOL", ONE, put.value("encoder_decoder.skip_cross_attention")),
    _list("mrope_rotary_cos_sin", "FP32", ANY, put.dense("multimodal.mrope_rotary_cos_sin")),
    _list("mrope_position_deltas", "INT64", ONE, put.value("multimodal.mrope_position_delta")),
    _matrix("multimodal_embedding", "multimodal.embedding", *FLOATS),
    _matrix("multimodal_hashes", "multimodal.hashes", "INT32"),
    _matrix("multimodal_item_runs", "multimodal.item_runs", "INT32"),
    _list("context_phase_params", "UINT8", ANY, put.state),
    _list("retention_token_range_starts", "INT32", ANY, put.range_starts),
    _list("retention_token_range_ends", "INT32", ANY, put.range_field("token_end")),
    _list("retention_token_range_priorities", "INT32", ANY, put.range_field("priority")),
    _list("retention_token_range_durations_ms", "INT32", ANY, put.range_field("duration_ms")),
    _list("retention_decode_priority", "INT32", ONE, put.value("kv_cache.decode_priority")),
    _list("retention_decode_duration_ms", "INT32", ONE, put.duration),
    _list("lookahead_window_size", "INT32", ONE, put.value("lookahead.window_size")),
    _list("lookahead_ngram_size", "INT32", ONE, put.value("lookahead.ngram_size")),
    _list(
        "lookahead_verification_set_size",
        "INT32",
        ONE,
        put.value("lookahead.verification_set_size"),
    ),
)
"""What `tensorrt_llm` takes."""
