"""The wire contract and its documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from trtmesh.chassis import error_wire, errors
from trtmesh.chassis.admin_token import ADMIN_TOKEN_METADATA_KEY
from trtmesh.chassis.errors import ERROR_TABLE, TrtmeshError
from trtmesh.client.events import FinishReason
from trtmesh.v1 import (
    engine_pb2,
    generation_pb2,
    kv_transfer_pb2,
    router_admin_pb2,
    router_pb2,
    tokenizer_pb2,
)

PROTOS = Path(__file__).parents[1] / "protos" / "trtmesh" / "v1"
PAGE = (PROTOS / "README.md").read_text(encoding="utf-8")
MODULES = (
    engine_pb2,
    generation_pb2,
    kv_transfer_pb2,
    router_admin_pb2,
    router_pb2,
    tokenizer_pb2,
)
MESSAGES: dict[str, Descriptor] = {
    name: message
    for module in MODULES
    for name, message in module.DESCRIPTOR.message_types_by_name.items()
}

SHARED_INPUTS = """
    num_return_sequences exclude_input_in_output end_id pad_id temperature repetition_penalty presence_penalty
    frequency_penalty min_tokens seed early_stopping return_log_probs return_context_logits return_generation_logits
    return_perf_metrics return_num_input_tokens return_num_output_tokens beam_width prompt_embedding_table
    prompt_vocab_size embedding_bias_words embedding_bias_weights lora_task_id lora_weights lora_config
    guided_decoding_guide_type guided_decoding_guide
"""
PERF_OUTPUTS = """
    kv_cache_alloc_new_blocks kv_cache_alloc_total_blocks arrival_time_ns first_scheduled_time_ns
    first_token_time_ns last_token_time_ns acceptance_rate total_accepted_draft_tokens total_draft_tokens
"""
SHARED_OUTPUTS = f"""
    cum_log_probs output_log_probs context_logits generation_logits batch_index sequence_index kv_cache_reused_blocks
    num_input_tokens num_output_tokens {PERF_OUTPUTS}
"""
TENSORS = {
    "`ensemble` and `tensorrt_llm_bls`: inputs": f"""
        text_input decoder_text_input max_tokens bad_words stop_words top_k top_p length_penalty stream
        prompt_table_extra_id {SHARED_INPUTS}
    """,
    "`tensorrt_llm_bls` and multimodal `ensemble` only: inputs": """
        image_input image_bytes_input image_url_input video_bytes_input num_draft_tokens use_draft_logits
    """,
    "`ensemble` and `tensorrt_llm_bls`: outputs": f"text_output {SHARED_OUTPUTS}",
    "`preprocessing`: inputs": """
        QUERY DECODER_QUERY IMAGE_BYTES IMAGE_URL IMAGES VIDEO_BYTES REQUEST_OUTPUT_LEN BAD_WORDS_DICT
        STOP_WORDS_DICT EMBEDDING_BIAS_WORDS EMBEDDING_BIAS_WEIGHTS END_ID PAD_ID PROMPT_TABLE_EXTRA_ID
    """,
    "`preprocessing`: outputs": """
        INPUT_ID REQUEST_INPUT_LEN DECODER_INPUT_ID REQUEST_DECODER_INPUT_LEN BAD_WORDS_IDS STOP_WORDS_IDS
        EMBEDDING_BIAS REQUEST_OUTPUT_LEN OUT_END_ID OUT_PAD_ID OUT_PROMPT_TABLE_EXTRA_IDS PIXEL_VALUES
        ASPECT_RATIO_IDS ASPECT_RATIO_MASK CROSS_ATTENTION_MASK IMAGE_SIZES IS_VIDEO_INPUT ATTENTION_MASK
        IMAGE_GRID_THW VISION_INPUT_ID
    """,
    "`tensorrt_llm` and `disaggregated_serving_bls`: inputs": f"""
        input_ids input_lengths request_output_len encoder_input_features encoder_output_lengths decoder_input_ids
        decoder_input_lengths draft_input_ids draft_logits draft_acceptance_threshold stop_words_list bad_words_list
        embedding_bias len_penalty beam_search_diversity_rate runtime_top_k runtime_top_p runtime_top_p_min
        runtime_top_k_min runtime_top_p_decay runtime_top_p_reset_ids prompt_ignore_length no_repeat_ngram_size
        return_kv_cache_reuse_stats stop streaming prompt_table_extra_ids cross_attention_mask skip_cross_attn_blocks
        mrope_rotary_cos_sin mrope_position_deltas multimodal_embedding multimodal_hashes multimodal_item_runs
        context_phase_params retention_token_range_starts retention_token_range_ends
        retention_token_range_priorities retention_token_range_durations_ms retention_decode_priority
        retention_decode_duration_ms lookahead_window_size lookahead_ngram_size lookahead_verification_set_size
        {SHARED_INPUTS.replace("embedding_bias_words embedding_bias_weights", "")}
    """,
    "`tensorrt_llm` and `disaggregated_serving_bls`: outputs": f"""
        output_ids sequence_length context_phase_params {SHARED_OUTPUTS}
    """,
    "`postprocessing`: inputs": "TOKENS_BATCH SEQUENCE_LENGTH",
    "`postprocessing`: outputs": "OUTPUT",
    "`tensorrt_llm` of the LLM API: inputs": """
        text_input image_url streaming sampling_param_best_of sampling_param_temperature sampling_param_top_k
        sampling_param_top_p sampling_param_frequency_penalty sampling_param_presence_penalty
        sampling_param_max_tokens sampling_param_stop sampling_param_seed sampling_param_exclude_input_from_output
        sampling_param_return_perf_metrics sampling_param_logits_post_processor_name return_finish_reason
        return_stop_reason return_cumulative_logprob stop lora_id lora_name lora_path lora_ckpt_source
    """,
    "`tensorrt_llm` of the LLM API: outputs": f"""
        text_output finish_reason stop_reason cumulative_logprob kv_cache_reused_block kv_cache_missed_block
        kv_cache_hit_rate {PERF_OUTPUTS}
    """,
    "`whisper_bls`: inputs": "TEXT_PREFIX WAV WAV_LENS",
    "`whisper_bls`: outputs": "TRANSCRIPTS",
    "Request parameters": "id model_name request_type priority lora_path",
}


def rows_below(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading."""
    section = PAGE.split(f"# {heading}\n", 1)[1]
    table = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert table, f"no table below {heading!r}"
    rows = [line.strip("|").split("|") for line in table.group().splitlines()]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def resolve(path: str) -> FieldDescriptor | None:
    """The field of a path `Message.field.field`, or None."""
    first, *names = path.split(".")
    message: Descriptor | None = MESSAGES.get(first)
    field: FieldDescriptor | None = None
    for name in names:
        field = message.fields_by_name.get(name) if message else None
        message = field.message_type if field else None
    return field


