"""The only table of the Triton models' tensors: declarations, the setter of each input, the source of each output.

`protos/triton_tensors.py` renders it into the contract's page. Setters run in this order, so a length follows its ids.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtmesh.router.doors.triton.templates import put
from trtmesh.router.doors.triton.templates.put import Put
from trtmesh.router.doors.triton.tensors import Shape, TensorSpec


@dataclass(frozen=True, slots=True)
class InputSpec(TensorSpec):
    """An input; without `put`, read by the template itself or ignored (`pad_id`)."""

    optional: bool = True
    scalar: bool = False
    """Whether the model sees [batch] where the client sends [batch, 1]."""
    ragged: bool = False
    put: Put | None = None


ONE = (1,)
ANY = (-1,)
PICTURES = (-1, -1, -1, -1)
FLOATS = "FP16 FP32 BF16"
PERF_NOTE = "`SequenceStarted` has what is known with the first token, `ItemFinished` the whole"
EARLY_STOPPING_NOTE = "BOOL or INT32; 0, 1 and 2 are the values 1, 2 and 3"
COUNTED_NOTE = "always counted; the tensor asks for the output"
UNSET_NOTE = "-1 is unset"
WORDS_NOTE = "a row of ids, a row of offsets"
REPEATED_NOTE = "applies to every prompt token"
TABLE_NOTE = "ids from the vocabulary size on address prompt embedding rows"
BACKEND_NOTE = "the name by which Triton's C++ backend reads it"
PATH_NOTE = (
    "refused: a request must not name a path of the server; register the adapter with `AddAdapter`"
)
VISION_NOTE = "refused: needs a vision encoder"
GENERATED = "`SequenceFinished.generated_tokens`"
STOP_SOURCE = "`StopRequest.request_id`"
STREAM_SOURCE = "`GenerationConfig.output.stream`"


def _one(
    name: str,
    data_types: str,
    where: Put | None = None,
    source: str = "",
    note: str = "",
    *,
    optional: bool = True,
) -> InputSpec:
    """A value for each row; `data_types` are separated by blanks."""
    return InputSpec(
        name, tuple(data_types.split()), ONE, source, note, optional, scalar=True, put=where
    )


def _list(
    name: str,
    data_types: str,
    dims: Shape,
    where: Put | None,
    note: str = "",
    *,
    optional: bool = True,
) -> InputSpec:
    """Values in the row's own shape, which may differ from row to row."""
    return InputSpec(
        name, tuple(data_types.split()), dims, "", note, optional, ragged=True, put=where
    )


def _matrix(name: str, path: str, data_types: str, columns: int = -1) -> InputSpec:
    """A dense array that passes through unread."""
    return _list(name, data_types, (-1, columns), put.dense(path))


def _sampling(prefix: str, length_penalty: str) -> tuple[InputSpec, ...]:
    return (
        _one("num_return_sequences", "INT32", put.value("sampling.num_return_sequences")),
        _one("beam_width", "INT32", put.value("beam_search.beam_width")),
        _one("end_id", "INT32", put.end_id, note="-1 and, for token ids, unset: `ignore_end_id`"),
        _one("pad_id", "INT32", None, "without effect: short rows end in -1", "as in Triton"),
        _one(prefix + "top_k", "INT32", put.value("sampling.top_k")),
        _one(prefix + "top_p", "FP32", put.positive("sampling.top_p"), note="unset unless above 0"),
        _one("temperature", "FP32", put.value("sampling.temperature")),
        _one("repetition_penalty", "FP32", put.value("sampling.repetition_penalty")),
        _one("presence_penalty", "FP32", put.value("sampling.presence_penalty")),
        _one("frequency_penalty", "FP32", put.value("sampling.frequency_penalty")),
        _one(length_penalty, "FP32", put.value("beam_search.length_penalty")),
        _one("early_stopping", "INT32 BOOL", put.early_stopping, note=EARLY_STOPPING_NOTE),
        _one("min_tokens", "INT32", put.value("stopping.min_tokens")),
        _one("seed", "UINT64", put.value("sampling.seed")),
        _one("return_log_probs", "BOOL", put.value("output.log_probs")),
        _one("return_context_logits", "BOOL", put.value("output.context_logits")),
        _one("return_generation_logits", "BOOL", put.value("output.generation_logits")),
        _one("return_perf_metrics", "BOOL", put.positive("output.perf_metrics"), note=PERF_NOTE),
        _one("return_num_input_tokens", "BOOL", None, "`Usage.prompt_tokens`", COUNTED_NOTE),
        _one("return_num_output_tokens", "BOOL", None, GENERATED, COUNTED_NOTE),
        _one("exclude_input_in_output", "BOOL", put.value("output.exclude_prompt")),
        _one("stop", "BOOL", None, STOP_SOURCE, "the call's own id names the request"),
        _matrix("prompt_embedding_table", "prompt_tuning.embedding_table", FLOATS),
        _one("prompt_vocab_size", "INT32", put.value("prompt_tuning.vocabulary_size")),
        _one("lora_task_id", "UINT64", put.value("lora.id")),
        _matrix("lora_weights", "lora.weights", "FP16 BF16"),
        _matrix("lora_config", "lora.config", "INT32", columns=3),
        _list("guided_decoding_guide_type", "BYTES", ONE, put.guide_type),
        _list("guided_decoding_guide", "BYTES", ONE, put.text("guided_decoding.guide")),
    )


