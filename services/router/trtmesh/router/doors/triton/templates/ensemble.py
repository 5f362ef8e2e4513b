"""Text in, text out: `ensemble` and `tensorrt_llm_bls`."""

from __future__ import annotations

from dataclasses import dataclass

from trtmesh.chassis.errors import TrtmeshError, Unsupported, UnsupportedField
from trtmesh.router.doors.triton.quoted import Quoted
from trtmesh.router.doors.triton.templates.generation import ExecutorTemplate, ItemFailure, quoting
from trtmesh.router.doors.triton.templates.template import Call
from trtmesh.router.doors.triton.templates.tensor_table import (
    BLS_INPUTS,
    ENSEMBLE_INPUTS,
    TEXT_OUTPUT,
)

VISION_INPUTS = frozenset(
    {"image_input", "image_bytes_input", "image_url_input", "video_bytes_input"}
)


@dataclass(frozen=True, kw_only=True)
class BlsTemplate(ExecutorTemplate):
    """Takes draft tokens, with upstream's refusals around speculation."""

    def check(self, call: Call) -> None:
        super().check(call)
        drafted = call.inputs.get("num_draft_tokens")
        if drafted is None or all(drafted.scalar(row) <= 0 for row in range(call.batch_size)):
            return
        for found, refusal in (
            (call.streaming, "streaming is not supported with speculative decoding"),
            (
                call.flag("return_context_logits"),
                "context logits are not supported with speculative decoding",
            ),
            (
                bool(VISION_INPUTS & call.inputs.keys()),
                "Multimodal and speculative decoding is not currently supported",
            ),
            (call.batch_size > 1, "Speculative decoding does not support batch size > 1."),
        ):
            if found:
                raise Quoted(refusal, Unsupported())

    def failed(self, call: Call, failure: ItemFailure) -> TrtmeshError:
        error = failure.error
        if isinstance(error, UnsupportedField) and "draft.num_draft_tokens" in error.fields:
            return quoting(call, "cannot perform speculative decoding without draft model", error)
        return super().failed(call, failure)


ENSEMBLE = ExecutorTemplate(
    name="ensemble", backend="", inputs=ENSEMBLE_INPUTS, outputs=(TEXT_OUTPUT,), text=True
)
TENSORRT_LLM_BLS = BlsTemplate(
    name="tensorrt_llm_bls",
    backend="python",
    inputs=BLS_INPUTS,
    outputs=(TEXT_OUTPUT,),
    text=True,
    final_alone=True,
    parameters=("accumulate_tokens",),
)
