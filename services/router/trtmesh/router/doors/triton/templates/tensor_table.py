"""The only table of the Triton models' tensors: the declarations of each release, the setter of each input, the source
of each output.

`protos/triton_tensors.py` renders it into the contract's page. Setters run in this order, so a length follows its ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from trtmesh.router.doors.triton.releases import History
from trtmesh.router.doors.triton.settings import Release
from trtmesh.router.doors.triton.templates import put
from trtmesh.router.doors.triton.templates.put import Put
from trtmesh.router.doors.triton.tensors import TensorSpec


@dataclass(frozen=True, slots=True)
class InputSpec(TensorSpec):
    """An input; without `put`, read by the template itself or ignored (`pad_id`)."""

    scalar: bool = False
    """Whether the model sees [batch] where the client sends [batch, 1]."""
    ragged: bool = False
    put: Put | None = None
    same_as: str = ""
    """The newest name of an input with several names, which must agree where a request has more than one."""

    @property
    def required(self) -> bool:
        """Whether every release requires it."""
        return self.history.required


PERF_NOTE = "`SequenceStarted` has what is known with the first token, `SequenceFinished` the whole"
EARLY_STOPPING_NOTE = "BOOL or INT32; 0, 1 and 2 are the values 1, 2 and 3"
COUNTED_NOTE = "always counted; the tensor asks for the output"
UNSET_NOTE = "-1 is unset"
WORDS_NOTE = "a row of ids, a row of offsets"
REPEATED_NOTE = "applies to every prompt token"
TABLE_NOTE = "ids from the vocabulary size on address prompt embedding rows"
BACKEND_NOTE = "the name by which Triton's C++ backend reads it"
IGNORED_NOTE = "unset means 0"
DECODER_NOTE = "a single id is without effect on a decoder-only model"
END_NOTE = "-1 and, for token ids, unset: `ignore_end_id`"
PATH_NOTE = (
    "refused: a request must not name a path of the server; register the adapter with `AddAdapter`"
)
VISION_NOTE = "refused: needs a vision encoder"
GENERATED = "`SequenceFinished.generated_tokens`"
STOP_SOURCE = "`StopRequest.request_id`"
STREAM_SOURCE = "`GenerationConfig.output.stream`"
NO_PADDING = "without effect: short rows end in -1"
"""Of `pad_id`."""
COUNT = "v0.5 UINT32; v0.7 INT32"
SINGLE_TEXT = "v0.11 BYTES -1; v0.12 BYTES"
REQUIRED_TEXT = "v0.5 BYTES -1 required; v0.12 BYTES required"
WORDS = "v0.5 BYTES -1 required; v0.6 BYTES -1"
NEW_TOKENS = "v0.5 UINT32 -1 required; v0.7 INT32 -1 required; v0.12 INT32 required"


def _one(
    name: str,
    history: str,
    where: Put | None = None,
    source: str = "",
    note: str = "",
    *,
    same_as: str = "",
) -> InputSpec:
    """A value for each row."""
    parsed = History.parse(history)
    return InputSpec(name, parsed, source, note, scalar=True, put=where, same_as=same_as)


def _list(name: str, history: str, where: Put | None, note: str = "") -> InputSpec:
    """Values in the row's own shape, which may differ from row to row."""
    return InputSpec(name, History.parse(history), "", note, ragged=True, put=where)


def _matrix(name: str, path: str, history: str) -> InputSpec:
    """A dense array that passes through unread."""
    return _list(name, history, put.dense(path))


def _lengths_and_seeds() -> tuple[InputSpec, ...]:
    """Inputs renamed between releases, under both names."""
    min_tokens, seed = put.value("stopping.min_tokens"), put.value("sampling.seed")
    return (
        _one("min_tokens", "2025-05 INT32", min_tokens),
        _one("min_length", f"{COUNT}; 2025-05 absent", min_tokens, same_as="min_tokens"),
        _one("seed", "2025-05 UINT64", seed),
        _one("random_seed", "v0.5 UINT64; 2025-05 absent", seed, same_as="seed"),
    )