TEXT_INPUTS = (
    _list(
        "text_input", "BYTES", ONE, put.text("prompt.text"), "each row is an item", optional=False
    ),
    _list("decoder_text_input", "BYTES", ONE, put.text("encoder_decoder.decoder_prompt.text")),
    _one("max_tokens", "INT32", put.max_tokens, optional=False),
    _list("bad_words", "BYTES", ANY, put.texts("stopping.bad_texts"), "empty words are dropped"),
    _list("stop_words", "BYTES", ANY, put.stop_texts, "empty words are dropped"),
    _one("stream", "BOOL", None, STREAM_SOURCE),
    _list(
        "embedding_bias_words", "BYTES", ANY, put.weighted_texts("sampling.embedding_bias_texts")
    ),
    _list("embedding_bias_weights", "FP32", ANY, put.values("sampling.embedding_bias_weights")),
    _one(
        "prompt_table_extra_id", "UINT64", put.values("prompt_tuning.extra_ids"), note=REPEATED_NOTE
    ),
    *_sampling("", "length_penalty"),
)

BLS_INPUTS = (
    *TEXT_INPUTS,
    _list("image_input", "FP16", (-1, 3, -1, -1), put.image_pixels),
    _list("image_bytes_input", "UINT8", PICTURES, put.image_pixels),
    _list("image_url_input", "BYTES", ONE, put.image_urls),
    _list("video_bytes_input", "UINT8", PICTURES, put.dense("multimodal.video")),
    _one("num_draft_tokens", "INT32", put.positive("draft.num_draft_tokens")),
    _one("use_draft_logits", "BOOL", put.value("draft.use_draft_logits")),
)

