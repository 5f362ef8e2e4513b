"""Endings of requests: Triton's answer to the client, nothing left behind."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import numpy as np
import pytest
from compat.plain_http import PlainHttp
from compat.triton import SyncStream, Triton, asked, make_inputs, request
from e2e.mesh import PATIENT, Mesh, eventually, running_mesh, scrape
from tritonclient.grpc import service_pb2 as kserve
from tritonclient.utils import InferenceServerException
from trtmesh.chassis.errors import InvalidRequest, TrtmeshError
from trtmesh.router.doors.triton.answers import Answer, Answers
from trtmesh.router.doors.triton.calls import read_call
from trtmesh.router.doors.triton.models import triton_models
from trtmesh.router.doors.triton.settings import TritonSettings
from trtmesh.router.doors.triton.templates.generation import GenerationTemplate
from trtmesh.router.streams.client_stream import WaitingEvent, WaitingTokens
from trtmesh.router.values.handoff_state import digest_of, read_state, write_state
from trtmesh.v1 import router_pb2 as router_pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

GENERATED = "trtmesh_engine_generated_tokens_total"
LONG = {"text_input": "long", "max_tokens": 8000, "stream": True}
NEVER_SENT = "Internal error from Core"
"""The client's error for a deadline before the request is written, unknown to any server."""
FULL = "Exceeds maximum queue size"
ENDLESS = {"input_ids": [5], "input_lengths": 1, "request_output_len": 8000}


def message(model: str, tensors: dict[str, Any], request_id: str) -> kserve.ModelInferRequest:
    """What tritonclient would send."""
    sent = kserve.ModelInferRequest(model_name=model, id=request_id)
    for given in make_inputs(tensors):
        sent.inputs.append(given._get_tensor())
        sent.raw_input_contents.append(given._get_content())
    return sent


async def test_stream_error_carries_id_and_model(mesh: Mesh) -> None:
    """The response has id, model and final flag, although tritonclient hides them."""
    infer: Any = mesh.channel.stream_stream(
        "/inference.GRPCInferenceService/ModelStreamInfer",
        request_serializer=kserve.ModelInferRequest.SerializeToString,
        response_deserializer=kserve.ModelStreamInferResponse.FromString,
    )
    sent = [message("ensemble", {"max_tokens": 3}, "wrong"), message("no model", {}, "unknown")]
    answers = {answer.infer_response.id: answer async for answer in infer(iter(sent))}
    assert set(answers) == {"wrong", "unknown"}
    for name, model in (("wrong", "ensemble"), ("unknown", "no model")):
        answer = answers[name]
        assert answer.error_message
        assert answer.infer_response.model_name == model
        assert answer.infer_response.model_version == "1"
        assert answer.infer_response.parameters["triton_final_response"].bool_param
        assert not answer.infer_response.outputs


async def test_stop_ends_the_latest_request_of_an_id(mesh: Mesh) -> None:
    with (
        SyncStream(mesh.router.address) as first,
        SyncStream(mesh.router.address) as second,
        SyncStream(mesh.router.address) as stopper,
    ):
        for stream in (first, second):
            stream.send("ensemble", LONG, request_id="same")
            await asyncio.to_thread(stream.next)
        stopper.send("ensemble", {"stop": True}, request_id="same")
        await asyncio.to_thread(stopper.half_close)
        responses = await asyncio.to_thread(second.half_close)
        assert responses[-1].final
        assert not any(response.error for response in responses)
        assert (await mesh.gauges())["live_requests"] == 1
    await mesh.idle()


async def test_stopped_request_returns_its_tokens_so_far(mesh: Mesh) -> None:
    """A successful response with the tokens so far: how `--stop-after-ms` of upstream's client is used."""
    before = (await scrape(mesh.engines[0]))[GENERATED]
    with SyncStream(mesh.router.address) as stream:
        stream.send("tensorrt_llm", ENDLESS, request_id="whole")

        async def running() -> bool:
            return (await scrape(mesh.engines[0]))[GENERATED] > before

        await eventually(running)
        empty, told = None, None
        stream.send("tensorrt_llm", ENDLESS | {"stop": True}, request_id="whole")
        for response in await asyncio.to_thread(stream.half_close):
            assert response.final
            if response.outputs:
                told = response
            else:
                empty = response
    assert empty
    assert told
    ids = told.outputs["output_ids"].ravel().tolist()
    assert 1 <= len(ids) - 1 < 8000
    (item,) = await mesh.client.complete([[5]], max_tokens=len(ids) - 1, ignore_end_id=True)
    assert ids == [5, *item.token_ids]


