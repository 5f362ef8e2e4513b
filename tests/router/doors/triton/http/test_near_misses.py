"""Keys that are refused because their sender took them for inputs, and keys that pass as parameters."""

from __future__ import annotations

import pytest
from trtmesh.chassis.errors import InvalidRequest
from trtmesh.router.doors.triton.http.near_misses import refuse_near_miss
from trtmesh.router.doors.triton.models import triton_models
from trtmesh.router.doors.triton.settings import TritonSettings

MODELS = triton_models(
    TritonSettings.model_validate(
        {"models": {name: {"template": name} for name in ("ensemble", "tensorrt_llm", "llmapi")}}
    )
)


@pytest.mark.parametrize(
    ("model", "key", "meant"),
    [
        ("ensemble", "temprature", "temperature"),
        ("ensemble", "Temperature", "temperature"),
        ("ensemble", "topK", "top_k"),
        ("ensemble", "max_new_tokens", "max_tokens"),
        ("ensemble", "stop_word", "stop_words"),
        ("ensemble", "repeat_penalty", "repetition_penalty"),
        ("ensemble", "prioriti", "priority"),
        ("ensemble", "streaming", "stream"),
        ("ensemble", "request_output_len", "max_tokens"),
        ("ensemble", "runtime_top_p", "top_p"),
        ("ensemble", "len_penalty", "length_penalty"),
        ("ensemble", "sampling_param_temperature", "temperature"),
        ("tensorrt_llm", "top_k", "runtime_top_k"),
        ("tensorrt_llm", "stream", "streaming"),
        ("llmapi", "temperature", "sampling_param_temperature"),
    ],
)
def test_near_miss_is_refused_with_the_name_that_was_meant(
    model: str, key: str, meant: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        refuse_near_miss(MODELS[model], key)
    assert caught.value.field == key
    assert caught.value.problem.endswith(f"did you mean {meant}?")


@pytest.mark.parametrize("key", ["lora_path", "input_ids", "num_draft_tokens", "TOKENS_BATCH"])
def test_input_without_effect_in_this_model_is_refused(key: str) -> None:
    with pytest.raises(InvalidRequest, match="without effect in model 'ensemble'; leave it out"):
        refuse_near_miss(MODELS["ensemble"], key)


@pytest.mark.parametrize(
    "key",
    [
        *("user", "model", "n", "logprobs", "echo", "best_of", "metadata", "tools", "min_p"),
        *("sequence_id", "sequence_start", "sequence_end", "Content", "x" * 100, "", "ü"),
        *("priority", "timeout", "request_type"),
    ],
)
def test_other_key_passes_as_a_parameter(key: str) -> None:
    for model in MODELS.values():
        refuse_near_miss(model, key)
