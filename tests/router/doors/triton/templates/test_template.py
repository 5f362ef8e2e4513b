"""Errors in the names of the tensors of a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from trtmesh.chassis.errors import InvalidField, QueueFull
from trtmesh.router.doors.triton.models import triton_models
from trtmesh.router.doors.triton.settings import TritonSettings
from trtmesh.router.doors.triton.templates.template import Call

MODELS = triton_models(TritonSettings())


def call(model: str, *, rows: int = 1, sent: Mapping[str, Any] | None = None) -> Call:
    return Call(MODELS[model], "", sent or {}, rows, True, frozenset(), {})


@pytest.mark.parametrize(
    ("field", "tensor"),
    [
        ("kv_cache.token_ranges[3].token_end", "retention_token_range_ends[3]"),
        ("kv_cache.token_ranges", "retention_token_range_starts"),
        ("kv_cache.token_ranges[3]", "retention_token_range_starts[3]"),
        ("lora.weights.data_type", "lora_weights.data_type"),
        ("lora.weightsome", "lora.weightsome"),
        ("sampling.top_k", "runtime_top_k"),
        ("handoff.phase", "parameter 'request_type'"),
    ],
)
def test_tensor_of_a_field(field: str, tensor: str) -> None:
    assert call("tensorrt_llm").tensor_of(field) == tensor


@pytest.mark.parametrize("name", ["runtime_top_p_min", "runtime_top_k_min"])
def test_error_names_the_sent_tensor_of_a_shared_field(name: str) -> None:
    assert call("tensorrt_llm", sent={name: None}).tensor_of("sampling.top_p_min") == name


def test_error_of_ids_does_not_name_their_length() -> None:
    sent = {"input_ids": None, "input_lengths": None}
    assert call("tensorrt_llm", sent=sent).tensor_of("prompt.token_ids") == "input_ids"


def test_sentence_names_tensors_and_the_row_of_a_batch() -> None:
    error = InvalidField.of("sampling.top_p", 3.0, "in [0, 1]").of_item(1)
    sentence = "top_p is 3.0 but must be in [0, 1]"
    assert call("ensemble").sentence(error) == sentence
    assert call("ensemble", rows=2).sentence(error) == f"row 1: {sentence}"
    limited = InvalidField.of("stopping.min_tokens", 9, "at most 5", "stopping.max_tokens")
    assert (
        call("ensemble").sentence(limited) == "min_tokens is 9 but must be at most 5 (max_tokens)"
    )
    assert call("ensemble", rows=2).sentence(QueueFull("full")) == "full"


def test_every_setter_declares_its_fields() -> None:
    models = triton_models(
        TritonSettings.model_validate({"models": {"llmapi": {"template": "llmapi"}}})
    )
    for model in [*MODELS.values(), *models.values()]:
        for spec in model.inputs.values():
            if spec.put and spec.name not in NO_FIELD:
                assert spec.put.fields, spec.name


NO_FIELD = {"lora_path", "lora_ckpt_source"}