TOKEN_INPUTS = (
    _list("input_ids", "INT32", ANY, put.ids("prompt.token_ids"), TABLE_NOTE),
    _one("input_lengths", "INT32", put.prompt_length, note="trims the row", optional=False),
    _one("request_output_len", "INT32", put.max_tokens, optional=False),
    _matrix("encoder_input_features", "encoder_decoder.encoder_features", FLOATS),
    _one("encoder_output_lengths", "INT32", put.value("encoder_decoder.encoder_output_length")),
    _list("decoder_input_ids", "INT32", ANY, put.ids("encoder_decoder.decoder_prompt.token_ids")),
    _one("decoder_input_lengths", "INT32", put.decoder_length, note="trims the row"),
    _list("draft_input_ids", "INT32", ANY, put.values("draft.token_ids")),
    _matrix("draft_logits", "draft.logits", "FP32 FP16 BF16"),
    _one("draft_acceptance_threshold", "FP32", put.value("draft.acceptance_threshold")),
    _list("stop_words_list", "INT32", (2, -1), put.words("stopping.stop_token_ids"), WORDS_NOTE),
    _list("bad_words_list", "INT32", (2, -1), put.words("stopping.bad_token_ids"), WORDS_NOTE),
    _list("embedding_bias", "FP32", ANY, put.values("sampling.embedding_bias")),
    *_sampling("runtime_", "len_penalty"),
    _one("beam_search_diversity_rate", "FP32", put.value("beam_search.diversity_rate")),
    _one("runtime_top_p_min", "FP32", put.value("sampling.top_p_min")),
    _one("runtime_top_k_min", "FP32", put.value("sampling.top_p_min"), note=BACKEND_NOTE),
    _one("runtime_top_p_decay", "FP32", put.value("sampling.top_p_decay")),
    _one("runtime_top_p_reset_ids", "INT32", put.value("sampling.top_p_reset_id")),
    _one("prompt_ignore_length", "INT32", put.value("sampling.prompt_ignore_length")),
    _one("no_repeat_ngram_size", "INT32", put.value("sampling.no_repeat_ngram_size")),
    _one("return_kv_cache_reuse_stats", "BOOL", put.positive("output.perf_metrics")),
    _one("streaming", "BOOL", None, STREAM_SOURCE),
    _list("prompt_table_extra_ids", "UINT64", ANY, put.extra_ids),
    _matrix("cross_attention_mask", "encoder_decoder.cross_attention_mask", "BOOL"),
    _list("skip_cross_attn_blocks", "BOOL", ONE, put.value("encoder_decoder.skip_cross_attention")),
    _list("mrope_rotary_cos_sin", "FP32", ANY, put.dense("multimodal.mrope_rotary_cos_sin")),
    _list("mrope_position_deltas", "INT64", ONE, put.value("multimodal.mrope_position_delta")),
    _matrix("multimodal_embedding", "multimodal.embedding", FLOATS),
    _matrix("multimodal_hashes", "multimodal.hashes", "INT32"),
    _matrix("multimodal_item_runs", "multimodal.item_runs", "INT32"),
    _list("context_phase_params", "UINT8", ANY, put.state),
    _list("retention_token_range_starts", "INT32", ANY, put.range_starts),
    _list("retention_token_range_ends", "INT32", ANY, put.range_field("token_end"), UNSET_NOTE),
    _list("retention_token_range_priorities", "INT32", ANY, put.range_field("priority")),
    _list(
        "retention_token_range_durations_ms",
        "INT32",
        ANY,
        put.range_field("duration_ms"),
        UNSET_NOTE,
    ),
    _list("retention_decode_priority", "INT32", ONE, put.value("kv_cache.decode_priority")),
    _list("retention_decode_duration_ms", "INT32", ONE, put.duration, UNSET_NOTE),
    _list("lookahead_window_size", "INT32", ONE, put.value("lookahead.window_size")),
    _list("lookahead_ngram_size", "INT32", ONE, put.value("lookahead.ngram_size")),
    _list(
        "lookahead_verification_set_size",
        "INT32",
        ONE,
        put.value("lookahead.verification_set_size"),
    ),
)

_NOT_DISAGGREGATED = (
    *("encoder_", "cross_attention_mask", "skip_cross_attn_blocks", "mrope_", "multimodal_"),
    *("context_phase_params", "retention_", "lookahead_"),
)
DISAGGREGATED_INPUTS = tuple(
    spec for spec in TOKEN_INPUTS if not spec.name.startswith(_NOT_DISAGGREGATED)
)


def _in(
    name: str,
    data_types: str,
    source: str = "",
    note: str = "",
    dims: Shape = ONE,
    where: Put | None = None,
    *,
    optional: bool = True,
) -> InputSpec:
    """An input without a reshape or ragged rows."""
    return InputSpec(name, tuple(data_types.split()), dims, source, note, optional, put=where)


