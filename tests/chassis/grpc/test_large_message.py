"""Large messages whose fields are counted before they are parsed."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from trtmesh.chassis.fair.turns import ConnectionQueue, ParseScheduler
from trtmesh.chassis.grpc.large_message import MessageLimits, parse_in_steps
from trtmesh.chassis.grpc.messages import BadMessage
from trtmesh.chassis.grpc.server import GrpcServer
from trtmesh.kserve import grpc_service_pb2 as kserve
from trtmesh.v1 import router_pb2 as pb

MOST_BYTES = 2**26
LIMITS = MessageLimits()

MOST = LIMITS.numbers - 1000
"""Beside the numbers of each request."""


async def parsed(data: bytes, kind: Any) -> Any:
    steps = parse_in_steps(data, kind.DESCRIPTOR, kind.FromString, LIMITS)
    return await ConnectionQueue(ParseScheduler()).run(steps)


def request(**counts: int) -> Any:
    """A request with so many parts of each kind, and some more."""
    of = Counter(counts)
    made = kserve.ModelInferRequest(model_name="m", raw_input_contents=[bytes(of["raw"])])
    for _ in range(of["inputs"]):
        made.inputs.add()
    contents = made.inputs.add().contents
    contents.int_contents.extend([300] * of["ids"])
    contents.int64_contents.extend([300] * of["long_ids"])
    contents.bytes_contents.extend([b""] * of["texts"])
    contents.fp32_contents.extend([1.0] * of["floats"])
    contents.fp64_contents.extend([1.0] * (500 + of["doubles"]))
    made.parameters["a"].string_param = "x" * (200 + of["text_bytes"])
    return made


@pytest.mark.parametrize(
    ("good", "bad", "said"),
    [
        ({"inputs": 1000}, {"inputs": LIMITS.fields}, f"more than {LIMITS.fields} fields"),
        ({"texts": 1000}, {"texts": LIMITS.fields}, f"more than {LIMITS.fields} fields"),
        ({"ids": MOST}, {"ids": MOST + 1}, f"more than {LIMITS.numbers} numbers"),
        (
            {"long_ids": MOST // 2},
            {"long_ids": MOST // 2 + 1},
            f"more than {LIMITS.numbers} numbers",
        ),
        ({"floats": MOST}, {"floats": MOST + 1}, f"more than {LIMITS.numbers} numbers"),
        ({"doubles": MOST // 2}, {"doubles": MOST // 2 + 1}, f"more than {LIMITS.numbers} numbers"),
        (
            {"text_bytes": LIMITS.text_bytes - 300},
            {"text_bytes": LIMITS.text_bytes},
            "bytes of text",
        ),
    ],
)
async def test_fields_and_numbers_of_all_parts_count(
    good: dict[str, int], bad: dict[str, int], said: str
) -> None:
    made = request(**good, raw=2**20)
    assert await parsed(made.SerializeToString(), kserve.ModelInferRequest) == made
    with pytest.raises(BadMessage, match=said) as refused:
        await parsed(request(**bad).SerializeToString(), kserve.ModelInferRequest)
    assert refused.value.status is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "parts",
    [
        {"texts": LIMITS.fields},
        {"ids": LIMITS.numbers},
        {"floats": LIMITS.numbers},
        {"text_bytes": LIMITS.text_bytes},
    ],
)
async def test_a_malformed_rest_hides_nothing(parts: dict[str, int]) -> None:
    data = request(**parts).SerializeToString() + b"\x80"
    with pytest.raises(BadMessage):
        await parsed(data, kserve.ModelInferRequest)


async def test_without_limits_nothing_is_counted() -> None:
    data = request(ids=LIMITS.numbers).SerializeToString()
    parse: Any = kserve.ModelInferRequest.FromString
    unlimited = parse_in_steps(data, kserve.ModelInferRequest.DESCRIPTOR, parse, None)
    contents = (await ConnectionQueue(ParseScheduler()).run(unlimited)).inputs[0].contents
    assert len(contents.int_contents) == LIMITS.numbers


@pytest.mark.parametrize(
    "data", [b"\xff" * 2**20, b"\x0a" * 999, b"\x2a\xff\xff\xff\xff\x0f", b"\x2a", b"\x2b" * 99]
)
async def test_malformed_message_is_left_to_its_parser(data: bytes) -> None:
    found: list[Any] = []
    steps = parse_in_steps(data, kserve.ModelInferRequest.DESCRIPTOR, found.append, LIMITS)
    await ConnectionQueue(ParseScheduler()).run(steps)
    assert found == [data]
    with pytest.raises(DecodeError):
        kserve.ModelInferRequest.FromString(data)


async def test_parsing_is_paid_with_the_turns_that_follow() -> None:
    """Many that are parsed at once would stall what runs for all of them."""
    turns, passes, ends = ParseScheduler(), 0, list[int]()

    def parse(_: object) -> None:
        time.sleep(0.03)
        ends.append(passes)

    parsing = [
        ConnectionQueue(turns).run(
            parse_in_steps(b"", kserve.ModelInferRequest.DESCRIPTOR, parse, LIMITS)
        )
        for _ in range(3)
    ]
    waiting = asyncio.gather(*parsing)
    while not waiting.done():
        await asyncio.sleep(0)
        passes += 1
    await waiting
    first, second, third = ends
    assert second - first > 20
    assert third - second > 20


async def test_other_connections_have_turns_in_between() -> None:
    turns, turn = ParseScheduler(), 0
    data = request(inputs=LIMITS.fields - 10_000).SerializeToString()
    checking = asyncio.create_task(
        ConnectionQueue(turns).run(
            parse_in_steps(data, kserve.ModelInferRequest.DESCRIPTOR, lambda _: None, LIMITS)
        )
    )
    while not checking.done():
        await asyncio.sleep(0)
        turn += 1
    await checking
    assert turn > 10


async def test_server_refuses_a_message_of_too_many_fields() -> None:
    limits = MessageLimits(fields=2**17)
    server = GrpcServer(MOST_BYTES, message_limits=limits)

    sizes = set[int]()

    async def count(asked: Any, context: Any) -> pb.StopResponse:
        sizes.add(context.message.size)
        return pb.StopResponse(stopped_items=len(asked.items))

    async def count_all(asked: Any, context: Any) -> pb.StopResponse:
        return pb.StopResponse(stopped_items=sum([len(each.items) async for each in asked]))

    async def count_read(_: Any, context: Any) -> pb.StopResponse:
        return await count(await context.read(), context)

    kinds: dict[str, Any] = {
        "read": pb.GenerateRequest.FromString,
        "write": pb.StopResponse.SerializeToString,
    }
    reading: dict[str, Any] = {
        "request_deserializer": kinds["read"],
        "response_serializer": kinds["write"],
    }
    server.add_registered_method_handlers(
        "a.B",
        {
            "One": grpc.unary_unary_rpc_method_handler(count, **reading),
            "Read": grpc.stream_unary_rpc_method_handler(count_read, **reading),
            "All": grpc.stream_unary_rpc_method_handler(count_all, **reading),
        },
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    good = b"\x1a\x00" * (limits.fields // 2)
    bad = b"\x1a\x00" * (limits.fields + 1)
    items = len(pb.GenerateRequest.FromString(good).items)
    assert items == limits.fields // 2, "the tag is that of an item"
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        one: Any = channel.unary_unary("/a.B/One", response_deserializer=pb.StopResponse.FromString)
        read: Any = channel.stream_unary(
            "/a.B/Read", response_deserializer=pb.StopResponse.FromString
        )
        every: Any = channel.stream_unary(
            "/a.B/All", response_deserializer=pb.StopResponse.FromString
        )
        assert (await one(good)).stopped_items == items
        assert (await every(iter([good, good]))).stopped_items == 2 * items
        assert (await read(iter([good]))).stopped_items == items
        for call in (one(bad), read(iter([bad])), every(iter([good, bad]))):
            with pytest.raises(grpc.aio.AioRpcError, match="more than 131072 fields") as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert sizes == {len(good)}
    assert not server.clients.budget.held
    await server.stop(grace=None)