def _sampling(prefix: str, length_penalty: str) -> tuple[InputSpec, ...]:
    return (
        _one("num_return_sequences", "v0.14 INT32", put.value("sampling.num_return_sequences")),
        _one("beam_width", COUNT, put.value("beam_search.beam_width")),
        _one("end_id", COUNT, put.end_id, note=END_NOTE),
        _one("pad_id", COUNT, None, NO_PADDING, "as in Triton"),
        _one(
            prefix + "top_k",
            COUNT,
            put.unless_negative("sampling.top_k"),
            note="unset if below 0",
        ),
        _one(
            prefix + "top_p",
            "v0.5 FP32",
            put.positive("sampling.top_p"),
            note="unset unless above 0",
        ),
        _one("temperature", "v0.5 FP32", put.value("sampling.temperature")),
        _one("repetition_penalty", "v0.5 FP32", put.value("sampling.repetition_penalty")),
        _one("presence_penalty", "v0.5 FP32", put.value("sampling.presence_penalty")),
        _one("frequency_penalty", "v0.8 FP32", put.value("sampling.frequency_penalty")),
        _one(length_penalty, "v0.5 FP32", put.value("beam_search.length_penalty")),
        *_lengths_and_seeds(),
        _one("return_log_probs", "v0.6 BOOL", put.positive("output.log_probs")),
        _one(
            "output_log_probs",
            "undeclared BOOL",
            put.positive("output.log_probs"),
            note="of the `gpt` models",
        ),
        _one("return_context_logits", "v0.8 BOOL", put.value("output.context_logits")),
        _one("return_generation_logits", "v0.8 BOOL", put.value("output.generation_logits")),
        _one(
            "return_perf_metrics",
            "v0.19 BOOL",
            put.positive("output.perf_metrics"),
            note=PERF_NOTE,
        ),
        _one(
            "return_kv_cache_reuse_stats",
            "v0.16 BOOL; v0.19 absent",
            put.positive("output.perf_metrics"),
        ),
        _one(
            "return_num_input_tokens", "2026-05 BOOL", None, "`Usage.prompt_tokens`", COUNTED_NOTE
        ),
        _one("return_num_output_tokens", "2026-05 BOOL", None, GENERATED, COUNTED_NOTE),
        _matrix(
            "prompt_embedding_table", "prompt_tuning.embedding_table", "v0.6 FP16/FP32/BF16 -1,-1"
        ),
        _one(
            "prompt_vocab_size",
            "v0.6 UINT32; v0.7 INT32",
            put.value("prompt_tuning.vocabulary_size"),
        ),
        _list("guided_decoding_guide_type", "v0.19 BYTES", put.guide_type),
        _list("guided_decoding_guide", "v0.19 BYTES", put.text("guided_decoding.guide")),
    )


def _lora(task_id: str, weights: str) -> tuple[InputSpec, ...]:
    """Adapters, with the releases that added them."""
    return (
        _one("lora_task_id", f"{task_id} UINT64", put.value("lora.id")),
        _matrix("lora_weights", "lora.weights", f"{weights} FP16/BF16 -1,-1"),
        _matrix("lora_config", "lora.config", f"{weights} INT32 -1,3"),
    )


def _stop(since: str) -> InputSpec:
    return _one("stop", f"{since} BOOL", None, STOP_SOURCE, "the call's own id names the request")


_TEXT_INPUTS = (
    _list("text_input", REQUIRED_TEXT, put.text("prompt.text"), "each row is an item"),
    _list("decoder_text_input", SINGLE_TEXT, put.text("encoder_decoder.decoder_prompt.text")),
    _one("max_tokens", NEW_TOKENS, put.max_tokens),
    _list("bad_words", WORDS, put.texts("stopping.bad_texts"), "empty words are dropped"),
    _list("stop_words", WORDS, put.stop_texts, "empty words are dropped"),
    _one("stream", "v0.5 BOOL", None, STREAM_SOURCE),
    _list(
        "embedding_bias_words", "v0.6 BYTES -1", put.weighted_texts("sampling.embedding_bias_texts")
    ),
    _list("embedding_bias_weights", "v0.6 FP32 -1", put.values("sampling.embedding_bias_weights")),
    _one(
        "prompt_table_extra_id",
        "v0.13 UINT64",
        put.values("prompt_tuning.extra_ids"),
        note=REPEATED_NOTE,
    ),
    *_sampling("", "length_penalty"),
    *_lora("v0.15", "v0.15"),
    _one("early_stopping", "2026-05 INT32/BOOL", put.early_stopping, note=EARLY_STOPPING_NOTE),
    _one(
        "prompt_ignore_length",
        "own INT32",
        put.value("sampling.prompt_ignore_length"),
        note=IGNORED_NOTE,
    ),
    _one("exclude_input_in_output", "v0.16 BOOL", put.value("output.exclude_prompt")),
    _stop("own"),
)
ENSEMBLE_INPUTS = (
    *_TEXT_INPUTS,
    _list("image_input", "v0.12 FP16 3,224,224; v0.13 absent", put.image_pixels),
)

