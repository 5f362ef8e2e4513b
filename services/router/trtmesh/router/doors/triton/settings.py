"""Settings of the Triton door and of each of its models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from trtmesh.chassis.settings import Settings, none_word, parse_json_text, split_commas

TemplateName = Literal[
    "ensemble",
    "tensorrt_llm_bls",
    "tensorrt_llm",
    "preprocessing",
    "postprocessing",
    "disaggregated_serving_bls",
    "llmapi",
    "gpt",
]
"""Templates of TensorRT-LLM's Triton backend, by their names there; `llmapi` and `gpt` are the other models called
`tensorrt_llm`."""

DEFAULT_STEPS: Mapping[TemplateName, tuple[str, ...]] = {
    "ensemble": ("preprocessing", "tensorrt_llm", "postprocessing"),
    "tensorrt_llm_bls": ("preprocessing", "tensorrt_llm", "postprocessing"),
    "disaggregated_serving_bls": ("tensorrt_llm",),
}
"""Default steps of ensembles and BLS."""

Release = Literal[
    "v0.5.0",
    "v0.6.0",
    "v0.6.1",
    "v0.7.0",
    "v0.7.1",
    "v0.7.2",
    "v0.8.0",
    "v0.9.0",
    "v0.10.0",
    "v0.11.0",
    "v0.12.0",
    "v0.13.0",
    "v0.14.0",
    "v0.15.0",
    "v0.16.0",
    "v0.17.0",
    "v0.18.0",
    "v0.18.2",
    "v0.19.0",
    "2025-05",
    "2026-05",
]
"""Releases of TensorRT-LLM's Triton backend, then its tree at the move to TensorRT-LLM and before the removal of the
models."""
NEWEST_RELEASE: Release = "2026-05"

LogitsDataType = Literal["FP32", "FP16", "BF16"]
MaxBatchSize = Annotated[int, Field(ge=1, le=65536)]
ModelName = Annotated[str, Field(pattern=r"^[^/\s]+$", max_length=256)]


class TritonModelSettings(Settings):
    """A model. The door's settings are the defaults."""

    template: TemplateName
    """The template of its tensors and behaviour."""
    model: str = ""
    """Serving model of the mesh; empty means the default one."""
    draft_model: str = ""
    """Model of the mesh that drafts `num_draft_tokens` for a BLS, with the same tokenizer; empty means none."""
    decoupled: bool | None = None
    """Whether a stream gets several responses to a request."""
    strict_transaction_policy: bool | None = None
    """Whether a decoupled model refuses unary calls, as in Triton."""
    release: Release | None = None
    """Release with the names, types and dims that the model's configuration declares."""
    max_batch_size: MaxBatchSize | None = None
    """Most rows of a request; `llmapi` has no batch dimension."""
    max_beam_width: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Most beams; unset leaves the limit to the engine."""
    exclude_input_in_output: bool | None = None
    """Whether the output leaves the prompt out, unless a request says otherwise."""
    accumulate_tokens: bool | None = None
    """Whether each response of a stream holds the whole text so far; default true for `llmapi`."""
    merge_tokens: bool | None = None
    """Whether a response of a stream may hold the tokens of several steps; false sends one for each token."""
    logits_data_type: LogitsDataType = "FP32"
    """Element type of logits outputs."""
    add_special_tokens: bool = True
    """Whether prompts are encoded with the tokenizer's special tokens."""
    skip_special_tokens: bool = True
    """Whether texts leave special tokens out."""
    normalize_log_probs: bool | None = None
    """Whether log-probabilities count only the tokens that could be chosen; unset leaves it to the engine."""
    wrap_token_ids: bool | None = None
    """Whether prompt ids outside of the vocabulary are taken modulo its size."""
    steps: tuple[str, ...] = ()
    """Models for which requests count too: an ensemble's steps, or the models behind a BLS."""

    @field_validator("steps")
    @classmethod
    def _has_steps(cls, steps: tuple[str, ...], known: ValidationInfo) -> tuple[str, ...]:
        template = known.data.get("template")
        if steps and template is not None and template not in DEFAULT_STEPS:
            raise ValueError(f"a model of template {template} has no steps")
        return steps

    @field_validator("draft_model")
    @classmethod
    def _has_drafts(cls, draft_model: str, known: ValidationInfo) -> str:
        template = known.data.get("template", "tensorrt_llm_bls")
        if draft_model and template != "tensorrt_llm_bls":
            raise ValueError(f"a model of template {template} takes no drafts of another")
        return draft_model


TritonModels = Annotated[Mapping[ModelName, TritonModelSettings], BeforeValidator(parse_json_text)]
"""Models by name; a flag or a variable gives them as JSON."""


DecoupledTemplate = Literal[
    "ensemble", "tensorrt_llm", "tensorrt_llm_bls", "disaggregated_serving_bls", "llmapi"
]


class TritonSettings(Settings):
    """The Triton door: Triton's models, in the words of their configurations."""

    enabled: bool = True
    """Whether KServe v2 requests are served beside the native API."""
    models: TritonModels = Field(default_factory=dict)
    """Models by name: the `template` and the differences from these settings; empty means the five of TensorRT-LLM's
    template, and NAME_ensemble and so on for each of several `router.models`. JSON in a flag or a variable."""
    decoupled: Annotated[tuple[DecoupledTemplate, ...], BeforeValidator(split_commas)] = get_args(
        DecoupledTemplate
    )
    """Templates whose models give a stream several responses to a request; the others give one."""
    strict_transaction_policy: bool = False
    """Whether decoupled models refuse unary calls, as in Triton; otherwise a unary call gets one whole response."""
    release: Release = NEWEST_RELEASE
    """Release with the names, types and dims that the models' configurations declare; requests of every release are
    served."""
    max_batch_size: MaxBatchSize = 128
    """Most rows of a request."""
    exclude_input_in_output: bool = False
    """Whether the output leaves the prompt out, unless a request says otherwise."""
    merge_tokens: bool = True
    """Whether a response of a stream may hold the tokens of several steps; false sends one for each token, as Triton
    does, for clients that count responses. Beams always come whole."""
    default_seed: Annotated[int | None, Field(ge=0, lt=2**64), BeforeValidator(none_word)] = 0
    """Seed of requests without one, as in TensorRT-LLM; `none` draws one for each request. `llmapi` always draws."""
    wrap_token_ids: bool = False
    """Whether prompt ids outside of the vocabulary are taken modulo its size, for benchmarks with random ids."""