async def test_disconnect_cancels_all_requests_of_a_stream(mesh: Mesh) -> None:
    channel = grpc.aio.insecure_channel(
        mesh.router.address, options=[("grpc.use_local_subchannel_pool", 1)]
    )
    infer: Any = channel.stream_stream(
        "/inference.GRPCInferenceService/ModelStreamInfer",
        request_serializer=kserve.ModelInferRequest.SerializeToString,
    )
    call = infer()
    for index in range(4):
        await call.write(message("tensorrt_llm_bls", LONG, str(index)))
    await call.read()
    # The connection breaks; nobody says goodbye.
    await channel.close()
    await mesh.idle()


async def test_a_deadline_ends_a_stream(mesh: Mesh, triton: Triton) -> None:
    """The worker has the deadline too and may act a moment earlier: what it cut off never looks complete."""
    random_ = random.Random(5)

    async def run_out_of_time(seconds: float) -> bool:
        """Whether a server was told of it."""

        async def requests() -> Any:
            yield request("ensemble", LONG)

        results = triton.client.stream_infer(requests(), stream_timeout=seconds)
        code = grpc.StatusCode.OK
        errors: list[str] = []
        try:
            errors = [str(error) async for _, error in results if error is not None]
        except grpc.aio.AioRpcError as error:
            if error.details() == NEVER_SENT:
                return False
            code = error.code()
        if code is not grpc.StatusCode.DEADLINE_EXCEEDED:
            assert code is grpc.StatusCode.OK
            assert "the deadline of the call passed" in errors[-1]
        return True

    async def told() -> None:
        """Gives a server ever more time to hear of the request: on a busy machine it takes longer."""
        seconds = random_.uniform(0.1, 0.4)
        while not await run_out_of_time(seconds):
            seconds *= 2

    await asyncio.gather(*(told() for _ in range(20)))
    await mesh.idle()


async def test_bls_requests_run_concurrently(mesh: Mesh) -> None:
    """Not one after another: all have begun before any is over."""
    names = {str(index) for index in range(24)}
    with SyncStream(mesh.router.address) as stream:
        for name in names:
            more = {"request_id": name, "enable_empty_final_response": True}
            stream.send("tensorrt_llm_bls", LONG, **more)
        begun: set[str] = set()
        while begun != names:
            response = await asyncio.to_thread(stream.next)
            assert not response.final
            begun.add(response.request_id)
    await mesh.idle()


async def test_random_endings_leave_nothing_behind(mesh: Mesh, triton: Triton) -> None:
    """A shuffled crowd of requests: complete, failed, timed out, stopped or without their client."""
    random_ = random.Random(7)
    short = {"text_input": "short", "max_tokens": 20, "stream": True}

    async def complete() -> None:
        assert (await triton.stream("ensemble", short))[-1].final

    async def fail() -> None:
        (response,) = await triton.stream("tensorrt_llm", ENDLESS | {"end_id": 60_000})
        assert "60000" in response.error

    async def time_out() -> None:
        timeout = random_.randrange(1, 80_000)
        responses = await triton.stream("tensorrt_llm_bls", LONG, timeout=timeout)
        assert "timeout" in responses[-1].error

    async def be_stopped() -> None:
        name = f"stopped {random_.random()}"
        both = [request("ensemble", LONG, request_id=name)]
        both.append(request("tensorrt_llm_bls", {"stop": True}, request_id=name))
        # A stop sent right after its request finds the request, at any stage.
        responses = await triton.stream_all(both)
        assert not [response.error for response in responses if response.error]

    async def lose_its_client() -> None:
        running = asyncio.create_task(
            triton.stream("ensemble", LONG | {"num_return_sequences": 2, "top_k": 9})
        )
        await asyncio.sleep(random_.random() / 10)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    endings = [complete, fail, time_out, be_stopped, lose_its_client] * 12
    random_.shuffle(endings)
    await asyncio.gather(*(ending() for ending in endings))
    await mesh.idle()