BLS_INPUTS = (
    *_TEXT_INPUTS,
    _list(
        "image_input",
        "v0.12 FP16 3,224,224; v0.13 FP16 3,-1,-1; v0.15 FP16 -1,3,-1,-1",
        put.image_pixels,
    ),
    _list("image_bytes_input", "v0.16 UINT8 -1,-1,-1,-1", put.image_pixels),
    _list("image_url_input", "v0.16 BYTES", put.image_urls),
    _list("video_bytes_input", "v0.16 UINT8 -1,-1,-1,-1", put.dense("multimodal.video")),
    _one("num_draft_tokens", "v0.9 INT32", put.positive("draft.num_draft_tokens")),
    _one("use_draft_logits", "v0.9 BOOL", put.value("draft.use_draft_logits")),
)

TOKEN_INPUTS = (
    _list(
        "input_ids",
        "v0.5 INT32 -1 required; v0.15 INT32 -1",
        put.ids("prompt.token_ids"),
        TABLE_NOTE,
    ),
    _one("input_lengths", "v0.5 INT32 required", put.prompt_length, note="trims the row"),
    _one("request_output_len", "v0.5 UINT32 required; v0.7 INT32 required", put.max_tokens),
    _matrix(
        "encoder_input_features",
        "encoder_decoder.encoder_features",
        "v0.15 FP16/FP32/BF16 -1,-1",
    ),
    _one(
        "encoder_output_lengths",
        "v0.15 INT32",
        put.value("encoder_decoder.encoder_output_length"),
    ),
    _list(
        "decoder_input_ids",
        "v0.11 INT32 -1",
        put.ids("encoder_decoder.decoder_prompt.token_ids"),
        DECODER_NOTE,
    ),
    _one("decoder_input_lengths", "v0.11 INT32", put.decoder_length, note="trims the row"),
    _list("draft_input_ids", "v0.7 INT32 -1", put.values("draft.token_ids")),
    _matrix("draft_logits", "draft.logits", "v0.9 FP32/FP16/BF16 -1,-1"),
    _one("draft_acceptance_threshold", "v0.10 FP32", put.value("draft.acceptance_threshold")),
    _list("stop_words_list", "v0.6 INT32 2,-1", put.words("stopping.stop_token_ids"), WORDS_NOTE),
    _list("bad_words_list", "v0.6 INT32 2,-1", put.words("stopping.bad_token_ids"), WORDS_NOTE),
    _list("embedding_bias", "v0.6 FP32 -1", put.values("sampling.embedding_bias")),
    *_sampling("runtime_", "len_penalty"),
    *_lora("v0.9", "v0.8"),
    _one(
        "early_stopping",
        "v0.10 BOOL; 2026-05 INT32",
        put.early_stopping,
        note=EARLY_STOPPING_NOTE,
    ),
    _one("exclude_input_in_output", "v0.14 BOOL", put.value("output.exclude_prompt")),
    _stop("v0.5"),
    _one("beam_search_diversity_rate", "v0.10 FP32", put.value("beam_search.diversity_rate")),
    _one("runtime_top_p_min", "v0.10 FP32", put.value("sampling.top_p_min")),
    _one(
        "runtime_top_k_min",
        "own FP32",
        put.value("sampling.top_p_min"),
        note=BACKEND_NOTE,
        same_as="runtime_top_p_min",
    ),
    _one("runtime_top_p_decay", "v0.10 FP32", put.value("sampling.top_p_decay")),
    _one("runtime_top_p_reset_ids", "v0.10 INT32", put.value("sampling.top_p_reset_id")),
    _one(
        "prompt_ignore_length",
        "2026-05 INT32",
        put.value("sampling.prompt_ignore_length"),
        note=IGNORED_NOTE,
    ),
    _one("no_repeat_ngram_size", "own INT32", put.value("sampling.no_repeat_ngram_size")),
    _one("streaming", "v0.5 BOOL", None, STREAM_SOURCE),
    _list("prompt_table_extra_ids", "v0.13 UINT64 -1", put.extra_ids),
    _matrix("cross_attention_mask", "encoder_decoder.cross_attention_mask", "v0.15 BOOL -1,-1"),
    _list(
        "skip_cross_attn_blocks",
        "v0.16 BOOL",
        put.value("encoder_decoder.skip_cross_attention"),
    ),
    _list("mrope_rotary_cos_sin", "v0.19 FP32 -1", put.dense("multimodal.mrope_rotary_cos_sin")),
    _list("mrope_position_deltas", "v0.19 INT64", put.value("multimodal.mrope_position_delta")),
    _matrix("multimodal_embedding", "multimodal.embedding", "own FP16/FP32/BF16 -1,-1"),
    _matrix("multimodal_hashes", "multimodal.hashes", "own INT32 -1,-1"),
    _matrix("multimodal_item_runs", "multimodal.item_runs", "own INT32 -1,-1"),
    _list("context_phase_params", "v0.14 UINT8 -1", put.state),
    _list("retention_token_range_starts", "v0.17 INT32 -1", put.range_starts),
    _list("retention_token_range_ends", "v0.17 INT32 -1", put.range_field("token_end"), UNSET_NOTE),
    _list("retention_token_range_priorities", "v0.17 INT32 -1", put.range_field("priority")),
    _list(
        "retention_token_range_durations_ms",
        "v0.17 INT32 -1",
        put.range_field("duration_ms"),
        UNSET_NOTE,
    ),
    _list("retention_decode_priority", "v0.17 INT32", put.value("kv_cache.decode_priority")),
    _list("retention_decode_duration_ms", "v0.17 INT32", put.duration, UNSET_NOTE),
    _list("lookahead_window_size", "v0.19 INT32", put.value("lookahead.window_size")),
    _list("lookahead_ngram_size", "v0.19 INT32", put.value("lookahead.ngram_size")),
    _list(
        "lookahead_verification_set_size",
        "v0.19 INT32",
        put.value("lookahead.verification_set_size"),
    ),
)

