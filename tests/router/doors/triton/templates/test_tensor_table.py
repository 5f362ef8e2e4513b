"""Names, types and dimensions of every tensor, as in the clients' copies of the model configurations."""

from __future__ import annotations

import pytest
from compat.triton import asked
from trtmesh.kserve import grpc_service_pb2 as kserve
from trtmesh.kserve import model_config_pb2
from trtmesh.router.doors.triton.calls import read_call
from trtmesh.router.doors.triton.models import describe_config, triton_models
from trtmesh.router.doors.triton.settings import TritonSettings

TEXT = """
text_input* BYTES 1            decoder_text_input BYTES 1     max_tokens* INT32 1
num_return_sequences INT32 1   bad_words BYTES -1             stop_words BYTES -1
exclude_input_in_output BOOL 1 end_id INT32 1                 pad_id INT32 1
top_k INT32 1                  top_p FP32 1                   temperature FP32 1
repetition_penalty FP32 1      presence_penalty FP32 1        frequency_penalty FP32 1
length_penalty FP32 1          min_tokens INT32 1             seed UINT64 1
early_stopping INT32 1         return_log_probs BOOL 1        return_context_logits BOOL 1
return_generation_logits BOOL 1                               return_perf_metrics BOOL 1
return_num_input_tokens BOOL 1 return_num_output_tokens BOOL 1
beam_width INT32 1             stream BOOL 1                  prompt_embedding_table FP16 -1,-1
prompt_table_extra_id UINT64 1 prompt_vocab_size INT32 1      embedding_bias_words BYTES -1
embedding_bias_weights FP32 -1 lora_task_id UINT64 1          lora_weights FP16 -1,-1
lora_config INT32 -1,3         guided_decoding_guide_type BYTES 1
guided_decoding_guide BYTES 1
"""
OURS = " stop BOOL 1 prompt_ignore_length INT32 1"
"""Triton's text models cannot be stopped by name, nor be told what penalties ignore; ours can."""

CORE = """
input_ids INT32 -1             input_lengths* INT32 1         request_output_len* INT32 1
encoder_input_features FP16 -1,-1                             encoder_output_lengths INT32 1
decoder_input_ids INT32 -1     decoder_input_lengths INT32 1  num_return_sequences INT32 1
draft_input_ids INT32 -1       draft_logits FP32 -1,-1        draft_acceptance_threshold FP32 1
end_id INT32 1                 pad_id INT32 1                 stop_words_list INT32 2,-1
bad_words_list INT32 2,-1      embedding_bias FP32 -1         beam_width INT32 1
temperature FP32 1             repetition_penalty FP32 1      presence_penalty FP32 1
frequency_penalty FP32 1       len_penalty FP32 1             beam_search_diversity_rate FP32 1
runtime_top_k INT32 1          runtime_top_p FP32 1           runtime_top_p_min FP32 1
runtime_top_p_decay FP32 1     runtime_top_p_reset_ids INT32 1
early_stopping INT32 1         prompt_ignore_length INT32 1   min_tokens INT32 1
seed UINT64 1                  return_log_probs BOOL 1        return_context_logits BOOL 1
return_generation_logits BOOL 1                               return_perf_metrics BOOL 1
return_num_input_tokens BOOL 1 return_num_output_tokens BOOL 1
exclude_input_in_output BOOL 1 stop BOOL 1                    streaming BOOL 1
prompt_embedding_table FP16 -1,-1                             prompt_table_extra_ids UINT64 -1
prompt_vocab_size INT32 1      cross_attention_mask BOOL -1,-1
mrope_rotary_cos_sin FP32 -1   mrope_position_deltas INT64 1  lora_task_id UINT64 1
lora_weights FP16 -1,-1        lora_config INT32 -1,3         context_phase_params UINT8 -1
skip_cross_attn_blocks BOOL 1  retention_token_range_starts INT32 -1
retention_token_range_ends INT32 -1                           retention_token_range_priorities INT32 -1
retention_token_range_durations_ms INT32 -1                   retention_decode_priority INT32 1
retention_decode_duration_ms INT32 1                          guided_decoding_guide_type BYTES 1
guided_decoding_guide BYTES 1  lookahead_window_size INT32 1  lookahead_ngram_size INT32 1
lookahead_verification_set_size INT32 1
"""
UNDECLARED = """
no_repeat_ngram_size INT32 1   multimodal_embedding FP16 -1,-1
multimodal_hashes INT32 -1,-1  multimodal_item_runs INT32 -1,-1
runtime_top_k_min FP32 1
"""
"""Read by Triton's C++ backend without a declaration in config.pbtxt."""

