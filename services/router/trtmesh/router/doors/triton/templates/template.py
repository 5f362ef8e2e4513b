"""The templates of TensorRT-LLM's Triton models: what every model of one has in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from trtmesh.router.doors.triton.model_settings import LogitsDataType, Template
from trtmesh.router.doors.triton.templates.inputs import (
    BLS_INPUTS,
    TEXT_INPUTS,
    TOKEN_INPUTS,
    InputSpec,
)
from trtmesh.router.doors.triton.templates.llmapi_specs import LLMAPI_INPUTS, LLMAPI_OUTPUTS
from trtmesh.router.doors.triton.templates.specs import (
    DISAGGREGATED_INPUTS,
    HANDOFF_OUTPUT,
    POSTPROCESSING_INPUTS,
    POSTPROCESSING_OUTPUTS,
    PREPROCESSING_INPUTS,
    PREPROCESSING_OUTPUTS,
    TEXT_OUTPUT,
    TOKEN_OUTPUTS,
    generation_outputs,
)
from trtmesh.router.doors.triton.tensors import TensorSpec


class Kind(Enum):
    """What a model makes of a request."""

    TEXT = "text"
    """Text in, text out."""
    TOKENS = "tokens"
    """Token ids in, token ids out."""
    PREPROCESSING = "preprocessing"
    """Text in, the inputs of the core model out."""
    POSTPROCESSING = "postprocessing"
    """Token ids in, text out."""


@dataclass(frozen=True, slots=True)
class Form:
    """What the models of one template have in common."""

    kind: Kind
    backend: str
    inputs: tuple[InputSpec, ...]
    outputs: tuple[TensorSpec, ...]
    final_alone: bool = False
    """Whether the end of a stream is a response of its own."""
    accumulates: bool | None = False
    """Whether texts accumulate where a model does not say; None is what the door's settings say."""
    batched: bool = True
    """Whether tensors have a batch dimension."""
    details: bool = True
    """Whether it has the outputs that the generating ones of the five models share."""

    @property
    def generates(self) -> bool:
        return self.kind in (Kind.TEXT, Kind.TOKENS)

    def all_outputs(self, logits_data_type: LogitsDataType = "FP32") -> tuple[TensorSpec, ...]:
        """Every output."""
        return (*self.outputs, *(generation_outputs(logits_data_type) if self.details else ()))


FORMS: Mapping[Template, Form] = {
    "ensemble": Form(Kind.TEXT, "", TEXT_INPUTS, (TEXT_OUTPUT,)),
    "tensorrt_llm_bls": Form(
        Kind.TEXT, "python", BLS_INPUTS, (TEXT_OUTPUT,), final_alone=True, accumulates=None
    ),
    "tensorrt_llm": Form(
        Kind.TOKENS, "tensorrtllm", TOKEN_INPUTS, (*TOKEN_OUTPUTS, HANDOFF_OUTPUT)
    ),
    "disaggregated_serving_bls": Form(
        Kind.TOKENS, "python", DISAGGREGATED_INPUTS, TOKEN_OUTPUTS, final_alone=True
    ),
    "llmapi": Form(
        Kind.TEXT,
        "python",
        LLMAPI_INPUTS,
        LLMAPI_OUTPUTS,
        accumulates=True,
        batched=False,
        details=False,
    ),
    "preprocessing": Form(
        Kind.PREPROCESSING, "python", PREPROCESSING_INPUTS, PREPROCESSING_OUTPUTS, details=False
    ),
    "postprocessing": Form(
        Kind.POSTPROCESSING, "python", POSTPROCESSING_INPUTS, POSTPROCESSING_OUTPUTS, details=False
    ),
}