GPT_INPUTS = (
    _list("input_ids", "v0.5 INT32 -1 required", put.ids("prompt.token_ids")),
    _one("input_lengths", "v0.5 INT32 required", put.prompt_length, note="trims the row"),
    _one("request_output_len", "v0.5 UINT32 -1 required; v0.7 INT32 -1 required", put.max_tokens),
    _one("end_id", "v0.5 UINT32 required; v0.7 INT32 required", put.end_id, note=END_NOTE),
    _one(
        "pad_id",
        "v0.5 UINT32 required; v0.7 INT32 required",
        None,
        "without effect: short rows end in `end_id`",
        "as in Triton",
    ),
    _one("beam_width", COUNT, put.value("beam_search.beam_width")),
    _one("temperature", "v0.5 FP32", put.value("sampling.temperature")),
    _one("runtime_top_k", COUNT, put.unless_negative("sampling.top_k"), note="unset if below 0"),
    _one("runtime_top_p", "v0.5 FP32", put.positive("sampling.top_p"), note="unset unless above 0"),
    _one("len_penalty", "v0.5 FP32", put.value("beam_search.length_penalty")),
    _one("repetition_penalty", "v0.5 FP32", put.value("sampling.repetition_penalty")),
    _one("presence_penalty", "v0.5 FP32", put.value("sampling.presence_penalty")),
    _one("frequency_penalty", "v0.8 FP32", put.value("sampling.frequency_penalty")),
    *_lengths_and_seeds(),
    _one("output_log_probs", "v0.5 BOOL", put.value("output.log_probs")),
)

_NOT_DISAGGREGATED = (
    *("encoder_", "cross_attention_mask", "skip_cross_attn_blocks", "mrope_", "multimodal_"),
    *("context_phase_params", "retention_", "lookahead_"),
)
DISAGGREGATED_INPUTS = tuple(
    spec for spec in TOKEN_INPUTS if not spec.name.startswith(_NOT_DISAGGREGATED)
)


