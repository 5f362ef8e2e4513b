"""Legs of an item: which begins where another ended, and what its spans say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from trtmesh.chassis.errors import WorkerLost
from trtmesh.chassis.tracing.spans import MOST_EVENTS, Span, TraceContext
from trtmesh.router.tracing import CallTrace, ItemTrace, LegTrace
from trtmesh.router.values.request import parse_request
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb

LOST = WorkerLost("the worker is gone")


class Ended:
    """Keeps the spans that ended."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def begin(self, parent: TraceContext | None, name: str) -> TraceContext | None:
        return TraceContext(1, 2)

    def ended(self, span: Span) -> None:
        assert span.end_ns >= span.begin_ns
        assert span not in self.spans
        self.spans.append(span)

    def named(self, operation: str) -> list[Span]:
        return [each for each in self.spans if each.name.split()[0] == operation]


@pytest.fixture
def ended() -> Ended:
    return Ended()


@pytest.fixture
def item(ended: Ended) -> ItemTrace:
    request = router_pb.GenerateRequest(request_id="r", model="demo")
    request.items.add().prompt.text = "text"
    call = CallTrace.begin(ended, "native", [])
    assert call is not None
    valid = parse_request(request, "")
    call.opens(valid)
    call.began("demo")
    return call.item(valid.items[0])


def run_of(tokens: int, index: int = 0) -> Any:
    """A sequence with so many tokens."""
    reason = pb.FINISH_REASON_LENGTH
    times = SimpleNamespace(first_token=0.0, arrival=0.0)
    return SimpleNamespace(
        sequence_index=index, token_ids=[*range(tokens)], reason=reason, times=times
    )


def begun(item: ItemTrace, worker: str, *runs: Any, by_handoff: bool = False) -> LegTrace:
    leg = item.leg(worker, {run.sequence_index: len(run.token_ids) for run in runs})
    item.began(leg, by_handoff=by_handoff)
    return leg


def over(item: ItemTrace, *runs: Any, error: str = "") -> None:
    usage = pb.Usage(generated_tokens=sum(len(run.token_ids) for run in runs))
    item.over(runs, usage, pb.FINISH_REASON_LENGTH, error, None)


def test_second_copy_is_linked_and_goes_on_where_the_first_is_behind(
    ended: Ended, item: ItemTrace
) -> None:
    first = begun(item, "a", run_of(0))
    copy = item.leg("b", {0: 4})
    item.copied(copy)
    assert copy.span.links == [first.span.context]
    item.switched(run_of(6), None)
    over(item, run_of(10))
    slow, fast = ended.named("leg")
    assert (slow.attributes["trtmesh.worker"], slow.attributes["trtmesh.end"]) == ("a", "hedged")
    assert (slow.attributes["trtmesh.tokens"], fast.attributes["trtmesh.tokens"]) == (6, 6)
    assert fast.links == [first.span.context]
    (told,) = ended.spans[-1].events
    assert (told.name, told.attributes["trtmesh.reason"]) == ("migrated", "hedged")
    assert told.attributes["trtmesh.offset"] == 6


def test_copy_that_loses_ends_and_the_first_goes_on(ended: Ended, item: ItemTrace) -> None:
    begun(item, "a", run_of(0))
    item.copied(item.leg("b", {0: 4}))
    item.dropped(run_of(6), "lost")
    item.dropped(run_of(6), "lost")
    over(item, run_of(10))
    copy, first = ended.named("leg")
    assert (copy.attributes["trtmesh.worker"], copy.attributes["trtmesh.end"]) == ("b", "lost")
    assert first.attributes["trtmesh.tokens"] == 10
    assert not ended.spans[-1].events


def test_copy_ends_with_its_item(ended: Ended, item: ItemTrace) -> None:
    begun(item, "a", run_of(0))
    item.copied(item.leg("b", {0: 4}))
    over(item, run_of(10))
    assert len(ended.named("leg")) == 2


def test_sequences_leave_a_leg_one_by_one(ended: Ended, item: ItemTrace) -> None:
    """As the sequences of an item do that migrates: each has a leg of its own from then on."""
    runs = [run_of(0, 0), run_of(0, 1)]
    first = begun(item, "a", *runs)
    item.left([run_of(3, 0)], "worker_lost", LOST)
    assert ended.named("leg") == []
    second = begun(item, "b", run_of(3, 0))
    item.left([run_of(5, 1)], "worker_lost", LOST)
    assert ended.named("leg") == [first.span]
    assert (first.span.error, first.span.attributes["trtmesh.tokens"]) == ("WORKER_LOST", 8)
    third = begun(item, "c", run_of(5, 1))
    for leg in (second, third):
        assert leg.span.links == [first.span.context]
    over(item, run_of(8, 0), run_of(8, 1))
    assert [each.attributes["trtmesh.tokens"] for each in ended.named("leg")[1:]] == [5, 3]
    assert [each.attributes["trtmesh.to"] for each in ended.spans[-1].events] == ["b", "c"]


def test_leg_that_nobody_ended_ends_with_the_next(ended: Ended, item: ItemTrace) -> None:
    first = begun(item, "a", run_of(0))
    second = begun(item, "b", run_of(2), by_handoff=True)
    assert ended.named("leg") == [first.span]
    assert second.span.links == [first.span.context]
    over(item, run_of(2), error="QUEUE_FULL")
    assert [each.error for each in ended.named("leg")] == ["", "QUEUE_FULL"]
    assert [each.name for each in ended.spans[-1].events] == ["handoff"]


def test_item_that_moves_for_ever_holds_few_spans(ended: Ended, item: ItemTrace) -> None:
    moves = 2 * MOST_EVENTS
    for count in range(moves):
        item.enters("paused" if count % 2 else "place")
        begun(item, "ab"[count % 2], run_of(count))
    assert len(ended.spans) == 2 * (moves - 1)
    over(item, run_of(moves))
    assert len(ended.spans[-1].events) == MOST_EVENTS


def test_stage_that_goes_on_is_one_span(ended: Ended, item: ItemTrace) -> None:
    for stage in ("admit", "encode", "place", "place", "generate", "place", "over"):
        item.enters(stage)
    assert [each.name for each in ended.spans] == [
        "queue demo",
        "encode demo",
        "place demo",
        "place demo",
    ]
