from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import pytest
from chaos.proxy import proxy_to
from client.scripted import ScriptedRouter
from trtmesh.chassis.error_wire import REASON_METADATA_KEY, to_proto
from trtmesh.chassis.errors import (
    ERROR_TABLE,
    DeadlineExceeded,
    ErrorRow,
    OutOfBlocks,
    PromptTooLong,
    StreamIncomplete,
    TrtmeshError,
    Unavailable,
)
from trtmesh.client import (
    Accepted,
    Client,
    FinishReason,
    GenerationConfig,
    ItemFailed,
    ItemFinished,
    ItemStarted,
    PromptDetails,
    SequenceFinished,
    SequenceStarted,
    Tokens,
    Usage,
)
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2

Event = router_pb2.GenerateEvent


def response(*events: router_pb2.GenerateEvent) -> router_pb2.GenerateResponse:
    return router_pb2.GenerateResponse(events=events)


def accepted(request: router_pb2.GenerateRequest) -> router_pb2.GenerateEvent:
    return Event(accepted=router_pb2.RequestAccepted(request_id=request.request_id, model="demo"))


def tokens(
    batch: int, offset: int, ids: list[int], text: str, sequence: int = 0
) -> router_pb2.GenerateEvent:
    return Event(
        batch_index=batch,
        sequence_index=sequence,
        tokens=router_pb2.TokensGenerated(token_offset=offset, token_ids=ids, text=text),
    )


def sequence_finished(batch: int, sequence: int = 0) -> router_pb2.GenerateEvent:
    finished = router_pb2.SequenceFinished(reason=pb.FINISH_REASON_LENGTH, generated_tokens=2)
    return Event(batch_index=batch, sequence_index=sequence, sequence_finished=finished)


def item_finished(batch: int) -> router_pb2.GenerateEvent:
    finished = router_pb2.ItemFinished(
        reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage(prompt_tokens=3, generated_tokens=2)
    )
    return Event(batch_index=batch, item_finished=finished)


async def two_tokens_each(
    request: router_pb2.GenerateRequest, context: Any
) -> AsyncIterator[router_pb2.GenerateResponse]:
    batches = range(len(request.items))
    yield response(accepted(request))
    yield response(*(tokens(batch, 0, [batch], "a") for batch in batches))
    yield response(*(tokens(batch, 1, [batch + 10], "b") for batch in batches))
    yield response(*(sequence_finished(batch) for batch in batches))
    yield response(*(item_finished(batch) for batch in batches))


async def one_token_then_silence(
    request: router_pb2.GenerateRequest, context: Any
) -> AsyncIterator[router_pb2.GenerateResponse]:
    yield response(accepted(request), tokens(0, 0, [1], "a"))
    await asyncio.Event().wait()


async def one_token_and_no_time_left(
    request: router_pb2.GenerateRequest, context: Any
) -> AsyncIterator[router_pb2.GenerateResponse]:
    yield response(accepted(request), tokens(0, 0, [1], "a"))
    # As gRPC ends a call whose time is up.
    await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


async def test_batches_of_events_come_out_flat_and_in_order(
    router: ScriptedRouter, client: Client
) -> None:
    router.script = two_tokens_each
    events = [event async for event in client.generate(["x", "y"], request_id="r1")]
    assert [type(event) for event in events] == [
        Accepted, Tokens, Tokens, Tokens, Tokens,
        SequenceFinished, SequenceFinished, ItemFinished, ItemFinished,
    ]  # fmt: skip
    assert events[0] == Accepted(0, 0, "r1", "demo", 0)
    assert events[2] == Tokens(1, 0, 0, (1,), "a", None)
    assert events[-1] == ItemFinished(1, 0, FinishReason.LENGTH, Usage(3, 0, 2), None)