LLMAPI_INPUTS = (
    _in("text_input", "BYTES", dims=ANY, where=put.only_prompt_text, optional=False),
    _in("image_url", "BYTES", dims=ANY, where=put.image_urls),
    _in("streaming", "BOOL", STREAM_SOURCE),
    _in("sampling_param_best_of", "INT32", where=put.best_of, note="1 is the default"),
    _in("sampling_param_temperature", "FP32", where=put.value("sampling.temperature")),
    _in("sampling_param_top_k", "INT32", where=put.value("sampling.top_k")),
    _in("sampling_param_top_p", "FP32", where=put.value("sampling.top_p")),
    _in("sampling_param_frequency_penalty", "FP32", where=put.value("sampling.frequency_penalty")),
    _in("sampling_param_presence_penalty", "FP32", where=put.value("sampling.presence_penalty")),
    _in("sampling_param_max_tokens", "INT32", where=put.max_tokens),
    _in("sampling_param_stop", "BYTES", dims=ANY, where=put.texts("stopping.stop_texts")),
    _in("sampling_param_seed", "UINT64", where=put.value("sampling.seed")),
    _in(
        "sampling_param_exclude_input_from_output", "BOOL", where=put.value("output.exclude_prompt")
    ),
    _in(
        "sampling_param_return_perf_metrics",
        "BOOL",
        where=put.value("output.perf_metrics"),
        note=PERF_NOTE,
    ),
    _in("sampling_param_logits_post_processor_name", "BYTES", where=put.logits_post_processor),
    _in("return_finish_reason", "BOOL", "`SequenceFinished.reason`", COUNTED_NOTE),
    _in("return_stop_reason", "BOOL", "`SequenceFinished.stop_text`", COUNTED_NOTE),
    _in("return_cumulative_logprob", "BOOL", where=put.value("output.log_probs")),
    _in("stop", "BOOL", STOP_SOURCE, "the call's own id names the request"),
    _in("lora_id", "UINT64", where=put.value("lora.id")),
    _in("lora_name", "BYTES", where=put.text("lora.name")),
    _in("lora_path", "BYTES", PATH_NOTE, where=put.adapter_path),
    _in("lora_ckpt_source", "BYTES", "refused: belongs to `lora_path`", where=put.adapter_path),
)


VISION_INPUTS = (
    _in("IMAGE_BYTES", "UINT8", VISION_NOTE, dims=PICTURES),
    _in("IMAGE_URL", "BYTES", VISION_NOTE),
    _in("IMAGES", "BYTES", VISION_NOTE, dims=ANY),
    _in("VIDEO_BYTES", "UINT8", VISION_NOTE, dims=PICTURES),
)
"""Vision inputs of `preprocessing`: declared for clients to see, and refused by name."""
_EXTRA_IDS = "`GenerationConfig.prompt_tuning.extra_ids`"
_WORDS, _MAX_TOKENS = "`EncodeCommand.words`", "`GenerationConfig.stopping.max_tokens`"
_BIAS_WEIGHTS = "`GenerationConfig.sampling.embedding_bias_weights`"
PREPROCESSING_INPUTS = (
    _in("QUERY", "BYTES", "`EncodeCommand.text`", optional=False),
    _in("DECODER_QUERY", "BYTES", "`EncodeCommand.text`", "an encode of its own"),
    _in("REQUEST_OUTPUT_LEN", "INT32", _MAX_TOKENS, "passed through", optional=False),
    _in("BAD_WORDS_DICT", "BYTES", _WORDS, dims=ANY),
    _in("STOP_WORDS_DICT", "BYTES", _WORDS, dims=ANY),
    _in("EMBEDDING_BIAS_WORDS", "BYTES", _WORDS, dims=ANY),
    _in("EMBEDDING_BIAS_WEIGHTS", "FP32", _BIAS_WEIGHTS, dims=ANY),
    _in("END_ID", "INT32", "`GenerationConfig.stopping.end_id`", "passed through"),
    _in("PAD_ID", "INT32", "`Encoded.token_ids`", "pads their rows; passed through"),
    _in("PROMPT_TABLE_EXTRA_ID", "UINT64", _EXTRA_IDS, REPEATED_NOTE),
    *VISION_INPUTS,
)
POSTPROCESSING_INPUTS = (
    _in("TOKENS_BATCH", "INT32", "`DecodeCommand.token_ids`", dims=(-1, -1), optional=False),
    _in("SEQUENCE_LENGTH", "INT32", "`DecodeCommand.token_counts`", dims=ANY, optional=False),
)


def _out(name: str, data_type: str, source: str, *dims: int, note: str = "") -> TensorSpec:
    return TensorSpec(name, (data_type,), dims, source, note)