def _in(
    name: str, history: str, source: str = "", note: str = "", where: Put | None = None
) -> InputSpec:
    """An input without a reshape or ragged rows."""
    return InputSpec(name, History.parse(history), source, note, put=where)


LLMAPI_INPUTS = (
    _in("text_input", "BYTES -1 required", where=put.only_prompt_text),
    _in("image_url", "BYTES -1", where=put.image_urls),
    _in("streaming", "BOOL", STREAM_SOURCE),
    _in("sampling_param_best_of", "INT32", where=put.best_of, note="1 is the default"),
    _in("sampling_param_temperature", "FP32", where=put.value("sampling.temperature")),
    _in(
        "sampling_param_top_k",
        "INT32",
        where=put.unless_negative("sampling.top_k"),
        note="unset if below 0",
    ),
    _in(
        "sampling_param_top_p",
        "FP32",
        where=put.unless_negative("sampling.top_p"),
        note="unset if below 0",
    ),
    _in("sampling_param_frequency_penalty", "FP32", where=put.value("sampling.frequency_penalty")),
    _in("sampling_param_presence_penalty", "FP32", where=put.value("sampling.presence_penalty")),
    _in("sampling_param_max_tokens", "INT32", where=put.max_tokens),
    _in("sampling_param_stop", "BYTES -1", where=put.texts("stopping.stop_texts")),
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
    _in("IMAGE", "v0.12 FP16 3,224,224; v0.13 absent", VISION_NOTE),
    _in("IMAGE_BYTES", "v0.15 UINT8 -1,-1,-1,-1", VISION_NOTE),
    _in("IMAGE_URL", "v0.15 BYTES", VISION_NOTE),
    _in("IMAGES", "2026-05 BYTES -1", VISION_NOTE),
    _in("VIDEO_BYTES", "v0.16 UINT8 -1,-1,-1,-1", VISION_NOTE),
)
"""Vision inputs of `preprocessing`: declared for clients to see, and refused by name."""
_EXTRA_IDS = "`GenerationConfig.prompt_tuning.extra_ids`"
_TABLE = "`GenerationConfig.prompt_tuning.embedding_table`"
_WORDS, _MAX_TOKENS = "`EncodeCommand.spelled_words`", "`GenerationConfig.stopping.max_tokens`"
_BIAS_WEIGHTS = "`GenerationConfig.sampling.embedding_bias_weights`"
_PASSED = "passed through"
_ID = "v0.8 INT32 -1; v0.12 INT32"
_TABLE_DIMS = "v0.12 FP16 -1,-1; v0.13 absent"
PREPROCESSING_INPUTS = (
    _in("QUERY", REQUIRED_TEXT, "`EncodeCommand.text`"),
    _in("DECODER_QUERY", SINGLE_TEXT, "`EncodeCommand.text`", "an encode of its own"),
    _in("REQUEST_OUTPUT_LEN", NEW_TOKENS, _MAX_TOKENS, _PASSED),
    _in("BAD_WORDS_DICT", WORDS, _WORDS),
    _in("STOP_WORDS_DICT", WORDS, _WORDS),
    _in("EMBEDDING_BIAS_WORDS", "v0.6 BYTES -1", _WORDS),
    _in("EMBEDDING_BIAS_WEIGHTS", "v0.6 FP32 -1", _BIAS_WEIGHTS),
    _in("END_ID", _ID, "`GenerationConfig.stopping.end_id`", _PASSED),
    _in("PAD_ID", _ID, "`Encoded.token_ids`", "pads their rows; passed through"),
    _in("PROMPT_TABLE_EXTRA_ID", "v0.13 UINT64", _EXTRA_IDS, REPEATED_NOTE),
    _in("PROMPT_EMBEDDING_TABLE", _TABLE_DIMS, _TABLE, _PASSED),
    *VISION_INPUTS,
)
_SUM = "`TokenDetails.cumulative_log_prob`, `SequenceFinished.cumulative_log_prob`"
_LOG_PROBS = "`TokenDetails.log_probs`"
_CONTEXT_LOGITS = "`PromptDetails.context_logits`"
_GENERATION_LOGITS = "`TokenDetails.generation_logits`"
_BATCH_INDEX = "`GenerateEvent.batch_index`"
PASSED_INPUTS = (
    _in("CUM_LOG_PROBS", "v0.6 FP32 -1 required; v0.9 FP32 -1; v0.14 absent", _SUM, _PASSED),
    _in(
        "OUTPUT_LOG_PROBS",
        "v0.6 FP32 -1,-1 required; v0.9 FP32 -1,-1; v0.14 absent",
        _LOG_PROBS,
        _PASSED,
    ),
    _in("CONTEXT_LOGITS", "v0.8 FP32 -1,-1; v0.14 absent", _CONTEXT_LOGITS, _PASSED),
    _in("GENERATION_LOGITS", "v0.8 FP32 -1,-1,-1; v0.14 absent", _GENERATION_LOGITS, _PASSED),
    _in("BATCH_INDEX", "v0.12 INT32; v0.14 absent", _BATCH_INDEX, _PASSED),
)
"""Inputs of `postprocessing` that come back as outputs, their names preceded by `OUT_`."""
POSTPROCESSING_INPUTS = (
    _in("TOKENS_BATCH", "v0.5 INT32 -1,-1 required", "`DecodeCommand.token_ids`"),
    _in(
        "SEQUENCE_LENGTH",
        "v0.5 absent; v0.6 INT32 -1 required",
        "`DecodeCommand.token_counts`",
        "without: up to the -1 at the end of a row",
    ),
    *PASSED_INPUTS,
)


