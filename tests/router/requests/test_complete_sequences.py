"""A worker dies after the last token of a sequence and before its end: the router ends it as the worker would have."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from router.scripted import ScriptedEngine
from router.scripted_fleet import FIELDS, fleet
from trtmesh.client import FinishReason
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb
from trtmesh.v1 import router_pb2_grpc

STOPPING = [
    f"stopping.{name}" for name in ("end_id", "ignore_end_id", "min_tokens", "stop_token_ids")
]
LENGTH, END_ID, STOP_WORD = (
    pb.FINISH_REASON_LENGTH,
    pb.FINISH_REASON_END_ID,
    pb.FINISH_REASON_STOP_WORD,
)


def engine(name: str, **description: Any) -> ScriptedEngine:
    """A worker of sequences of six tokens, whose model ends with 2."""
    values: dict[str, Any] = {"max_sequence_tokens": 6, "end_ids": [2]} | description
    fields = [*FIELDS, *STOPPING, "output.perf_metrics"]
    return ScriptedEngine(worker=name, supported_fields=fields, **values)


CASES: Mapping[str, tuple[list[int], dict[str, Any], dict[str, Any], Any, tuple[int, ...]]] = {
    "the context is full": ([7, 8, 9, 7], {"max_tokens": 9}, {}, LENGTH, ()),
    "and no limit was asked for": ([7, 8, 9, 7], {"max_tokens": None}, {}, LENGTH, ()),
    "the pool is full": (
        *([7, 8, 9], {"max_tokens": None}, {"tokens_per_block": 2, "total_blocks": 2}),
        *(LENGTH, ()),
    ),
    "as many as asked": ([7, 8], {"max_tokens": 2}, {}, LENGTH, ()),
    "the model's end": ([7, 2], {}, {}, END_ID, (2,)),
    "the client's end": ([7, 3], {"end_id": 3}, {}, END_ID, (3,)),
    "a stop word": ([7, 4, 5], {"stop_token_ids": [[4, 5]]}, {}, STOP_WORD, (4, 5)),
}


async def tell(worker: ScriptedEngine, handle: int, tokens: list[int]) -> None:
    """Sends tokens one by one, each with a log-probability."""
    for offset, token in enumerate(tokens):
        details = pb.TokenDetails(log_probs=[-0.5])
        step = epb.Step(
            handles=[handle],
            token_offsets=[offset],
            token_counts=[1],
            token_ids=[token],
            details=[epb.SequenceDetails(handle=handle, details=details)],
        )
        await worker.send(epb.EngineEvent(step=step))


def request(asks: Mapping[str, Any]) -> router_pb.GenerateRequest:
    """Asks for what `StoppingConfig` has, with all that an end tells."""
    config = pb.GenerationConfig(sampling=pb.SamplingConfig(seed=3))
    config.output.log_probs = config.output.perf_metrics = True
    config.output.text = False
    for name, value in {"max_tokens": 9, **asks}.items():
        if name == "stop_token_ids":
            config.stopping.stop_token_ids.extend(pb.TokenIds(ids=ids) for ids in value)
        elif value is not None:
            setattr(config.stopping, name, value)
    item = router_pb.GenerateItem(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=[5, 6])))
    return router_pb.GenerateRequest(request_id="r", config=config, items=[item])


async def events_of(call: Any) -> list[router_pb.GenerateEvent]:
    return [event async for answer in call for event in answer.events]


@pytest.mark.parametrize("case", CASES)
async def test_complete_sequence_ends_without_a_worker(case: str) -> None:
    tokens, asks, describes, reason, stop_ids = CASES[case]
    async with fleet(engine("one", **describes)) as on:
        (one,) = on.engines
        stub = router_pb2_grpc.MeshServiceStub(on.client._routers[0].channel)
        asked = asyncio.create_task(events_of(stub.Generate(request(asks))))
        (submit,) = await one.submitted()
        await tell(one, submit.handle, tokens)
        one.refusal = "it is dead"
        await one.hang_up()
        events = await asked
        told = [token for event in events for token in event.tokens.token_ids]
        end, over = events[-2].sequence_finished, events[-1].item_finished
        assert (told, end.reason, over.reason) == (tokens, reason, reason)
        assert tuple(end.stop_token_ids) == stop_ids
        assert end.cumulative_log_prob == -0.5 * len(tokens)
        times = end.perf_metrics
        assert 0 < times.arrival_time_ns < times.first_token_time_ns <= times.last_token_time_ns
        assert end.generated_tokens == over.usage.generated_tokens == len(tokens)


async def test_sequence_short_of_its_end_goes_on_elsewhere() -> None:
    async with fleet(engine("one"), engine("two")) as on:
        # The first end id comes too early to count.
        asked = on.ask([5, 6], min_tokens=1, stop_token_ids=[[4, 5]])
        one = await on.first()
        (submit,) = one.submits
        await tell(one, submit.handle, [2, 5])
        await one.hang_up()
        (moved,) = await on.other(one).submitted()
        assert moved.emitted_tokens == 2
        end = epb.SequenceEnd(handle=moved.handle, reason=END_ID, stop_token_ids=[2])
        await on.other(one).step((moved.handle, 2, [2]), ends=[end])
        (item,) = await asked
        assert item.sequences[0].token_ids == (2, 5, 2)


async def test_each_sequence_ends_or_moves_on_its_own() -> None:
    async with fleet(engine("one"), engine("two")) as on:
        asked = on.ask([5, 6], num_return_sequences=2, temperature=1.0, seed=3)
        one = await on.first()
        (submit,) = one.submits
        await tell(one, submit.handle, [7, 2])
        await tell(one, submit.handle + 1, [7])
        await one.hang_up()
        (moved,) = await on.other(one).submitted()
        assert (moved.sequence_index, moved.emitted_tokens) == (1, 1)
        await on.other(one).step((moved.handle, 1, [7, 8, 9]), ends=[(moved.handle, LENGTH)])
        (item,) = await asked
        assert [each.token_ids for each in item.sequences] == [(7, 2), (7, 7, 8, 9)]
        assert [each.reason for each in item.sequences] == [
            FinishReason.END_ID,
            FinishReason.LENGTH,
        ]


@pytest.mark.parametrize("case", CASES)
async def test_complete_sequence_of_a_lost_router_ends_at_the_next(case: str) -> None:
    tokens, asks, describes, reason, stop_ids = CASES[case]
    async with fleet(engine("one", **describes)) as on:
        received = router_pb.SequenceOffset(token_ids=tokens, cumulative_log_prob=-2.5)
        stub = router_pb2_grpc.MeshServiceStub(on.client._routers[0].channel)
        resume = router_pb.ResumeRequest(request=request(asks), received=[received])
        end, over = (await events_of(stub.Resume(resume)))[-2:]
        assert end.sequence_finished.reason == over.item_finished.reason == reason
        assert tuple(end.sequence_finished.stop_token_ids) == stop_ids
        assert end.sequence_finished.cumulative_log_prob == -2.5
        assert over.item_finished.usage.generated_tokens == len(tokens)
        assert not on.engines[0].submits