@pytest.mark.parametrize("heading", TENSORS)
def test_tensor_table_has_one_row_for_each_tensor(heading: str) -> None:
    named = [row[0].strip("`") for row in rows_below(heading)]
    assert sorted(named) == sorted(TENSORS[heading].split())


@pytest.mark.parametrize("heading", TENSORS)
def test_tensor_maps_to_an_existing_field_or_a_refusal(heading: str) -> None:
    for tensor, target, _ in rows_below(heading):
        if target.startswith("refused: "):
            continue
        if target.startswith("without effect: "):
            assert tensor == "`pad_id`", "it would be accepted and ignored"
            continue
        paths = re.findall(r"`([^`]+)`", target)
        assert paths, f"{tensor} goes nowhere"
        assert [path for path in paths if resolve(path) is None] == []


def test_field_lookup_rejects_an_unknown_path() -> None:
    assert resolve("GenerationConfig.sampling.top_k") is not None
    assert resolve("GenerationConfig.sampling.top_kk") is None
    assert resolve("GenerationConfig.sampling.top_k.more") is None
    assert resolve("Nothing.at_all") is None


def test_contract_page_lists_every_proto() -> None:
    named = [row[0].strip("`") for row in rows_below("trtmesh.v1")]
    assert sorted(named) == sorted(path.name for path in PROTOS.glob("*.proto"))


def test_contract_page_has_the_error_table() -> None:
    documented = [tuple(row[:3]) for row in rows_below("Errors")]
    assert documented == [
        (f"`{row.reason}`", row.status.name, str(row.http.value)) for row in ERROR_TABLE
    ]


def test_error_table_has_one_row_for_each_class() -> None:
    classes = {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, TrtmeshError)
    }
    assert {row.error for row in ERROR_TABLE} == classes
    assert len({row.reason for row in ERROR_TABLE}) == len(ERROR_TABLE)


def test_contract_page_names_the_metadata_keys() -> None:
    keys = {row[0].strip("`") for row in rows_below("Metadata")}
    assert keys == {
        "x-request-id",
        ADMIN_TOKEN_METADATA_KEY,
        error_wire.REASON_METADATA_KEY,
        error_wire.RETRY_METADATA_KEY,
        error_wire.ERROR_METADATA_KEY,
    }


def test_client_has_every_finish_reason() -> None:
    prefix = "FINISH_REASON_"
    names = [
        name.removeprefix(prefix).lower()
        for name in generation_pb2.FinishReason.DESCRIPTOR.values_by_name
    ]
    assert [*names[1:], "unknown"] == list(FinishReason)
