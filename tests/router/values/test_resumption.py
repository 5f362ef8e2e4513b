"""Parsing of a client's received output."""

from __future__ import annotations

import asyncio
from array import array
from contextlib import AsyncExitStack
from typing import Any

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
from trtmesh.router.values.request import MAX_REQUEST_TOKENS, parse_request
from trtmesh.router.values.resumption import Received, ReceivedSequence, parse_received
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb
from trtmesh.v1 import router_pb2_grpc


@pytest.mark.parametrize("finished", [1, 2, 3])
def test_received_beams_restart_unless_all_are_finished(finished: int) -> None:
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
    known = parse_received(message, parse_request(request, "")).sequences
    assert len(known) == (3 if finished == 3 else 0)


@pytest.mark.parametrize(
    ("offset", "field"),
    [
        (
            # A number outside the enum.
            router_pb.SequenceOffset(finished=True, reason=99),  # type: ignore[arg-type]
            "reason",
        ),
        (router_pb.SequenceOffset(finished=True), "reason"),
        (router_pb.SequenceOffset(token_ids=[5], reason=pb.FINISH_REASON_LENGTH), "reason"),
        (router_pb.SequenceOffset(token_ids=[5] * 4), "token_ids"),
        (router_pb.SequenceOffset(batch_index=1), "batch_index"),
        (router_pb.SequenceOffset(sequence_index=1), "sequence_index"),
    ],
)
def test_impossible_offsets_are_refused(offset: router_pb.SequenceOffset, field: str) -> None:
    request = router_pb.GenerateRequest(request_id="r")
    request.items.add().prompt.token_ids.ids.append(1)
    request.config.stopping.max_tokens = 3
    resume = router_pb.ResumeRequest(request=request, received=[offset])
    with pytest.raises(InvalidField) as refused:
        parse_received(resume, parse_request(request, ""))
    assert refused.value.field == f"received[0].{field}"


def test_offset_of_an_invalid_item_is_refused() -> None:
    request = router_pb.GenerateRequest(request_id="r", items=[router_pb.GenerateItem()])
    request.items.add().prompt.token_ids.ids.append(1)
    resume = router_pb.ResumeRequest(request=request, received=[router_pb.SequenceOffset()])
    with pytest.raises(InvalidField) as refused:
        parse_received(resume, parse_request(request, ""))
    assert refused.value.field == "received[0].batch_index"
    resume = router_pb.ResumeRequest(request=request, finished_items=[0])
    assert parse_received(resume, parse_request(request, "")).finished_items == {0}


def test_repeated_sequence_is_refused() -> None:
    request = router_pb.GenerateRequest(request_id="r")
    for _ in range(2):
        request.items.add().prompt.token_ids.ids.append(1)
    request.config.stopping.max_tokens = 3
    # Greedy sequences resume without a seed.
    offset = router_pb.SequenceOffset(token_ids=[5] * 3)
    resume = router_pb.ResumeRequest(request=request, received=[offset])
    assert parse_received(resume, parse_request(request, "")).has(0)
    resume = router_pb.ResumeRequest(request=request, received=[offset, offset])
    with pytest.raises(InvalidField) as refused:
        parse_received(resume, parse_request(request, ""))
    assert refused.value.field == "received[1]"


async def test_stop_before_resumption_ends_at_the_received_tokens() -> None:
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


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"received": [router_pb.SequenceOffset()] * 2}, "received"),
        ({"finished_items": [0, 0]}, "finished_items"),
        (
            {"received": [router_pb.SequenceOffset(token_ids=[1] * (MAX_REQUEST_TOKENS + 1))]},
            "received.token_ids",
        ),
    ],
)
def test_what_was_received_is_counted_before_it_is_copied(more: Any, field: str) -> None:
    request = router_pb.GenerateRequest(request_id="r")
    request.items.add().prompt.text = "x"
    valid = parse_request(request, "")
    with pytest.raises(InvalidField, match="entries but must have at most") as refused:
        parse_received(router_pb.ResumeRequest(request=request, **more), valid)
    assert refused.value.field == field


def test_the_last_received_token_may_fill_the_context() -> None:
    open_one = ReceivedSequence(array("I", [1] * 3))
    finished = ReceivedSequence(array("I", [1] * 5), pb.FINISH_REASON_LENGTH)
    received = Received({(0, 0): open_one, (0, 1): finished, (1, 0): open_one})
    assert [received.longest(item) for item in range(3)] == [4, 2, 0]
