"""`llmapi`, upstream's other `tensorrt_llm`: other names, no batch dimension, an output element for each sequence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trtmesh.chassis.errors import Cancelled, InvalidRequest
from trtmesh.router.doors.triton.quoted import Quoted
from trtmesh.router.doors.triton.templates.generation import GenerationTemplate
from trtmesh.router.doors.triton.templates.outputs import (
    Block,
    OutputBuilder,
    SequenceOutput,
    metrics_of,
)
from trtmesh.router.doors.triton.templates.template import Call
from trtmesh.router.doors.triton.templates.tensor_table import (
    LLMAPI_INPUTS,
    LLMAPI_OUTPUTS,
    LLMAPI_PERF_OUTPUTS,
)
from trtmesh.router.doors.triton.tensors import Output
from trtmesh.router.values.request import GenerationRequest
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb

MAX_TOKENS = 32
"""New tokens where a request does not say, as in TensorRT-LLM's LLM API."""
FINISH_REASONS: Mapping[int, str] = {
    pb.FINISH_REASON_END_ID: "stop",
    pb.FINISH_REASON_STOP_WORD: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_STOPPED: "cancelled",
    pb.FINISH_REASON_CANCELLED: "cancelled",
}
NOTHING = "None"
"""Stands for no reason (yet)."""


@dataclass(frozen=True, kw_only=True)
class LlmApiTemplate(GenerationTemplate):
    """The refusals and defaults of upstream's Python model."""

    def check(self, call: Call) -> None:
        call.check_streaming("Streaming is only supported in decoupled mode.")
        given = {"lora_id", "lora_name", "lora_path"} & call.inputs.keys()
        # The path may be left out: adapters are known by id and name.
        if given and not given >= {"lora_id", "lora_name"}:
            raise Quoted(
                "lora_id, lora_name, and lora_path must all be provided together", InvalidRequest()
            )

    def settle(self, item: router_pb.GenerateItem, call: Call) -> None:
        super().settle(item, call)
        if not item.config.stopping.HasField("max_tokens"):
            item.config.stopping.max_tokens = MAX_TOKENS

    def unnamed_stop(self) -> InvalidRequest:
        return InvalidRequest("A request id must be provided for request cancellation")

    def check_stopped(self) -> None:
        raise Cancelled("Request cancelled by client")

    def output_builder(self, call: Call, request: GenerationRequest) -> OutputBuilder:
        return LlmApiOutputs(call)


class LlmApiOutputs:
    """Makes the output tensors of one request."""

    only_new_text = False

    def __init__(self, call: Call) -> None:
        self._call = call
        self._perf_metrics = call.flag("sampling_param_return_perf_metrics")

    def build(self, block: Block) -> list[Output]:
        ((row, sequences),) = block
        outputs = [Output.of_texts("text_output", ["".join(s.texts) for s in sequences])]
        outputs += self._reasons(sequences)
        if self._perf_metrics:
            outputs += _perf_metrics(metrics_of(row, sequences))
        return [output for output in outputs if self._call.wants(output.name)]

    def _reasons(self, sequences: Sequence[SequenceOutput]) -> Iterable[Output]:
        if self._call.flag("return_finish_reason"):
            reasons = [FINISH_REASONS.get(s.finish_reason, NOTHING) for s in sequences]
            yield Output.of_texts("finish_reason", reasons)
        if self._call.flag("return_stop_reason"):
            yield Output.of_texts("stop_reason", [s.stop_text or NOTHING for s in sequences])
        if self._call.flag("return_cumulative_logprob"):
            sums = [s.cumulative_log_prob for s in sequences]
            yield Output.of_numbers("cumulative_logprob", "FP32", (len(sums),), sums)


def _perf_metrics(metrics: pb.PerfMetrics) -> Iterable[Output]:
    reused, computed = metrics.kv_cache_reused_blocks, metrics.kv_cache_alloc_new_blocks
    own = {
        "kv_cache_reused_block": reused,
        # A block not found is computed.
        "kv_cache_missed_block": computed,
        "kv_cache_hit_rate": reused / (reused + computed) if reused + computed else 0.0,
    }
    for spec in LLMAPI_PERF_OUTPUTS:
        number = own[spec.name] if spec.name in own else getattr(metrics, spec.name)
        yield Output.of_numbers(spec.name, spec.data_type, (1,), [number])


LLMAPI = LlmApiTemplate(
    name="llmapi",
    backend="python",
    inputs=LLMAPI_INPUTS,
    outputs=LLMAPI_OUTPUTS,
    text=True,
    is_core=True,
    batched=False,
    dated=False,
    accumulates=True,
    parameters=("accumulate_tokens",),
)