async def test_every_event_kind_has_a_value(router: ScriptedRouter, client: Client) -> None:
    """A kind added to the proto must be read by the client."""

    async def every_kind(
        request: router_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        for field in Event.DESCRIPTOR.oneofs_by_name["event"].fields:
            event = Event()
            getattr(event, field.name).SetInParent()
            yield response(event)

    router.script = every_kind
    kinds = {type(event) async for event in client.generate(["x"])}
    assert kinds == {
        Accepted, ItemStarted, PromptDetails, SequenceStarted, Tokens, SequenceFinished, ItemFinished, ItemFailed,
    }  # fmt: skip
    assert len(kinds) == len(Event.DESCRIPTOR.oneofs_by_name["event"].fields)


async def test_unset_optional_values_are_none(router: ScriptedRouter, client: Client) -> None:
    async def bare(
        request: router_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        finished = router_pb2.SequenceFinished(reason=pb.FINISH_REASON_STOP_WORD, stop_text="")
        yield response(sequence_finished(0), Event(sequence_finished=finished), item_finished(0))

    router.script = bare
    without, with_text, _ = [event async for event in client.generate(["x"])]
    assert isinstance(without, SequenceFinished)
    assert isinstance(with_text, SequenceFinished)
    assert (without.stop_text, without.cumulative_log_prob) == (None, None)
    assert (with_text.stop_text, with_text.reason) == ("", FinishReason.STOP_WORD)


async def test_unknown_event_kinds_and_reasons_are_survived(
    router: ScriptedRouter, client: Client
) -> None:
    async def newer(
        request: router_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        yield response(accepted(request))
        # Field 99 of GenerateEvent: a kind that a later version of the proto may have.
        yield response(Event.FromString(b"\x9a\x06\x02\x08\x01"))
        late = Event(item_finished=router_pb2.ItemFinished())
        late.item_finished.reason = 77  # type: ignore[assignment]  # a value of a later version
        yield response(late)

    router.script = newer
    first, last = [event async for event in client.generate(["x"])]
    assert isinstance(first, Accepted)
    assert isinstance(last, ItemFinished)
    assert last.reason is FinishReason.UNKNOWN


async def test_a_stream_without_all_terminal_events_is_incomplete(
    router: ScriptedRouter, client: Client
) -> None:
    async def forgets_the_second(
        request: router_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        yield response(accepted(request), item_finished(0))

    router.script = forgets_the_second
    events = client.generate(["x", "y"])
    assert isinstance(await anext(events), Accepted)
    assert isinstance(await anext(events), ItemFinished)
    with pytest.raises(StreamIncomplete, match="item 1"):
        await anext(events)


@pytest.mark.parametrize("row", ERROR_TABLE, ids=lambda row: row.reason)
async def test_a_failed_call_raises_the_error_of_its_reason(
    router: ScriptedRouter, client: Client, row: ErrorRow
) -> None:
    async def refuses(
        request: router_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        trailing = ((REASON_METADATA_KEY, row.reason),)
        await context.abort(row.status, "top_k is -1", trailing_metadata=trailing)
        yield response()

    router.script = refuses
    with pytest.raises(row.error) as caught:
        await client.complete(["x"])
    assert type(caught.value) is row.error
    assert caught.value.message == "top_k is -1"


async def test_a_status_without_a_reason_gives_the_error_of_the_status(
    router: ScriptedRouter, client: Client
) -> None:
    async def plain(
        request: router_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "a proxy said so")
        yield response()

    router.script = plain
    with pytest.raises(Unavailable, match="a proxy said so"):
        await client.complete(["x"])


async def test_a_call_that_the_router_cancels_does_not_look_like_a_cancelled_task(
    router: ScriptedRouter, client: Client
) -> None:
    async def cancels(
        request: router_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        await context.abort(grpc.StatusCode.CANCELLED, "gone")
        yield response()

    router.script = cancels
    with pytest.raises(TrtmeshError, match="gone"):
        await client.complete(["x"])


async def test_closing_the_client_does_not_look_like_a_cancelled_task(
    router: ScriptedRouter, client: Client
) -> None:
    router.script = one_token_then_silence
    async with Client(client.address) as short_lived:
        events = short_lived.generate(["x"])
        await anext(events)
        await anext(events)
        reading = asyncio.ensure_future(anext(events))
        # One turn of the loop, so that the read is under way when the client closes.
        await asyncio.sleep(0)
    with pytest.raises(TrtmeshError, match="closed"):
        await reading


async def test_nobody_listening_is_unavailable() -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(Unavailable):
            await client.complete(["x"])
        with pytest.raises(Unavailable):
            await client.stop("r")


@pytest.mark.parametrize("routers", [1, 2])
async def test_a_router_that_is_far_away_or_busy_is_waited_for(
    router: ScriptedRouter, client: Client, routers: int
) -> None:
    router.script = two_tokens_each
    async with proxy_to(client.address) as proxy:
        proxy.delay(0.2)
        async with Client([proxy.address] * routers, resume_seconds=0) as far:
            (item,) = await far.complete(["x"])
            assert item.reason is not None


async def test_leaving_early_cancels_the_call(router: ScriptedRouter, client: Client) -> None:
    router.script = one_token_then_silence
    async with aclosing(client.generate(["x"])) as events:
        async for event in events:
            if isinstance(event, Tokens):
                break
    await router.call_ended.wait()


async def test_cancelling_the_task_cancels_the_call(router: ScriptedRouter, client: Client) -> None:
    router.script = one_token_then_silence
    arrived = asyncio.Event()

    async def read() -> None:
        async for event in client.generate(["x"]):
            if isinstance(event, Tokens):
                arrived.set()

    task = asyncio.create_task(read())
    await arrived.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await router.call_ended.wait()


async def test_the_deadline_reaches_the_router(router: ScriptedRouter, client: Client) -> None:
    router.script = two_tokens_each
    await client.complete(["x"], timeout_seconds=300)
    assert router.time_remaining is not None
    # On the wire, a long timeout is rounded up to whole seconds.
    assert 0 < router.time_remaining <= 301


async def test_a_deadline_that_passes_raises(router: ScriptedRouter, client: Client) -> None:
    router.script = one_token_then_silence
    with pytest.raises(DeadlineExceeded, match=r"^request late .* within its timeout of 0.2 s: "):
        await client.complete(["x"], request_id="late", timeout_seconds=0.2)


async def test_a_deadline_that_the_router_notices_first_is_told_in_the_same_words(
    router: ScriptedRouter, client: Client
) -> None:
    router.script = one_token_and_no_time_left
    told = (
        "request late was not complete within its timeout of 300 s: 2 of its 2 items had not ended;"
        " allow more time, or ask for fewer tokens"
    )
    with pytest.raises(DeadlineExceeded, match=f"^{told}$"):
        await client.complete(["x", "y"], request_id="late", timeout_seconds=300)


async def test_a_request_id_is_drawn_when_none_is_given(
    router: ScriptedRouter, client: Client
) -> None:
    router.script = two_tokens_each
    await client.complete(["x"])
    await client.complete(["x"])
    await client.complete(["x"], request_id="mine", model="demo")
    first, second, third = router.requests
    assert first.request_id
    assert first.request_id != second.request_id
    assert (third.request_id, third.model) == ("mine", "demo")


async def test_complete_folds_per_item_and_sequence(router: ScriptedRouter, client: Client) -> None:
    async def script(
        request: router_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        started = router_pb2.ItemStarted(seed=7, prompt_tokens=3, worker="engine-0")
        error = to_proto(PromptTooLong("9 tokens", worker="engine-1"))
        failed = router_pb2.ItemFailed(error=error, usage=pb.Usage(prompt_tokens=9))
        yield response(
            accepted(request),
            Event(batch_index=0, item_started=started),
            tokens(0, 0, [1, 2], "ab"),
            tokens(0, 0, [5], "x", sequence=1),
            Event(batch_index=1, item_failed=failed),
            tokens(0, 2, [3], "c"),
            tokens(0, 3, [], "!"),
            sequence_finished(0),
            sequence_finished(0, sequence=1),
            item_finished(0),
        )

    router.script = script
    good, bad = await client.complete(["x", "y"])
    assert (good.text, good.token_ids, good.reason) == ("abc!", (1, 2, 3), FinishReason.LENGTH)
    assert (good.error, good.usage) == (None, Usage(3, 0, 2))
    assert good.started is not None
    assert (good.started.seed, good.started.worker) == (7, "engine-0")
    assert good.sequences[1].text == "x"
    assert good.sequences[1].reason is FinishReason.LENGTH
    assert isinstance(bad.error, PromptTooLong)
    assert (bad.error.message, bad.error.worker) == ("9 tokens", "engine-1")
    assert (bad.reason, bad.text, bad.usage) == (FinishReason.ERROR, "", Usage(9, 0, 0))


async def test_a_lower_offset_replaces_what_follows_it(
    router: ScriptedRouter, client: Client
) -> None:
    async def rewrites(
        request: router_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        yield response(tokens(0, 0, [1], "a"), tokens(0, 1, [2], "b"), tokens(0, 2, [3], "c"))
        yield response(tokens(0, 1, [7, 8], "xy"), item_finished(0))

    router.script = rewrites
    (result,) = await client.complete(["x"])
    assert (result.text, result.token_ids) == ("axy", (1, 7, 8))


async def test_missing_tokens_are_noticed(router: ScriptedRouter, client: Client) -> None:
    async def skips(
        request: router_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        yield response(tokens(0, 0, [1], "a"), tokens(0, 2, [3], "c"), item_finished(0))

    router.script = skips
    with pytest.raises(StreamIncomplete, match="offset 2 after 1"):
        await client.complete(["x"])


async def test_item_failed_carries_the_error_that_was_meant(
    router: ScriptedRouter, client: Client
) -> None:
    async def fails(
        request: router_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        error = to_proto(OutOfBlocks("too big", worker="engine-0", retry_after_ms=50))
        yield response(Event(item_failed=router_pb2.ItemFailed(error=error)))

    router.script = fails
    (event,) = [event async for event in client.generate(["x"])]
    assert isinstance(event, ItemFailed)
    assert isinstance(event.error, OutOfBlocks)
    assert (event.error.worker, event.error.retry_after_ms) == ("engine-0", 50)


async def test_stop(router: ScriptedRouter, client: Client) -> None:
    assert await client.stop("r1", [0, 2]) == 2
    assert router.stops == [router_pb2.StopRequest(request_id="r1", batch_indexes=[0, 2])]


async def test_what_is_asked_is_what_travels(router: ScriptedRouter, client: Client) -> None:
    router.script = two_tokens_each
    own = router_pb2.GenerateItem(prompt=pb.Prompt(text="c"), config=GenerationConfig(priority=9))
    await client.complete(["a", [1, 2], pb.Prompt(text="b"), own], max_tokens=5, seed=0)
    (request,) = router.requests
    assert [item.prompt.WhichOneof("content") for item in request.items] == [
        "text", "token_ids", "text", "text",
    ]  # fmt: skip
    assert list(request.items[1].prompt.token_ids.ids) == [1, 2]
    assert request.items[3] == own
    assert request.config == GenerationConfig(
        stopping=pb.StoppingConfig(max_tokens=5), sampling=pb.SamplingConfig(seed=0)
    )


async def test_a_closed_client_says_how_to_open_it() -> None:
    with pytest.raises(RuntimeError, match="async with"):
        await Client().complete(["x"])