async def test_timeout_never_truncates_a_message(triton: Triton) -> None:
    """At any moment of a stream: messages under way arrive before the error."""
    random_ = random.Random(3)

    async def time_out() -> None:
        timeout = random_.randrange(1, 80_000)
        *before, last = await triton.stream("tensorrt_llm_bls", LONG, timeout=timeout)
        assert not [response.error for response in before if response.error]
        assert f"timeout of {timeout / 1e6} s" in last.error

    for _ in range(2):
        await asyncio.gather(*(time_out() for _ in range(60)))


async def test_full_queue_is_reported_in_tritons_words() -> None:
    limits = (
        "--admission-max-running-items",
        "1",
        "--admission-max-queued-items",
        "1",
        "--triton-decoupled",
        "ensemble",
    )
    async with (
        running_mesh(router_flags=(*PATIENT, *limits)) as mesh,
        Triton(mesh.router.address) as triton,
        PlainHttp(mesh.router.http_address) as http,
    ):
        with SyncStream(mesh.router.address) as stream:
            for name in ("running", "waiting", "refused"):
                stream.send("ensemble", LONG, request_id=name)
            while not (response := await asyncio.to_thread(stream.next)).error:
                pass
            assert FULL in response.error
            with pytest.raises(InferenceServerException, match=FULL) as caught:
                await triton.infer("tensorrt_llm_bls", {"text_input": "x", "max_tokens": 3})
            assert caught.value.status() == "StatusCode.UNAVAILABLE"
            body = {"text_input": "x", "max_tokens": 3}
            reply = await http.post("/v2/models/tensorrt_llm_bls/generate", body)
            assert reply.status == 503
            for words in (FULL, "Maximum queue size of 1 has been reached"):
                assert words in reply.json["error"]
        await mesh.idle()


def _no_error(failed: router_pb.ItemFailed) -> TrtmeshError:
    raise AssertionError(failed)


async def test_first_half_answers_once_with_its_state() -> None:
    """In the only response, even of a stream."""
    settings = TritonSettings()
    model = triton_models(settings)["tensorrt_llm"]
    tensors = {"input_ids": [5, 6], "input_lengths": 2, "request_output_len": 1}
    tensors |= {"streaming": True}
    sent = message("tensorrt_llm", tensors, "handed over")
    sent.parameters["request_type"].string_param = "context_only"
    call = read_call(model, sent)
    template = call.model.template
    assert isinstance(template, GenerationTemplate)
    generation = asked(call)
    builder = template.output_builder(call, generation)
    answers = Answers(call, generation, builder, _no_error, with_prompts=False)
    finished = router_pb.SequenceFinished(handoff_state=b"\1\2\3")
    events = [
        router_pb.GenerateEvent(sequence_finished=finished),
        router_pb.GenerateEvent(item_finished=router_pb.ItemFinished()),
    ]
    tokens = WaitingTokens(0, 0, 0, [7], [""], None, 4)
    answers.see([tokens, WaitingEvent(events[0], 0)])
    assert not answers.take()
    answers.see([WaitingEvent(events[1], 0)])
    (answer,) = answers.take()
    assert isinstance(answer, Answer)
    (state,) = [output for output in answer.outputs if output.name == "context_phase_params"]
    assert (state.data_type, state.shape, state.data) == ("UINT8", (1, 3), b"\1\2\3")
    sent.parameters["request_type"].string_param = "both"
    refused = read_call(model, sent)
    with pytest.raises(InvalidRequest) as caught:
        asked(refused)
    assert (caught.value.field, caught.value.value) == ("handoff.phase", "'both'")


async def test_second_half_needs_the_state_of_the_first() -> None:
    model = triton_models(TritonSettings())["tensorrt_llm"]
    tensors = {"input_ids": [5, 6], "input_lengths": 2, "request_output_len": 1}
    data = write_state(None, "engine-0", digest_of([5, 6], None))
    params = np.frombuffer(data, np.uint8).reshape(1, -1)
    again = message("tensorrt_llm", tensors | {"context_phase_params": params}, "")
    with pytest.raises(InvalidRequest) as caught:
        asked(read_call(model, again))
    assert caught.value.field == "handoff.state"
    again.parameters["request_type"].string_param = "generation_only"
    (item,) = asked(read_call(model, again)).items
    assert item.state == read_state(data)
    del again.inputs[-1], again.raw_input_contents[-1:]
    with pytest.raises(InvalidRequest) as caught:
        asked(read_call(model, again))
    assert caught.value.field == "handoff.state"
