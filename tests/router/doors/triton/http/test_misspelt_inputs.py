"""Keys that are refused because their sender took them for inputs, and keys that pass as parameters."""

from __future__ import annotations

import pytest
from trtmesh.chassis.errors import InvalidRequest
from trtmesh.router.doors.triton.http.misspelt_inputs import MOST_COMPARED, MisspeltInputs, _alike
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
        ("llmapi", "image_url_input", "image_url"),
    ],
)
def test_near_miss_is_refused_with_the_name_that_was_meant(
    model: str, key: str, meant: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        MisspeltInputs(MODELS[model]).refuse(key)
    assert caught.value.field == key
    assert caught.value.problem.endswith(f"did you mean {meant}?")


@pytest.mark.parametrize(
    ("model", "key"),
    [
        *(("ensemble", key) for key in ("lora_path", "input_ids", "num_draft_tokens")),
        ("ensemble", "TOKENS_BATCH"),
        # Its image_input has pixels.
        *(("ensemble", key) for key in ("image_url_input", "image_url", "image_bytes_input")),
        ("llmapi", "image_input"),
    ],
)
def test_input_without_effect_in_this_model_is_refused(model: str, key: str) -> None:
    with pytest.raises(InvalidRequest, match=f"effect in model '{model}'; leave it out"):
        MisspeltInputs(MODELS[model]).refuse(key)


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
        MisspeltInputs(model).refuse(key)


def test_only_the_first_unknown_keys_of_a_request_are_compared() -> None:
    """The comparisons hold the event loop."""
    of_one_request = MisspeltInputs(MODELS["ensemble"])
    before = _alike.cache_info().misses
    for number in range(MOST_COMPARED * 16):
        of_one_request.refuse(f"customer {number}")
    assert _alike.cache_info().misses - before == MOST_COMPARED
    with pytest.raises(InvalidRequest, match="did you mean max_tokens"):
        of_one_request.refuse("request_output_len")
