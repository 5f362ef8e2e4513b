"""Events of the SDK."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from client.scripted import (
    Event,
    ScriptedRouter,
    accepted,
    item_finished,
    response,
    sequence_finished,
    two_tokens_each,
)
from trtmesh.chassis.error_wire import to_proto
from trtmesh.chassis.errors import (
    OutOfBlocks,
)
from trtmesh.client import (
    Accepted,
    Client,
    FinishReason,
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


async def test_events_of_one_message_are_flat_and_in_order(
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


async def test_unknown_kinds_are_skipped_and_unknown_reasons_are_named(
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


async def test_failed_item_carries_its_error_and_the_error_s_fields(
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
