"""PlainText agrees with Answers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from trtmesh.chassis.errors import DeadlineExceeded, InternalError, TrtmeshError
from trtmesh.kserve import grpc_service_pb2 as kserve
from trtmesh.router.doors.triton.answers import Answers, PlainText
from trtmesh.router.doors.triton.calls import read_call
from trtmesh.router.doors.triton.grpc.responses import ResponseWriter
from trtmesh.router.doors.triton.models import triton_models
from trtmesh.router.doors.triton.settings import TritonSettings
from trtmesh.router.doors.triton.templates.generation import GenerationTemplate
from trtmesh.router.doors.triton.templates.template import Call, Model
from trtmesh.router.doors.triton.tensors import Output, text_data
from trtmesh.router.streams.client_stream import Waiting, WaitingEvent, WaitingTokens
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb

MODELS = triton_models(TritonSettings())


def text(data: str) -> Output:
    return Output("text_output", "BYTES", (1,), text_data([data]))


def to_error(failed: router_pb.ItemFailed) -> TrtmeshError:
    return InternalError(failed.error.message)


def some_news(random_: random.Random) -> list[list[Waiting]]:
    """Random batches of events of a request, up to the end."""
    events: list[Waiting] = [
        WaitingEvent(router_pb.GenerateEvent(accepted=router_pb.RequestAccepted()), 0),
        WaitingEvent(router_pb.GenerateEvent(item_started=router_pb.ItemStarted(seed=1)), 0),
    ]
    for offset in range(random_.randrange(5)):
        texts = [random_.choice(["", "a", "ü"]) for _ in range(random_.choice([1, 1, 2]))]
        events.append(WaitingTokens(0, 0, offset, [offset], texts, None, 5))
    ending = router_pb.GenerateEvent(item_finished=router_pb.ItemFinished())
    if random_.random() < 0.4:
        ending = router_pb.GenerateEvent(item_failed=router_pb.ItemFailed())
        ending.item_failed.error.message = "it broke"
    else:
        reason = random_.choice([pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_CANCELLED])
        ending.item_finished.reason = reason
        finished = router_pb.GenerateEvent(
            sequence_finished=router_pb.SequenceFinished(reason=reason)
        )
        events.append(WaitingEvent(finished, 0))
    events.append(WaitingEvent(ending, 0))
    messages: list[list[Waiting]] = [[]]
    for event in events:
        if random_.random() < 0.6:
            messages.append([])
        messages[-1].append(event)
    return messages


def template_of(model: Model) -> GenerationTemplate:
    assert isinstance(model.template, GenerationTemplate)
    return model.template


def streaming_call(model: Model) -> Call:
    sent = kserve.ModelInferRequest(model_name=model.name)
    for tensor, data_type, data in (
        ("text_input", "BYTES", b"\1\0\0\0x"),
        ("max_tokens", "INT32", b"\5\0\0\0"),
        ("stream", "BOOL", b"\1"),
    ):
        sent.inputs.add(name=tensor, datatype=data_type, shape=(1, 1))
        sent.raw_input_contents.append(data)
    return read_call(model, sent)


@pytest.mark.parametrize("name", ["ensemble", "tensorrt_llm_bls"])
def test_plain_text_gives_the_responses_of_answers(name: str) -> None:
    model, call = MODELS[name], streaming_call(MODELS[name])
    request = template_of(model).request(call, "")
    builder = template_of(model).output_builder(call, request)
    assert builder.only_new_text
    seen = set()
    for seed in range(500):
        everything = Answers(call, request, builder, to_error, with_prompts=True)
        plain = PlainText(to_error, final_alone=model.template.final_alone)
        writer = ResponseWriter(name, "")
        for message in some_news(random.Random(seed)):
            everything.see(message)
            plain.see(message)
            assert not everything.texts_to_complete()
            assert not plain.texts_to_complete()
            expected, answers = everything.take(), plain.take()
            assert [(a.final, a.only_end, str(a.error)) for a in answers] == [
                (a.final, a.only_end, str(a.error)) for a in expected
            ], seed
            assert [writer.unary(a.outputs) for a in answers] == [
                writer.unary(a.outputs) for a in expected
            ], seed
            seen |= {(bool(a.outputs), a.final, a.only_end, bool(a.error)) for a in answers}
    assert len(seen) == 3, seen


@pytest.mark.parametrize("decoupled", [True, False])
def test_item_cancelled_by_a_worker_fails_with_deadline_exceeded(decoupled: bool) -> None:
    """Workers cancel items only at the deadline."""
    call = streaming_call(MODELS["ensemble"])
    template = template_of(call.model)
    request = template.request(call, "")
    call = replace(call, decoupled=decoupled)
    reason = pb.FINISH_REASON_CANCELLED
    news: list[Waiting] = [
        WaitingTokens(0, 0, 0, [7], ["a"], None, 4),
        WaitingEvent(
            router_pb.GenerateEvent(sequence_finished=router_pb.SequenceFinished(reason=reason)), 0
        ),
        WaitingEvent(
            router_pb.GenerateEvent(item_finished=router_pb.ItemFinished(reason=reason)), 0
        ),
    ]
    builder = template.output_builder(call, request)
    collected = Answers(call, request, builder, to_error, with_prompts=True)
    plain = PlainText(to_error, final_alone=False)
    either: list[Answers | PlainText] = [collected, plain] if decoupled else [collected]
    for answers in either:
        answers.see(news)
        *before, last = answers.take()
        assert [answer.outputs for answer in before] == ([[text("a")]] if decoupled else [])
        assert (last.outputs, last.final) == ((), True)
        assert isinstance(last.error, DeadlineExceeded)
        assert answers.error is last.error


@pytest.mark.parametrize(
    ("flag", "outputs", "only"),
    [
        ("", [], True),
        ("", ["text_output"], True),
        ("", ["cum_log_probs"], False),
        ("return_log_probs", [], False),
        ("return_num_output_tokens", [], False),
    ],
)
def test_plain_text_serves_only_requests_without_other_outputs(
    flag: str, outputs: list[str], only: bool
) -> None:
    sent = kserve.ModelInferRequest(model_name="ensemble")
    for tensor, data_type, data in (
        ("text_input", "BYTES", b"\1\0\0\0x"),
        ("max_tokens", "INT32", b"\5\0\0\0"),
        (flag, "BOOL", b"\1"),
    ):
        if tensor:
            sent.inputs.add(name=tensor, datatype=data_type, shape=(1, 1))
            sent.raw_input_contents.append(data)
    for name in outputs:
        sent.outputs.add(name=name)
    call = read_call(MODELS["ensemble"], sent)
    template = template_of(call.model)
    builder = template.output_builder(call, template.request(call, ""))
    assert builder.only_new_text is only
