"""Tensors of the models besides their generation inputs."""

from __future__ import annotations

from trtmesh.router.doors.triton.templates.inputs import TOKEN_INPUTS, InputSpec
from trtmesh.router.doors.triton.tensors import TensorSpec


def out(name: str, data_type: str, *dims: int) -> TensorSpec:
    return TensorSpec(name, (data_type,), dims)


PERF_OUTPUTS = tuple(
    out(name, data_type, 1)
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


def generation_outputs(logits_data_type: str) -> tuple[TensorSpec, ...]:
    return (
        out("cum_log_probs", "FP32", -1),
        out("output_log_probs", "FP32", -1, -1),
        out("context_logits", logits_data_type, -1, -1),
        out("generation_logits", logits_data_type, -1, -1, -1),
        out("batch_index", "INT32", 1),
        out("sequence_index", "INT32", 1),
        *PERF_OUTPUTS,
        out("num_input_tokens", "INT32", 1),
        out("num_output_tokens", "INT32", 1),
    )


PICTURE_INPUTS = (
    InputSpec("IMAGE_BYTES", ("UINT8",), (-1, -1, -1, -1)),
    InputSpec("IMAGE_URL", ("BYTES",), (1,)),
    InputSpec("IMAGES", ("BYTES",), (-1,)),
    InputSpec("VIDEO_BYTES", ("UINT8",), (-1, -1, -1, -1)),
)
"""Of `preprocessing`; declared so that clients see them, and refused by name because they need a vision encoder."""


def _preprocessing_inputs() -> tuple[InputSpec, ...]:
    def one(name: str, data_type: str, *dims: int, optional: bool = True) -> InputSpec:
        return InputSpec(name, (data_type,), dims or (1,), optional)

    return (
        one("QUERY", "BYTES", optional=False),
        one("DECODER_QUERY", "BYTES"),
        one("REQUEST_OUTPUT_LEN", "INT32", optional=False),
        one("BAD_WORDS_DICT", "BYTES", -1),
        one("STOP_WORDS_DICT", "BYTES", -1),
        one("EMBEDDING_BIAS_WORDS", "BYTES", -1),
        one("EMBEDDING_BIAS_WEIGHTS", "FP32", -1),
        one("END_ID", "INT32"),
        one("PAD_ID", "INT32"),
        one("PROMPT_TABLE_EXTRA_ID", "UINT64"),
        *PICTURE_INPUTS,
    )


PREPROCESSING_INPUTS = _preprocessing_inputs()
PREPROCESSING_OUTPUTS = (
    out("INPUT_ID", "INT32", -1),
    out("REQUEST_INPUT_LEN", "INT32", 1),
    out("DECODER_INPUT_ID", "INT32", -1),
    out("REQUEST_DECODER_INPUT_LEN", "INT32", 1),
    out("BAD_WORDS_IDS", "INT32", 2, -1),
    out("STOP_WORDS_IDS", "INT32", 2, -1),
    out("EMBEDDING_BIAS", "FP32", -1),
    out("REQUEST_OUTPUT_LEN", "INT32", -1),
    out("OUT_END_ID", "INT32", 1),
    out("OUT_PAD_ID", "INT32", 1),
    out("OUT_PROMPT_TABLE_EXTRA_IDS", "UINT64", -1),
)
POSTPROCESSING_INPUTS = (
    InputSpec("TOKENS_BATCH", ("INT32",), (-1, -1), optional=False),
    InputSpec("SEQUENCE_LENGTH", ("INT32",), (-1,), optional=False),
)
POSTPROCESSING_OUTPUTS = (out("OUTPUT", "BYTES", -1),)

TEXT_OUTPUT = out("text_output", "BYTES", -1)
TOKEN_OUTPUTS = (out("output_ids", "INT32", -1, -1), out("sequence_length", "INT32", -1))
HANDOFF_OUTPUT = out("context_phase_params", "UINT8", -1)

_ONE_WORKER_ONLY = (
    *("encoder_", "cross_attention_mask", "skip_cross_attn_blocks", "mrope_", "multimodal_"),
    *("context_phase_params", "retention_", "lookahead_"),
)
DISAGGREGATED_INPUTS = tuple(
    spec for spec in TOKEN_INPUTS if not spec.name.startswith(_ONE_WORKER_ONLY)
)
"""What `disaggregated_serving_bls` takes."""
