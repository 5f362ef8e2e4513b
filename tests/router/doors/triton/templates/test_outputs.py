"""Output tensors of responses."""

from __future__ import annotations

from trtmesh.kserve import grpc_service_pb2 as kserve
from trtmesh.router.doors.triton.calls import read_call
from trtmesh.router.doors.triton.models import triton_models
from trtmesh.router.doors.triton.settings import TritonSettings
from trtmesh.router.doors.triton.templates.generation import GenerationTemplate
from trtmesh.router.doors.triton.templates.outputs import OutputBuilder, RowOutput, SequenceOutput
from trtmesh.v1 import generation_pb2 as pb

VOCABULARY = 3


def builder() -> OutputBuilder:
    """For a streamed request with generation logits in FP16."""
    model = triton_models(
        TritonSettings.model_validate(
            {"models": {"ensemble": {"template": "ensemble", "logits_data_type": "FP16"}}}
        )
    )["ensemble"]
    sent = kserve.ModelInferRequest(model_name=model.name)
    for name, data_type, data in (
        ("text_input", "BYTES", b"\1\0\0\0x"),
        ("max_tokens", "INT32", b"\5\0\0\0"),
        ("stream", "BOOL", b"\1"),
        ("return_generation_logits", "BOOL", b"\1"),
    ):
        sent.inputs.add(name=name, datatype=data_type, shape=(1, 1))
        sent.raw_input_contents.append(data)
    call = read_call(model, sent)
    assert isinstance(model.template, GenerationTemplate)
    return model.template.output_builder(call, model.template.request(call, "name"))


def test_logits_of_a_response_without_new_tokens_have_the_columns_of_the_others() -> None:
    """Clients join the logits of a stream."""
    outputs = builder()
    row = RowOutput(0, [SequenceOutput(0)])
    (sequence,) = row.sequences
    sequence.logits.append(
        pb.Tensor(data_type=pb.DATA_TYPE_FP16, shape=[2, VOCABULARY], data=b"\1" * 12)
    )
    told = [outputs.build([(row, [sequence])])]
    sequence.clear()
    sequence.texts.append("held back until the end")
    told.append(outputs.build([(row, [sequence])]))
    logits = [output for response in told for output in response if "logits" in output.name]
    assert [output.shape for output in logits] == [(1, 1, 2, VOCABULARY), (1, 1, 0, VOCABULARY)]
    assert {output.data_type for output in logits} == {"FP16"}