GENERATED = """
cum_log_probs FP32 -1          output_log_probs FP32 -1,-1    context_logits FP32 -1,-1
generation_logits FP32 -1,-1,-1                               batch_index INT32 1
sequence_index INT32 1         kv_cache_alloc_new_blocks INT32 1
kv_cache_reused_blocks INT32 1 kv_cache_alloc_total_blocks INT32 1
arrival_time_ns INT64 1        first_scheduled_time_ns INT64 1
first_token_time_ns INT64 1    last_token_time_ns INT64 1     acceptance_rate FP32 1
total_accepted_draft_tokens INT32 1                           total_draft_tokens INT32 1
num_input_tokens INT32 1       num_output_tokens INT32 1
"""
TEXT_OUTPUT = "text_output BYTES -1"
MODELS = {
    "ensemble": (TEXT + OURS, TEXT_OUTPUT + GENERATED),
    "tensorrt_llm_bls": (
        TEXT
        + OURS
        + """
image_input FP16 -1,3,-1,-1    image_bytes_input UINT8 -1,-1,-1,-1
image_url_input BYTES 1        video_bytes_input UINT8 -1,-1,-1,-1
num_draft_tokens INT32 1       use_draft_logits BOOL 1
""",
        TEXT_OUTPUT + GENERATED,
    ),
    "tensorrt_llm": (
        CORE + UNDECLARED,
        GENERATED
        + """
output_ids INT32 -1,-1         sequence_length INT32 -1       context_phase_params UINT8 -1
""",
    ),
    "preprocessing": (
        """
QUERY* BYTES 1                 DECODER_QUERY BYTES 1          REQUEST_OUTPUT_LEN* INT32 1
BAD_WORDS_DICT BYTES -1        STOP_WORDS_DICT BYTES -1       EMBEDDING_BIAS_WORDS BYTES -1
EMBEDDING_BIAS_WEIGHTS FP32 -1 END_ID INT32 1                 PAD_ID INT32 1
PROMPT_TABLE_EXTRA_ID UINT64 1
IMAGE_BYTES UINT8 -1,-1,-1,-1  IMAGE_URL BYTES 1              IMAGES BYTES -1
VIDEO_BYTES UINT8 -1,-1,-1,-1
""",
        """
INPUT_ID INT32 -1              REQUEST_INPUT_LEN INT32 1      DECODER_INPUT_ID INT32 -1
REQUEST_DECODER_INPUT_LEN INT32 1                             BAD_WORDS_IDS INT32 2,-1
STOP_WORDS_IDS INT32 2,-1      EMBEDDING_BIAS FP32 -1         REQUEST_OUTPUT_LEN INT32 -1
OUT_END_ID INT32 1             OUT_PAD_ID INT32 1             OUT_PROMPT_TABLE_EXTRA_IDS UINT64 -1
""",
    ),
    "postprocessing": ("TOKENS_BATCH* INT32 -1,-1 SEQUENCE_LENGTH* INT32 -1", "OUTPUT BYTES -1"),
}
"""Inputs and outputs of each model; a star marks required inputs."""

Tensors = dict[str, tuple[str, list[int], bool]]


def parse(table: str) -> Tensors:
    words = table.split()
    return {
        name.rstrip("*"): (data_type, [int(dim) for dim in dims.split(",")], name.endswith("*"))
        for name, data_type, dims in zip(words[::3], words[1::3], words[2::3], strict=True)
    }


@pytest.mark.parametrize("model", MODELS)
def test_model_declares_the_tensors_of_the_contract(model: str) -> None:
    config = describe_config(triton_models(TritonSettings())[model])

    def named(data_type: model_config_pb2.DataType.ValueType) -> str:
        name = model_config_pb2.DataType.Name(data_type)
        return name.removeprefix("TYPE_").replace("STRING", "BYTES")

    given: Tensors = {
        i.name: (named(i.data_type), list(i.dims), not i.optional) for i in config.input
    }
    told: Tensors = {o.name: (named(o.data_type), list(o.dims), False) for o in config.output}
    inputs, outputs = MODELS[model]
    assert given == parse(inputs)
    assert told == parse(outputs)


@pytest.mark.parametrize("data_type", ["FP32", "FP16", "BF16"])
def test_logits_outputs_have_the_configured_type(data_type: str) -> None:
    own = {"template": "ensemble", "logits_data_type": data_type}
    settings = TritonSettings.model_validate({"models": {"ensemble": own}})
    model = triton_models(settings)["ensemble"]
    assert model.outputs["context_logits"].data_type == data_type
    assert model.outputs["generation_logits"].data_type == data_type
    request = kserve.ModelInferRequest(model_name="ensemble")
    for name, kind, data in (
        ("text_input", "BYTES", b"\1\0\0\0x"),
        ("max_tokens", "INT32", b"\1\0\0\0"),
        ("return_context_logits", "BOOL", b"\1"),
    ):
        request.inputs.add(name=name, datatype=kind, shape=(1, 1))
        request.raw_input_contents.append(data)
    (item,) = asked(read_call(model, request)).items
    assert item.config.output.logits_data_type == {"FP32": 1, "FP16": 2, "BF16": 3}[data_type]
