"""Token ids in, token ids out: `tensorrt_llm`, the core model, and `disaggregated_serving_bls`."""

from __future__ import annotations

from dataclasses import dataclass

from trtmesh.chassis.errors import InvalidRequest
from trtmesh.router.doors.triton.quoted import Quoted
from trtmesh.router.doors.triton.templates.generation import PHASES, ExecutorTemplate
from trtmesh.router.doors.triton.templates.template import Call, Share, Spent
from trtmesh.router.doors.triton.templates.tensor_table import (
    DISAGGREGATED_INPUTS,
    HANDOFF_OUTPUT,
    TOKEN_INPUTS,
    TOKEN_OUTPUTS,
)
from trtmesh.v1 import router_pb2 as router_pb

PROMPT_INPUTS = {"input_ids", "encoder_input_features"}


@dataclass(frozen=True, kw_only=True)
class TokenTemplate(ExecutorTemplate):
    """Tensors and rules common to both."""

    parameters: tuple[str, ...] = ("exclude_input_in_output",)

    def check_outputs(self, call: Call) -> None:
        for output in TOKEN_OUTPUTS:
            if not call.wants(output.name):
                raise InvalidRequest(
                    f"{output.name} tensor must be present in list of output tensors"
                )

    def check(self, call: Call) -> None:
        super().check(call)
        if not PROMPT_INPUTS & call.inputs.keys():
            raise Quoted(
                "input_ids or encoder_input_features is not present in the request",
                InvalidRequest(),
            )

    def settle(self, item: router_pb.GenerateItem, call: Call) -> None:
        super().settle(item, call)
        item.config.output.text = False
        if not item.config.stopping.HasField("end_id"):
            # The core model has no end id of its own.
            item.config.stopping.ignore_end_id = True

    def share(self, spent: Spent) -> Share:
        return Share(queued=spent.queued, infer=spent.generating)


@dataclass(frozen=True, kw_only=True)
class DisaggregatedTemplate(TokenTemplate):
    """Leaves both halves of a prompt to the placement."""

    def check(self, call: Call) -> None:
        super().check(call)
        phase = call.parameters.get("request_type", "context_and_generation")
        if phase in PHASES and phase != "context_and_generation":
            raise InvalidRequest(
                f"is {phase!r} but model '{call.model.name}' computes and continues a prompt; leave it out",
                field="handoff.phase",
                value=repr(phase),
                limit="context_and_generation",
            )


TENSORRT_LLM = TokenTemplate(
    name="tensorrt_llm",
    backend="tensorrtllm",
    inputs=TOKEN_INPUTS,
    outputs=(*TOKEN_OUTPUTS, HANDOFF_OUTPUT),
    text=False,
    is_core=True,
    reshapes_scalars=True,
)
DISAGGREGATED_SERVING_BLS = DisaggregatedTemplate(
    name="disaggregated_serving_bls",
    backend="python",
    inputs=DISAGGREGATED_INPUTS,
    outputs=TOKEN_OUTPUTS,
    text=False,
    dated=False,
    final_alone=True,
    needs_roles=True,
)
