"""Routers die, freeze and stop under streams: their clients resume on another router, without gap or repeat."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import grpc
import pytest
import pytest_asyncio
from chaos.proxy import proxy_to
from e2e.mesh import (
    ENDLESS,
    SIMULATED,
    WIDE_TOKENS,
    Mesh,
    StreamReader,
    check_beginning,
    decode,
    eventually,
    running_mesh,
    scrape,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc
from trtmesh.chassis.error_wire import from_status
from trtmesh.chassis.errors import Draining, InvalidField, Unavailable
from trtmesh.client import Client, FinishReason, GenerateItem, ItemResult, Prompt, Tokens
from trtmesh.client.options import build_config
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2, router_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS = [f"item {number}" for number in range(4)]
GREEDY: dict[str, Any] = {"max_tokens": 20}
SAMPLED: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "num_return_sequences": 2}
# Few tokens take as long as a fault.
ENGINE = (*SIMULATED, "--simulated-timing-step-ms", "12")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[Mesh]:
    async with running_mesh(engines=2, engine_flags=(*ENGINE, *WIDE_TOKENS)) as mesh:
        yield mesh


def contents(items: Sequence[ItemResult]) -> list[Any]:
    """The parts of a result common to all routers."""
    return [
        (
            (item.error, item.reason, item.usage.generated_tokens, item.usage.prompt_tokens),
            [(s.token_ids, s.text, s.finished) for s in item.sequences],
        )
        for item in items
    ]


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_connection_cut_at_any_token_resumes_on_the_next_router(
    mesh: Mesh, options: dict[str, Any]
) -> None:
    worst = 0.0
    went_on = 0
    expected = contents(await mesh.client.complete(PROMPTS, seed=7, **options))
    for position in range(0, options["max_tokens"] + 1, 2):
        async with (
            proxy_to(mesh.router.address) as proxy,
            Client([proxy.address, mesh.router.address]) as client,
        ):
            reader = StreamReader(client, PROMPTS, seed=7, **options)
            await reader.until(partial(has_tokens, position=position))
            proxy.cut()
            assert contents(await reader.result()) == expected, position
            # Near the end, the stream may be complete before the cut.
            went_on += client.address == mesh.router.address
            worst = max(worst, reader.worst_gap_seconds())
    await mesh.idle()
    assert went_on
    print(f"worst stall after a cut connection to a router: {worst * 1000:.0f} ms")


async def test_drawn_seed_holds_on_the_next_router(mesh: Mesh) -> None:
    async with (
        proxy_to(mesh.router.address) as proxy,
        Client([proxy.address, mesh.router.address]) as client,
    ):
        reader = StreamReader(client, PROMPTS, **SAMPLED)
        await reader.tokens_here(8)
        proxy.cut()
        items = await reader.result()
        started = items[0].started
        assert started
        expected = await mesh.client.complete(PROMPTS, seed=started.seed, **SAMPLED)
        assert contents(items) == contents(expected)


async def test_killed_router_loses_no_token_of_a_client_with_another(mesh: Mesh) -> None:
    doomed = await mesh.start("router", *links(mesh))
    expected = await mesh.client.complete(PROMPTS, seed=7, **SAMPLED)
    resumed = (await scrape(mesh.router)).get("trtmesh_router_resumed_requests_total", 0)
    async with Client(doomed.address) as alone:
        await eventually(lambda: ready(alone))
        single = StreamReader(alone, PROMPTS, seed=7, max_tokens=ENDLESS)
        await single.tokens_here(5)
        async with Client([doomed.address, mesh.router.address]) as client:
            reader = StreamReader(client, PROMPTS, seed=7, **{**SAMPLED, "max_tokens": ENDLESS})
            await reader.tokens_here(5)
            doomed.signal(signal.SIGKILL)
            await mesh.counted("resumed_requests", resumed + 1)
            check_beginning(await reader.stopped_at(SAMPLED["max_tokens"], sequences=2), expected)
            told = [e for e in reader.events if isinstance(e, Tokens)]
            # Every token once: the second router begins at the first one's last offset.
            assert sum(len(e.token_ids) for e in told) == sum(
                len(s.token_ids) for item in reader.items for s in item.sequences
            )
            assert client.address == mesh.router.address
            print(
                f"worst stall after a kill of a router: {reader.worst_gap_seconds() * 1000:.0f} ms"
            )
        with pytest.raises(Unavailable):
            await single.result()
    await mesh.idle()


async def test_stopping_router_hands_its_clients_to_the_next(mesh: Mesh) -> None:
    stopping = await mesh.start("router", *links(mesh), "--grace-seconds", "0.2")
    options = {**SAMPLED, "max_tokens": 130}
    expected = contents(await mesh.client.complete(PROMPTS, seed=7, **options))
    async with Client([stopping.address, mesh.router.address]) as client:
        await eventually(lambda: ready(client))
        reader = StreamReader(client, PROMPTS, seed=7, **options)
        await reader.tokens_here(5)
        stopping.signal(signal.SIGTERM)
        assert contents(await reader.result()) == expected
    assert await stopping.wait() == 0
    await mesh.idle()


async def test_stopping_router_finishes_its_streams_within_its_grace() -> None:
    async with running_mesh(engine_flags=ENGINE, router_flags=("--grace-seconds", "600")) as mesh:
        expected = await mesh.client.complete(["running"], max_tokens=40)
        readers = [mesh.open(["running"], max_tokens=ENDLESS) for _ in range(4)]
        for reader in readers:
            await reader.tokens_here(5)
        mesh.router.signal(signal.SIGTERM)

        async def refused() -> bool:
            try:
                await mesh.client.complete(["late"], max_tokens=1)
            except Draining:
                return True
            except Unavailable as error:
                # gRPC's client repeats a call that a GOAWAY overtook, but not always.
                if "GOAWAY" not in error.message:
                    raise
            return False

        await eventually(refused)
        for reader in readers:
            here = reader.tokens()
            check_beginning(await reader.stopped_at(max(40, here + 10)), expected)
        assert await mesh.router.wait() == 0
        async with Client(mesh.router.address) as late:
            with pytest.raises(Unavailable):
                await late.complete(["late"], max_tokens=1)
        await eventually(lambda: holds_no_blocks(mesh))


async def test_draining_router_sends_its_clients_away_and_serves_who_still_comes() -> None:
    """As long as balancers may take to see that it is not ready."""
    flags = ("--grace-seconds", "600", "--min-drain-seconds", "590")
    async with running_mesh(router_flags=flags) as mesh:
        reader = mesh.open(["running"], max_tokens=ENDLESS)
        await reader.tokens_here(5)
        host, _, port = mesh.router.http_address.rpartition(":")
        kept, to_kept = await asyncio.open_connection(host, int(port))
        to_kept.write(ASK_LIVE)
        assert b"connection: close" not in (await kept.readuntil(b"\r\n\r\n")).lower()
        mesh.router.signal(signal.SIGTERM)

        stub = health_pb2_grpc.HealthStub(mesh.channel)

        async def not_serving() -> bool:
            told = await stub.Check(health_pb2.HealthCheckRequest())
            return bool(told.status == health_pb2.HealthCheckResponse.NOT_SERVING)

        await eventually(not_serving)
        assert await kept.read() == b""
        to_kept.close()
        for _ in range(2):
            async with Client(mesh.router.address) as late:
                (item,) = await late.complete(["late"], max_tokens=1)
                assert item.error is None
            new, to_new = await asyncio.open_connection(host, int(port))
            to_new.write(ASK_LIVE)
            assert b"connection: close" in (await new.read()).lower()
            to_new.close()
        await reader.tokens_here(reader.tokens() + 10)
        assert not reader.is_over


ASK_LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"


async def holds_no_blocks(mesh: Mesh) -> bool:
    return await mesh.used_blocks() == 0


async def test_stop_finds_the_router_of_the_request(mesh: Mesh) -> None:
    options = {"max_tokens": ENDLESS, "ignore_end_id": True}
    doomed = await mesh.start("router", *links(mesh))
    async with (
        Client([doomed.address, mesh.router.address]) as client,
        Client([mesh.router.address, doomed.address]) as stranger,
    ):
        await eventually(lambda: ready(client))
        reader = StreamReader(client, PROMPTS, request_id="found", **options)
        await reader.tokens_here(5)
        assert await stranger.stop("found", [2]) == 1
        await reader.until(lambda r: r.items[2].reason)
        doomed.signal(signal.SIGKILL)
        # The request may be on the lost router, between routers, or on the next.
        assert await client.stop("found", timeout_seconds=60) == len(PROMPTS) - 1
        items = await reader.result()
        assert {item.reason for item in items} == {FinishReason.STOPPED}
        assert client.address == mesh.router.address
        assert await client.stop("found") == 0
    await mesh.idle()


async def test_stop_received_by_a_lost_router_holds_on_the_next(mesh: Mesh) -> None:
    # Two are endless until stopped; the others end by themselves.
    prompts = [
        GenerateItem(
            prompt=Prompt(text=prompt),
            config=build_config(None, {"max_tokens": tokens, "ignore_end_id": True}),
        )
        for prompt, tokens in zip(PROMPTS, (ENDLESS, 100) * 2, strict=True)
    ]
    doomed = await mesh.start("router", *links(mesh))
    async with Client([doomed.address, mesh.router.address]) as client:
        await eventually(lambda: ready(client))
        reader = StreamReader(client, prompts, request_id="heard")
        await reader.tokens_here(5)
        # Frozen engines cannot end the stopped items.
        for engine in mesh.engines:
            engine.signal(signal.SIGSTOP)
        assert await client.stop("heard", [0, 2]) == 2
        doomed.signal(signal.SIGKILL)
        await doomed.wait()
        for engine in mesh.engines:
            engine.signal(signal.SIGCONT)
        items = await reader.result()
        stopped, length = FinishReason.STOPPED, FinishReason.LENGTH
        assert [item.reason for item in items] == [stopped, length, stopped, length]
        assert all(len(item.token_ids) == item.usage.generated_tokens for item in items)
    await mesh.idle()


async def test_frozen_router_does_not_delay_a_stop(mesh: Mesh) -> None:
    frozen = await mesh.start("router", *links(mesh))
    async with Client([frozen.address, mesh.router.address]) as client:
        await eventually(lambda: ready(client))
        frozen.signal(signal.SIGSTOP)
        reader = StreamReader(mesh.client, PROMPTS, request_id="elsewhere", max_tokens=ENDLESS)
        await reader.tokens_here(5)
        assert await client.stop("elsewhere", timeout_seconds=None) == len(PROMPTS)
        assert {item.reason for item in await reader.result()} == {FinishReason.STOPPED}
        frozen.signal(signal.SIGKILL)
    await mesh.idle()


def links(mesh: Mesh) -> list[str]:
    """Flags of a second router of the mesh."""
    engines = ",".join(engine.address for engine in mesh.engines)
    return ["--engines", engines, "--tokenizers", mesh.tokenizers[0].address, "--port", "0"]


def has_tokens(reader: StreamReader, position: int) -> bool:
    """Whether the item of this position has reached the position."""
    return reader.tokens(position % len(PROMPTS)) >= position


async def ready(client: Client) -> bool:
    try:
        (item,) = await client.complete(["ready?"], max_tokens=1)
    except Unavailable:
        return False
    return item.error is None


def request(request_id: str = "again", **config: Any) -> router_pb2.GenerateRequest:
    item = router_pb2.GenerateItem(prompt=pb.Prompt(text=PROMPTS[0]))
    return router_pb2.GenerateRequest(
        request_id=request_id, items=[item], config=pb.GenerationConfig(**config)
    )


async def test_resume_of_an_inexact_stream_is_refused(mesh: Mesh) -> None:
    some = router_pb2.SequenceOffset(token_ids=[5])
    drawn = pb.SamplingConfig(temperature=1.0)
    twice = pb.SamplingConfig(temperature=1.0, seed=5, num_return_sequences=2)
    beams = pb.BeamSearchConfig(beam_width=2)
    held = pb.OutputConfig(stream=False)
    sums = pb.OutputConfig(log_probs=True)
    offset = router_pb2.SequenceOffset
    for asked, received, field in (
        (request(""), [], "request.request_id"),
        (request(sampling=drawn), [some], "received[0].token_ids"),
        (request(beam_search=beams), [some], "received[0].token_ids"),
        (request(output=held), [some], "received[0].token_ids"),
        (request(output=sums), [some], "received[0].cumulative_log_prob"),
        (request(), [offset(batch_index=1)], "received[0].batch_index"),
        (request(), [offset(sequence_index=1)], "received[0].sequence_index"),
        (request(), [offset(finished=True)], "received[0].reason"),
        (request(), [some, some], "received"),
        (request(sampling=twice), [some, some], "received[1]"),
    ):
        stub = router_pb2_grpc.MeshServiceStub(mesh.channel)
        call = stub.Resume(router_pb2.ResumeRequest(request=asked, received=received))
        with pytest.raises(grpc.aio.AioRpcError) as told:
            await call.read()
        failed = told.value
        error = from_status(failed.code(), failed.details() or "", failed.trailing_metadata())
        assert (type(error), error.field) == (InvalidField, field)


async def test_resume_of_a_live_request_moves_it_to_the_new_call(mesh: Mesh) -> None:
    stub = router_pb2_grpc.MeshServiceStub(mesh.channel)
    asked = request("twice", stopping=pb.StoppingConfig(max_tokens=ENDLESS))
    (whole,) = await mesh.client.complete([PROMPTS[0]], max_tokens=40)
    first = aiter(stub.Generate(asked))
    got: list[int] = []
    while len(got) < 5:
        for event in (await anext(first)).events:
            got += event.tokens.token_ids
    received = [router_pb2.SequenceOffset(token_ids=got)]
    text = ""
    second = stub.Resume(router_pb2.ResumeRequest(request=asked, received=received))
    async for response in second:
        for event in response.events:
            if event.HasField("tokens"):
                assert event.tokens.token_offset == len(got)
                got += event.tokens.token_ids
                text += event.tokens.text
        if len(got) >= len(whole.token_ids):
            break
    second.cancel()
    assert tuple(got[: len(whole.token_ids)]) == whole.token_ids
    _, found, held_back = decode(got).rpartition(text)
    assert found
    assert not held_back.strip("\ufffd")
    with pytest.raises(grpc.aio.AioRpcError) as told:
        async for _ in first:
            pass
    assert "continues in another call" in (told.value.details() or "")


async def test_resume_repeats_nothing_that_finished(mesh: Mesh) -> None:
    stub = router_pb2_grpc.MeshServiceStub(mesh.channel)
    asked = request("over", stopping=pb.StoppingConfig(max_tokens=5))
    (whole,) = await mesh.client.complete([PROMPTS[0]], max_tokens=5)
    sequence = router_pb2.SequenceOffset(
        token_ids=whole.token_ids, finished=True, reason=pb.FINISH_REASON_LENGTH
    )
    resume = router_pb2.ResumeRequest(request=asked, received=[sequence])
    kinds = [e.WhichOneof("event") async for r in stub.Resume(resume) for e in r.events]
    assert kinds == ["accepted", "item_finished"]
    resume.finished_items.append(0)
    kinds = [e.WhichOneof("event") async for r in stub.Resume(resume) for e in r.events]
    assert kinds == ["accepted"]


@pytest.mark.parametrize("end", ["the context", "max_tokens", "an end id", "a stop word"])
async def test_stream_cut_between_its_last_token_and_its_end_ends_as_uncut(end: str) -> None:
    flags = (*ENGINE, *WIDE_TOKENS, "--simulated-limits-max-sequence-tokens", "40")
    async with running_mesh(engine_flags=flags) as mesh:
        stub = router_pb2_grpc.MeshServiceStub(mesh.channel)
        (free,) = await mesh.client.complete([PROMPTS[0]], max_tokens=9)
        stopping = {
            "the context": pb.StoppingConfig(),
            "max_tokens": pb.StoppingConfig(max_tokens=9),
            "an end id": pb.StoppingConfig(end_id=free.token_ids[5]),
            "a stop word": pb.StoppingConfig(stop_token_ids=[pb.TokenIds(ids=free.token_ids[4:6])]),
        }[end]
        asked = request(stopping=stopping)
        uncut = [event async for told in stub.Generate(asked) for event in told.events]
        tokens = [token for event in uncut for token in event.tokens.token_ids]
        received = router_pb2.SequenceOffset(token_ids=tokens)
        resume = router_pb2.ResumeRequest(request=asked, received=[received])
        cut = [event async for told in stub.Resume(resume) for event in told.events]
        assert not any(event.HasField("tokens") and event.tokens.token_ids for event in cut)
        assert cut[-2:] == uncut[-2:]
        assert cut[-2].HasField("sequence_finished")
        await mesh.idle()
