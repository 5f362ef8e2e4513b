"""`gpt`, upstream's first `tensorrt_llm`: a Python model over static batches, with the prompt always in the output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat

from trtmesh.router.doors.triton.templates.generation import ExecutorTemplate
from trtmesh.router.doors.triton.templates.outputs import (
    PAD_ID,
    Block,
    OutputBuilder,
    RowOutput,
    SequenceOutput,
)
from trtmesh.router.doors.triton.templates.template import Call
from trtmesh.router.doors.triton.templates.tensor_table import GPT_INPUTS, GPT_OUTPUTS
from trtmesh.router.doors.triton.tensors import Output, TensorSpec, pad_rows
from trtmesh.router.values.request import GenerationRequest
from trtmesh.v1 import router_pb2 as router_pb


@dataclass(frozen=True, kw_only=True)
class GptTemplate(ExecutorTemplate):
    """Answers once."""

    decoupled: bool = False

    def all_outputs(self, logits_data_type: str = "FP32") -> tuple[TensorSpec, ...]:
        return self.outputs

    def settle(self, item: router_pb.GenerateItem, call: Call) -> None:
        super().settle(item, call)
        item.config.output.text = False
        item.config.output.exclude_prompt = False

    def output_builder(self, call: Call, request: GenerationRequest) -> OutputBuilder:
        return GptOutputs(call)


class GptOutputs:
    """Makes the output tensors of one request."""

    only_new_text = False

    def __init__(self, call: Call) -> None:
        self._call = call
        self._log_probs = call.flag("output_log_probs")

    def build(self, block: Block) -> list[Output]:
        outputs = [self._ids(block)]
        if self._log_probs:
            outputs.append(_log_probs(block))
        return [output for output in outputs if self._call.wants(output.name)]

    def _ids(self, block: Block) -> Output:
        """[rows, beams, tokens], filled up with the row's end id."""
        rows = [[*row.prompt_ids, *s.token_ids] for row, s in _sequences(block)]
        pads = [self._end_id(row.index) for row, _ in _sequences(block)]
        longest, ids = pad_rows(rows, pads)
        shape = (len(block), len(rows) // len(block), longest)
        return Output.of_numbers("output_ids", "INT32", shape, ids)

    def _end_id(self, row: int) -> int:
        tensor = self._call.inputs.get("end_id")
        return PAD_ID if tensor is None else int(tensor.scalar(row))


def _log_probs(block: Block) -> Output:
    """[rows, tokens, beams] with 0 for the prompt and the padding."""
    rows = [[*repeat(0.0, len(row.prompt_ids)), *s.log_probs] for row, s in _sequences(block)]
    longest, _ = pad_rows(rows, repeat(0.0))
    beams = len(rows) // len(block)
    padded = [[*row, *repeat(0.0, longest - len(row))] for row in rows]
    by_token = [zip(*padded[at : at + beams], strict=True) for at in range(0, len(rows), beams)]
    elements = list(chain.from_iterable(chain.from_iterable(by_token)))
    return Output.of_numbers("log_probs", "FP32", (len(block), longest, beams), elements)


def _sequences(block: Block) -> Sequence[tuple[RowOutput, SequenceOutput]]:
    return [(row, sequence) for row, sequences in block for sequence in sequences]


GPT = GptTemplate(
    name="gpt",
    backend="python",
    inputs=GPT_INPUTS,
    outputs=GPT_OUTPUTS,
    text=False,
    is_core=True,
    reshapes_scalars=True,
)