def _out(name: str, history: str, source: str, note: str = "") -> TensorSpec:
    return TensorSpec(name, History.parse(history), source, note)


PREPROCESSING_OUTPUTS = (
    _out("INPUT_ID", "v0.5 INT32 -1", "`Encoded.token_ids`", "padded with the padding id"),
    _out("REQUEST_INPUT_LEN", "v0.5 INT32", "`Encoded.token_ids`", "their number"),
    _out("DECODER_INPUT_ID", "v0.11 INT32 -1", "`Encoded.token_ids`", "of the decoder query"),
    _out("REQUEST_DECODER_INPUT_LEN", "v0.11 INT32", "`Encoded.token_ids`", "their number"),
    _out("BAD_WORDS_IDS", "v0.5 INT32 2,-1", "`Encoded.spelled_words`", WORDS_NOTE),
    _out("STOP_WORDS_IDS", "v0.5 INT32 2,-1", "`Encoded.spelled_words`", WORDS_NOTE),
    _out("EMBEDDING_BIAS", "v0.6 FP32 -1", "`GenerationConfig.sampling.embedding_bias`"),
    _out("REQUEST_OUTPUT_LEN", "v0.5 UINT32 -1; v0.7 INT32 -1", _MAX_TOKENS, _PASSED),
    _out("OUT_END_ID", _ID, "`GetTokenizerResponse.eos_id`", "`END_ID` where given"),
    _out("OUT_PAD_ID", _ID, "`GetTokenizerResponse.pad_id`", "`PAD_ID` where given"),
    _out("OUT_PROMPT_TABLE_EXTRA_IDS", "v0.13 UINT64 -1", _EXTRA_IDS),
    _out("OUT_PROMPT_EMBEDDING_TABLE", _TABLE_DIMS, _TABLE, "where given"),
)
POSTPROCESSING_OUTPUTS = (
    _out("OUTPUT", "v0.5 BYTES -1,-1; v0.6 BYTES -1", "`Decoded.texts`"),
    _out("OUT_CUM_LOG_PROBS", "v0.6 FP32 -1; v0.14 absent", _SUM, "where given"),
    _out("OUT_OUTPUT_LOG_PROBS", "v0.6 FP32 -1,-1; v0.14 absent", _LOG_PROBS, "where given"),
    _out("OUT_CONTEXT_LOGITS", "v0.8 FP32 -1,-1; v0.14 absent", _CONTEXT_LOGITS, "where given"),
    _out(
        "OUT_GENERATION_LOGITS",
        "v0.8 FP32 -1,-1,-1; v0.14 absent",
        _GENERATION_LOGITS,
        "where given",
    ),
    _out("OUT_BATCH_INDEX", "v0.12 INT32; v0.14 absent", _BATCH_INDEX, "where given"),
)

