"""What `tensorrt_llm_bls` answers to `num_draft_tokens`, in the words of Triton's BLS."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtmesh.chassis.errors import InternalError, TrtmeshError, UnsupportedField

if TYPE_CHECKING:
    from trtmesh.router.doors.triton.templates.generation import Call

DRAFT_TOKENS_FIELD = "draft.num_draft_tokens"
VISION_INPUTS = frozenset(
    {"image_input", "image_bytes_input", "image_url_input", "video_bytes_input"}
)


def check_speculation(call: Call) -> None:
    """Raises InternalError where a call drafts tokens and asks for what cannot be had with them."""
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
            raise InternalError(refusal)


def without_draft_model(error: TrtmeshError) -> TrtmeshError:
    """The error of an item; where it is that no worker drafts tokens, as Triton's BLS says it."""
    if isinstance(error, UnsupportedField) and DRAFT_TOKENS_FIELD in error.message:
        return InternalError(
            f"cannot perform speculative decoding without draft model: {error.message}"
        )
    return error
