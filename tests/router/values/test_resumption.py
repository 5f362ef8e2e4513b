"""What a client has of a request that goes on here."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack

import grpc
import pytest
from router.scripted import (
    READY,
    ScriptedEngine,
    eventually,
    serving_engine,
    serving_router,
    until_states,
)
from router.scripted_tokenizer import ScriptedTokenizer, serving_tokenizer
from trtmesh.chassis.errors import InvalidField
from trtmesh.router.values.request import parse_request
from trtmesh.router.values.resumption import parse_received
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb
from trtmesh.v1 import router_pb2_grpc


@pytest.mark.parametrize("finished", [1, 2, 3])
def test_beams_of_which_not_all_are_over_begin_again_together(finished: int) -> None:
    config = pb.GenerationConfig()
    config.beam_search.beam_width = 3
    prompt = pb.Prompt(token_ids=pb.TokenIds(ids=[1]))
    request = router_pb.GenerateRequest(
        request_id="r", items=[router_pb.GenerateItem(prompt=prompt)], config=config
    )
    received = [
        router_pb.SequenceOffset(
            sequence_index=index, token_ids=[5], finished=True, reason=pb.FINISH_REASON_LENGTH
        )
        for index in range(finished)
    ]
    message = router_pb.ResumeRequest(request=request, received=received)
    known = parse_received(message, parse_request(request, "", 10)).sequences
    assert len(known) == (3 if finished == 3 else 0)


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (
            # A number that the enum does not have.
            router_pb.SequenceOffset(finished=True, reason=99),  # type: ignore[arg-type]
            "reason is 99 but must be a FinishReason",
        ),
        (router_pb.SequenceOffset(finished=True), "reason is not set but must be"),
        (
            router_pb.SequenceOffset(token_ids=[5], reason=pb.FINISH_REASON_LENGTH),
            "reason is set but `finished` is not",
        ),
        (
            router_pb.SequenceOffset(token_ids=[5] * 4),
            "token_ids has 4 tokens but must have at most 3",
        ),
    ],
)
def test_what_no_client_can_have_received_is_refused(
    offset: router_pb.SequenceOffset, message: str
) -> None:
    request = router_pb.GenerateRequest(request_id="r")
    request.items.add().prompt.token_ids.ids.append(1)
    request.config.stopping.max_tokens = 3
    resume = router_pb.ResumeRequest(request=request, received=[offset])
    with pytest.raises(InvalidField, match=re.escape(f"received[0].{message}")):
        parse_received(resume, parse_request(request, "", 10))
    offset.CopyFrom(router_pb.SequenceOffset(token_ids=[5] * 3))
    resume = router_pb.ResumeRequest(request=request, received=[offset])
    assert parse_received(resume, parse_request(request, "", 10)).has(0)


async def test_what_is_stopped_before_it_goes_on_ends_where_the_client_has_it() -> None:
    tokenizer = ScriptedTokenizer()
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(serving_engine(ScriptedEngine()))]
        tokenizers = [await stack.enter_async_context(serving_tokenizer(tokenizer))]
        client = await stack.enter_async_context(serving_router(engines, tokenizers))
        await until_states(client, [READY], [READY])
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(client.address))
        item = router_pb.GenerateItem(prompt=pb.Prompt(text="a"))
        request = router_pb.GenerateRequest(request_id="r", items=[item])
        received = [router_pb.SequenceOffset(token_ids=[65, 66])]
        tokenizer.answering.clear()
        call = router_pb2_grpc.MeshServiceStub(channel).Resume(
            router_pb.ResumeRequest(request=request, received=received)
        )

        async def told() -> list[router_pb.GenerateEvent]:
            return [event async for response in call for event in response.events]

        reading = asyncio.create_task(told())
        await eventually(lambda: tokenizer.encodes)
        assert await client.stop("r") == 1
        _, end, over = await reading
        tokenizer.answering.set()
        stopped = pb.FINISH_REASON_STOPPED
        assert end.sequence_finished.reason == over.item_finished.reason == stopped
        assert end.sequence_finished.generated_tokens == 2
        assert over.item_finished.usage.generated_tokens == 2