PREPROCESSING_OUTPUTS = (
    _out("INPUT_ID", "INT32", "`Encoded.token_ids`", -1, note="padded with the padding id"),
    _out("REQUEST_INPUT_LEN", "INT32", "`Encoded.token_ids`", 1, note="their number"),
    _out("DECODER_INPUT_ID", "INT32", "`Encoded.token_ids`", -1, note="of the decoder query"),
    _out("REQUEST_DECODER_INPUT_LEN", "INT32", "`Encoded.token_ids`", 1, note="their number"),
    _out("BAD_WORDS_IDS", "INT32", "`Encoded.words`", 2, -1, note=WORDS_NOTE),
    _out("STOP_WORDS_IDS", "INT32", "`Encoded.words`", 2, -1, note=WORDS_NOTE),
    _out("EMBEDDING_BIAS", "FP32", "`GenerationConfig.sampling.embedding_bias`", -1),
    _out("REQUEST_OUTPUT_LEN", "INT32", _MAX_TOKENS, -1, note="passed through"),
    _out("OUT_END_ID", "INT32", "`GetTokenizerResponse.eos_id`", 1, note="`END_ID` where given"),
    _out("OUT_PAD_ID", "INT32", "`GetTokenizerResponse.pad_id`", 1, note="`PAD_ID` where given"),
    _out("OUT_PROMPT_TABLE_EXTRA_IDS", "UINT64", _EXTRA_IDS, -1),
)
POSTPROCESSING_OUTPUTS = (_out("OUTPUT", "BYTES", "`Decoded.texts`", -1),)

TEXT_OUTPUT = _out("text_output", "BYTES", "`TokensGenerated.text`", -1)
TOKEN_OUTPUTS = (
    _out("output_ids", "INT32", "`TokensGenerated.token_ids`", -1, -1, note="padded with -1"),
    _out("sequence_length", "INT32", GENERATED, -1),
)
HANDOFF_OUTPUT = _out("context_phase_params", "UINT8", "`SequenceFinished.handoff_state`", -1)
PERF_OUTPUTS = tuple(
    _out(name, data_type, f"`PerfMetrics.{name}`", 1)
    for name, data_type in (
        ("kv_cache_alloc_new_blocks", "INT32"),
        ("kv_cache_reused_blocks", "INT32"),
        ("kv_cache_alloc_total_blocks", "INT32"),
        ("arrival_time_ns", "INT64"),
        ("first_scheduled_time_ns", "INT64"),
        ("first_token_time_ns", "INT64"),
        ("last_token_time_ns", "INT64"),
        ("acceptance_rate", "FP32"),
        ("total_accepted_draft_tokens", "INT32"),
        ("total_draft_tokens", "INT32"),
    )
)
"""Named like the fields of PerfMetrics."""
_SUM = "`TokenDetails.cumulative_log_prob`, `SequenceFinished.cumulative_log_prob`"


def detail_outputs(logits_data_type: str) -> tuple[TensorSpec, ...]:
    """Outputs on demand, common to the generating models except llmapi."""
    return (
        _out("cum_log_probs", "FP32", _SUM, -1),
        _out("output_log_probs", "FP32", "`TokenDetails.log_probs`", -1, -1),
        _out("context_logits", logits_data_type, "`PromptDetails.context_logits`", -1, -1),
        _out("generation_logits", logits_data_type, "`TokenDetails.generation_logits`", -1, -1, -1),
        _out("batch_index", "INT32", "`GenerateEvent.batch_index`", 1),
        _out("sequence_index", "INT32", "`GenerateEvent.sequence_index`", 1),
        *PERF_OUTPUTS,
        _out("num_input_tokens", "INT32", "`Usage.prompt_tokens`", 1),
        _out("num_output_tokens", "INT32", GENERATED, 1),
    )


_REUSED = "`PerfMetrics.kv_cache_reused_blocks`"
_COMPUTED = "`PerfMetrics.kv_cache_alloc_new_blocks`"
LLMAPI_OUTPUTS = (
    TEXT_OUTPUT,
    _out("finish_reason", "BYTES", "`SequenceFinished.reason`", -1),
    _out("stop_reason", "BYTES", "`SequenceFinished.stop_text`", -1),
    _out("cumulative_logprob", "FP32", "`SequenceFinished.cumulative_log_prob`", -1),
    _out("kv_cache_reused_block", "INT32", _REUSED, -1),
    _out("kv_cache_missed_block", "INT32", _COMPUTED, -1, note="a block not found is computed"),
    _out(
        "kv_cache_hit_rate", "FP32", f"{_REUSED}, {_COMPUTED}", -1, note="reused / (reused + new)"
    ),
    *(spec for spec in PERF_OUTPUTS if spec.name != "kv_cache_reused_blocks"),
)
