"""A stream with as many requests as it takes."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from compat.triton import make_inputs
from router.scripted import (
    LENGTH,
    READY,
    ScriptedEngine,
    serving_engine,
    serving_router,
    until_states,
)
from tritonclient.grpc import service_pb2 as kserve
from trtmesh.router.doors.triton.grpc import door
from trtmesh.v1 import generation_pb2 as pb

MODEL = "tensorrt_llm"
INPUTS: dict[str, Any] = {"input_ids": [5], "input_lengths": 1, "request_output_len": 9}


def request(name: str, **more: Any) -> kserve.ModelInferRequest:
    """What tritonclient would send."""
    sent = kserve.ModelInferRequest(model_name=MODEL, id=name)
    for given in make_inputs(INPUTS | more):
        sent.inputs.append(given._get_tensor())
        sent.raw_input_contents.append(given._get_content())
    return sent


async def test_a_full_stream_takes_stops_and_refuses_all_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(door, "MOST_REQUESTS_OF_A_STREAM", 2)
    engine = ScriptedEngine(supported_fields=["stopping.max_tokens", "stopping.ignore_end_id"])
    async with serving_engine(engine) as address, serving_router([address]) as client:
        await until_states(client, [READY], [])
        stream: Any = client._routers[0].channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=kserve.ModelInferRequest.SerializeToString,
            response_deserializer=kserve.ModelStreamInferResponse.FromString,
        )()
        for name in ("first", "second", "third"):
            await stream.write(request(name))
        refused = await stream.read()
        assert refused.infer_response.id == "third"
        assert "Exceeds maximum queue size" in refused.error_message
        one, other = await engine.submitted(2)
        await stream.write(request("first", stop=True))
        stopped = await stream.read()
        assert (stopped.infer_response.id, stopped.error_message) == ("first", "")
        await engine.step((one.handle, 0, [7]), ends=[(one.handle, pb.FINISH_REASON_STOPPED)])
        ended = await stream.read()
        assert (ended.infer_response.id, ended.error_message) == ("first", "")
        # There is room again.
        await stream.write(request("fourth"))
        (*_, last) = await engine.submitted(3)
        for submit in (other, last):
            await engine.step((submit.handle, 0, [7] * 9), ends=[(submit.handle, LENGTH)])
        await stream.done_writing()
        finished = [await stream.read() for _ in range(2)]
        assert {answer.infer_response.id for answer in finished} == {"second", "fourth"}
        assert await stream.read() is grpc.aio.EOF
