"""What can be said of each Triton model by itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from trtmesh.chassis.settings import Settings

Template = Literal[
    "ensemble",
    "tensorrt_llm_bls",
    "tensorrt_llm",
    "preprocessing",
    "postprocessing",
    "disaggregated_serving_bls",
    "llmapi",
]
"""A model of TensorRT-LLM's Triton backend by the name that its template has there; `llmapi` is the other model that is
called `tensorrt_llm` there."""

DEFAULT_STEPS: Mapping[Template, tuple[str, ...]] = {
    "ensemble": ("preprocessing", "tensorrt_llm", "postprocessing"),
    "tensorrt_llm_bls": ("preprocessing", "tensorrt_llm", "postprocessing"),
    "disaggregated_serving_bls": ("tensorrt_llm",),
}
"""Of the templates whose models ask others."""

LogitsDataType = Literal["FP32", "FP16", "BF16"]
MaxBatchSize = Annotated[int, Field(ge=1, le=65536)]
ModelName = Annotated[str, Field(pattern=r"^[^/\s]+$", max_length=256)]


class TritonModelSettings(Settings):
    """One model. What is unset is as the settings of the whole door say."""

    template: Template
    """Whose tensors and ways it has."""
    model: str | None = None
    """Model of the mesh behind it."""
    decoupled: bool | None = None
    """Whether it answers with a stream of responses."""
    max_batch_size: MaxBatchSize | None = None
    """Most rows of a request; `llmapi` has no batch dimension."""
    max_beam_width: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Most beams of a search; unset leaves it to the engine."""
    exclude_input_in_output: bool | None = None
    """Whether the prompt is left out of the output where a request does not say."""
    accumulate_tokens: bool | None = None
    """Whether each response of a stream holds the whole text so far; for `llmapi` it does unless said otherwise."""
    logits_data_type: LogitsDataType | None = None
    """Element type of logits outputs."""
    add_special_tokens: bool | None = None
    """Whether prompts are encoded with the special tokens that the tokenizer adds."""
    skip_special_tokens: bool | None = None
    """Whether texts leave special tokens out."""
    steps: tuple[str, ...] = ()
    """Names of the models that requests count for too: the steps that an ensemble tells, or the models that a BLS
    asks."""

    @field_validator("steps")
    @classmethod
    def _has_steps(cls, steps: tuple[str, ...], known: ValidationInfo) -> tuple[str, ...]:
        template = known.data.get("template")
        if steps and template is not None and template not in DEFAULT_STEPS:
            raise ValueError(f"a model of template {template} has no steps")
        return steps


def _parse_json(value: object) -> object:
    """A text as the JSON that it is; anything else as it is."""
    return json.loads(value) if isinstance(value, str) else value


TritonModels = Annotated[Mapping[ModelName, TritonModelSettings], BeforeValidator(_parse_json)]
"""Models by name; a flag or a variable gives them as JSON."""
