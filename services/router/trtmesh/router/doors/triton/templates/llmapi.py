"""What came of a request to the llmapi flavour of `tensorrt_llm`, as output tensors."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence

from trtmesh.router.doors.triton.grpc.responses import Output, text_data
from trtmesh.router.doors.triton.templates.generation import Call
from trtmesh.router.doors.triton.templates.outputs import Block, RowOutput, SequenceOutput
from trtmesh.router.doors.triton.tensors import ELEMENT_CODES
from trtmesh.v1 import generation_pb2 as pb

FINISH_REASONS: Mapping[int, str] = {
    pb.FINISH_REASON_END_ID: "stop",
    pb.FINISH_REASON_STOP_WORD: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_STOPPED: "cancelled",
    pb.FINISH_REASON_CANCELLED: "cancelled",
}
NOTHING = "None"
"""What stands for no reason (yet)."""


class LlmApiOutputs:
    """Makes the tensors that one request asked for: one element a sequence."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._perf_metrics = call.flag("sampling_param_return_perf_metrics")

    def build(self, block: Block) -> list[Output]:
        """The outputs of one response."""
        ((row, sequences),) = block
        outputs = [_texts("text_output", ("".join(s.texts) for s in sequences))]
        outputs += self._reasons(sequences)
        if self._perf_metrics:
            outputs += _perf_metrics(row)
        return [output for output in outputs if self._call.wants(output.name)]

    def _reasons(self, sequences: Sequence[SequenceOutput]) -> Iterable[Output]:
        if self._call.flag("return_finish_reason"):
            reasons = (FINISH_REASONS.get(s.finish_reason, NOTHING) for s in sequences)
            yield _texts("finish_reason", reasons)
        if self._call.flag("return_stop_reason"):
            yield _texts("stop_reason", (s.stop_text or NOTHING for s in sequences))
        if self._call.flag("return_cumulative_logprob"):
            sums = [s.cumulative_log_prob for s in sequences]
            data = struct.pack(f"<{len(sums)}f", *sums)
            yield Output("cumulative_logprob", "FP32", (len(sums),), data)


def _perf_metrics(row: RowOutput) -> Iterable[Output]:
    metrics = row.perf_metrics
    reused, computed = metrics.kv_cache_reused_blocks, metrics.kv_cache_alloc_new_blocks
    hit_rate = reused / (reused + computed) if reused + computed else 0.0
    for name, data_type, number in (
        ("kv_cache_reused_block", "INT32", reused),
        # Every block that was not found was computed anew.
        ("kv_cache_missed_block", "INT32", computed),
        ("kv_cache_alloc_new_blocks", "INT32", computed),
        ("kv_cache_alloc_total_blocks", "INT32", metrics.kv_cache_alloc_total_blocks),
        ("kv_cache_hit_rate", "FP32", hit_rate),
        ("arrival_time_ns", "INT64", metrics.arrival_time_ns),
        ("first_scheduled_time_ns", "INT64", metrics.first_scheduled_time_ns),
        ("first_token_time_ns", "INT64", metrics.first_token_time_ns),
        ("last_token_time_ns", "INT64", metrics.last_token_time_ns),
        ("acceptance_rate", "FP32", metrics.acceptance_rate),
        ("total_accepted_draft_tokens", "INT32", metrics.total_accepted_draft_tokens),
        ("total_draft_tokens", "INT32", metrics.total_draft_tokens),
    ):
        yield Output(name, data_type, (1,), struct.pack(f"<{ELEMENT_CODES[data_type]}", number))


def _texts(name: str, texts: Iterable[str]) -> Output:
    each = list(texts)
    return Output(name, "BYTES", (len(each),), text_data(each))