TEXT_OUTPUT = _out("text_output", "v0.5 BYTES -1,-1; v0.6 BYTES -1", "`TokensGenerated.text`")
_IDS = "`TokensGenerated.token_ids`"
TOKEN_OUTPUTS = (
    _out("output_ids", "v0.5 INT32 -1,-1", _IDS, "padded with -1"),
    _out("sequence_length", "v0.6 INT32 -1", GENERATED),
)
GPT_OUTPUTS = (
    _out("output_ids", "v0.5 INT32 -1,-1", _IDS, "after the prompt's; padded with `end_id`"),
    _out("log_probs", "v0.5 FP32 -1,-1", _LOG_PROBS, "0 for the prompt and the padding"),
)
HANDOFF_OUTPUT = _out("context_phase_params", "v0.14 UINT8 -1", "`SequenceFinished.handoff_state`")
PERF_OUTPUTS = tuple(
    _out(name, history, f"`PerfMetrics.{name}`")
    for name, history in (
        ("kv_cache_alloc_new_blocks", "v0.16 INT32"),
        ("kv_cache_reused_blocks", "v0.16 INT32"),
        ("kv_cache_alloc_total_blocks", "v0.16 INT32"),
        ("arrival_time_ns", "v0.19 INT64"),
        ("first_scheduled_time_ns", "v0.19 INT64"),
        ("first_token_time_ns", "v0.19 INT64"),
        ("last_token_time_ns", "v0.19 INT64"),
        ("acceptance_rate", "v0.19 FP32"),
        ("total_accepted_draft_tokens", "v0.19 INT32"),
        ("total_draft_tokens", "v0.19 INT32"),
    )
)
"""Named like the fields of PerfMetrics."""


def detail_outputs(logits_data_type: str) -> tuple[TensorSpec, ...]:
    """Outputs on demand, common to the generating models except llmapi."""
    return (
        _out("cum_log_probs", "v0.6 FP32 -1", _SUM),
        _out("output_log_probs", "v0.6 FP32 -1,-1", _LOG_PROBS),
        _out("context_logits", f"v0.8 {logits_data_type} -1,-1", _CONTEXT_LOGITS),
        _out("generation_logits", f"v0.8 {logits_data_type} -1,-1,-1", _GENERATION_LOGITS),
        _out("batch_index", "v0.12 INT32", _BATCH_INDEX),
        _out("sequence_index", "v0.14 INT32", "`GenerateEvent.sequence_index`"),
        *PERF_OUTPUTS,
        _out("num_input_tokens", "2026-05 INT32", "`Usage.prompt_tokens`"),
        _out("num_output_tokens", "2026-05 INT32", GENERATED),
    )


@cache
def unasked_outputs(release: Release) -> frozenset[str]:
    """Details in every response of a release: postprocessing passed these through, so models sent zeros unasked."""
    return frozenset(
        spec.name.lower()
        for spec in PASSED_INPUTS
        if spec.name != "BATCH_INDEX" and spec.history.at(release) is not None
    )


_REUSED = "`PerfMetrics.kv_cache_reused_blocks`"
_COMPUTED = "`PerfMetrics.kv_cache_alloc_new_blocks`"
LLMAPI_PERF_OUTPUTS = (
    _out("kv_cache_reused_block", "INT32 -1", _REUSED),
    _out("kv_cache_missed_block", "INT32 -1", _COMPUTED, "a block not found is computed"),
    _out("kv_cache_hit_rate", "FP32 -1", f"{_REUSED}, {_COMPUTED}", "reused / (reused + new)"),
    *(spec for spec in PERF_OUTPUTS if spec.name != "kv_cache_reused_blocks"),
)
LLMAPI_OUTPUTS = (
    TEXT_OUTPUT,
    _out("finish_reason", "BYTES -1", "`SequenceFinished.reason`"),
    _out("stop_reason", "BYTES -1", "`SequenceFinished.stop_text`"),
    _out("cumulative_logprob", "FP32 -1", "`SequenceFinished.cumulative_log_prob`"),
    *LLMAPI_PERF_OUTPUTS,
)
