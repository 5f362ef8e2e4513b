"""A Resume of a live request is admitted first and then replaces the live call."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from process_constants import patch
from router.scene import scene
from router.scripted import (
    LENGTH,
    READY,
    RouterClient,
    ScriptedEngine,
    eventually,
    serving_engine,
    serving_router,
    until_states,
)
from trtmesh.chassis.errors import InvalidField
from trtmesh.router.requests.live_request import LiveRequest
from trtmesh.router.router import WATCH_SECONDS
from trtmesh.router.streams.client_stream import Pace
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb
from trtmesh.v1 import router_pb2_grpc

GAUGES = ("live_requests", "live_items", "queued_items", "worker_sequences", "worker_bookings")


class Call:
    """A call over a socket, and the outcome."""

    def __init__(self, responses: Any) -> None:
        self._responses = responses
        self.events: list[router_pb.GenerateEvent] = []
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> str:
        try:
            async for response in self._responses:
                self.events += response.events
        except grpc.aio.AioRpcError as error:
            reason = dict(error.trailing_metadata() or ())["trtmesh-error-reason"]
            return f"{reason}: {error.details()}"
        return "OK"

    def cancel(self) -> None:
        self._responses.cancel()
        self._reading.cancel()

    async def end(self) -> str:
        return await self._reading

    async def leave(self) -> None:
        """Cancels the call and waits for the end."""
        self.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    def tokens(self) -> list[int]:
        return [token for event in self.events for token in event.tokens.token_ids]


class Door:
    """A router with one worker."""

    def __init__(self, engine: ScriptedEngine, client: RouterClient) -> None:
        self.engine = engine
        self.client = client
        self._stub = router_pb2_grpc.MeshServiceStub(client._routers[0].channel)
        self._calls: list[Call] = []

    async def leave(self) -> None:
        """Ends live calls left by a failed test."""
        for call in self._calls:
            await call.leave()

    def _call(self, responses: Any) -> Call:
        self._calls.append(Call(responses))
        return self._calls[-1]

    @staticmethod
    def request(
        request_id: str, items: int = 1, prompt_tokens: int = 1
    ) -> router_pb.GenerateRequest:
        request = router_pb.GenerateRequest(request_id=request_id)
        for _ in range(items):
            request.items.add().prompt.token_ids.ids.extend([5] * prompt_tokens)
        request.config.stopping.max_tokens = 100
        request.config.sampling.seed = 1
        request.config.output.text = False
        return request

    def generate(self, request: router_pb.GenerateRequest, key: str = "k") -> Call:
        return self._call(self._stub.Generate(request, metadata=(("x-api-key", key),)))

    def resume(
        self,
        request: router_pb.GenerateRequest,
        token_ids: Sequence[int] = (),
        finished_items: Sequence[int] = (),
        key: str = "k",
    ) -> Call:
        received = [router_pb.SequenceOffset(token_ids=token_ids)] if token_ids else []
        resume = router_pb.ResumeRequest(
            request=request, received=received, finished_items=finished_items
        )
        return self._call(self._stub.Resume(resume, metadata=(("x-api-key", key),)))

    async def stop(self, request_id: str, key: str = "k") -> int:
        request = router_pb.StopRequest(request_id=request_id)
        answer = await self._stub.Stop(request, metadata=(("x-api-key", key),))
        return int(answer.stopped_items)

    async def finish(self, number: int, offset: int = 0) -> None:
        """The worker's last token for submission `number`."""
        submit = (await self.engine.submitted(number + 1))[number]
        await self.engine.step((submit.handle, offset, [9]), ends=[(submit.handle, LENGTH)])

    async def stopped(self, number: int) -> None:
        """The worker stops submission `number` on the router's command."""
        handle = self.engine.submits[number].handle
        await eventually(lambda: handle in dict(self.engine.stops))
        await self.engine.step(ends=[(handle, pb.FINISH_REASON_CANCELLED)])


@asynccontextmanager
async def door(**settings: Any) -> AsyncIterator[Door]:
    engine = ScriptedEngine(supported_fields=["stopping.max_tokens", "sampling.seed"])
    async with serving_engine(engine) as address, serving_router([address], **settings) as client:
        await until_states(client, [READY], [])
        door = Door(engine, client)
        try:
            yield door
            await eventually(lambda: not any(map(client.gauge, GAUGES)))
        finally:
            await door.leave()


async def test_refused_resume_leaves_the_live_call() -> None:
    async with door(admission={"max_running_items": 1, "max_queued_items": 1}) as router:
        request = router.request("r")
        live = router.generate(request)
        await router.engine.submitted()
        another = router.generate(router.request("another"))
        await eventually(lambda: router.client.gauge("queued_items") == 1)
        # One item more than the live call, without a free place.
        larger = router.resume(router.request("r", items=2))
        assert (await larger.end()).startswith("QUEUE_FULL: Exceeds maximum queue size")
        await router.finish(0)
        assert await live.end() == "OK"
        await router.finish(1)
        assert await another.end() == "OK"


async def test_resume_replaces_the_live_call_without_free_permits() -> None:
    async with door(
        admission={"max_running_items": 1, "max_queued_items": 1, "max_items": 2},
        rate_limit={"tokens_per_second": 1e-6, "burst_tokens": 1},
    ) as router:
        request = router.request("r")
        live = router.generate(request)
        (submit,) = await router.engine.submitted()
        waiting = router.generate(router.request("waiting"), key="another")
        await eventually(lambda: router.client.gauge("queued_items") == 1)
        await router.engine.step((submit.handle, 0, [7, 8]))
        await eventually(lambda: live.tokens() == [7, 8])
        again = router.resume(request, token_ids=[7])
        assert await live.end() == "UNAVAILABLE: request 'r' continues in another call"
        second = (await router.engine.submitted(2))[1]
        # Ahead of waiting items, in the place of the ended call.
        assert (second.request_id, second.emitted_tokens) == ("r", 1)
        await router.stopped(0)
        await router.finish(1, offset=1)
        assert await again.end() == "OK"
        assert again.tokens() == [9]
        await router.finish(2)
        assert await waiting.end() == "OK"


async def test_last_of_several_resumes_wins() -> None:
    """The last that the router reads: calls of one moment have no order."""
    async with door(admission={"max_running_items": 1, "max_queued_items": 3}) as router:
        request = router.request("r")
        live = router.generate(request)
        await router.engine.submitted()
        calls = [live, *(router.resume(request) for _ in range(3))]
        ends = {asyncio.create_task(call.end()): call for call in calls}
        over: set[asyncio.Task[str]] = set()
        while len(over) < 3:
            done, _ = await asyncio.wait(ends.keys() - over, return_when=asyncio.FIRST_COMPLETED)
            over |= done
        assert {task.result() for task in over} == {
            "UNAVAILABLE: request 'r' continues in another call"
        }
        (last,) = ends.keys() - over
        assert ends[last] is not live
        await eventually(lambda: ends[last].events)
        for number, submit in enumerate(router.engine.submits[:-1]):
            assert submit.request_id == "r"
            await router.stopped(number)
        await router.finish(len(router.engine.submits) - 1)
        assert await last == "OK"


async def test_requests_of_two_keys_may_have_one_id() -> None:
    """Resume and Stop by another key find nothing, as for an unknown id."""
    async with door() as router:
        request = router.request("r")
        live = router.generate(request)
        await router.engine.submitted()
        assert await router.stop("r", key="stranger") == await router.stop("unknown", key="k") == 0
        stranger = router.resume(request, key="stranger")
        await router.engine.submitted(2)
        second = router.generate(request, key="stranger")
        assert (await second.end()).startswith("ALREADY_EXISTS: request_id 'r' is live; choose")
        assert not router.engine.stops
        await router.finish(1)
        assert await stranger.end() == "OK"
        assert await router.stop("r", key="k") == 1
        await router.stopped(0)
        assert await live.end() == "OK"


async def test_admin_names_the_owner_where_there_are_several() -> None:
    async with door() as router:
        admin = router.client.admin
        one = router.generate(router.request("r"), key="one")
        await router.engine.submitted()
        (first,) = (await admin.list_requests("r")).requests
        two = router.generate(router.request("r"), key="two")
        await router.engine.submitted(2)
        listed = (await admin.list_requests("r")).requests
        (other,) = {live.owner for live in listed} - {first.owner}
        assert first.owner.startswith("unlisted:")
        for ambiguous in (admin.stop_request("r"), admin.explain("r")):
            with pytest.raises(InvalidField, match=f"several owners: .*{other}"):
                await ambiguous
        assert len((await admin.explain("r", owner=other)).placements) == 1
        assert await admin.stop_request("r", owner=other) == 1
        await router.stopped(1)
        assert await two.end() == "OK"
        assert await admin.stop_request("r") == 1
        await router.stopped(0)
        assert await one.end() == "OK"


async def test_client_leaving_during_a_resume_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with door() as router:
        request = router.request("r")
        live = router.generate(request)
        await router.engine.submitted()
        # The live call ends slowly.
        monkeypatch.setattr(LiveRequest, "end", lambda *_: None)
        again = router.resume(request)
        await eventually(lambda: router.client.gauge("live_items") == 2)
        again.cancel()
        await eventually(lambda: router.client.gauge("live_items") == 1)
        await router.finish(0)
        assert await live.end() == "OK"


async def test_received_tokens_are_not_charged_again() -> None:
    async with door(rate_limit={"tokens_per_second": 1e-6, "burst_tokens": 10}) as router:
        for number in range(9):
            request = router.request(f"r{number}", prompt_tokens=50)
            going_on = router.resume(request, token_ids=[7] * 20)
            await router.finish(number, offset=20)
            assert await going_on.end() == "OK"
        # One token is left for a new request; a resumed one may be in debt.
        last = router.generate(router.request("last", prompt_tokens=5))
        await router.finish(9)
        assert await last.end() == "OK"
        assert (await router.generate(router.request("new")).end()).startswith("RATE_LIMITED: ")
        nothing_yet = router.resume(router.request("nothing yet"))
        assert (await nothing_yet.end()).startswith("RATE_LIMITED: ")
        indebted = router.resume(router.request("indebted"), token_ids=[7])
        await router.finish(10, offset=1)
        assert await indebted.end() == "OK"


async def test_each_resume_is_charged_its_items() -> None:
    """Live or not: up to a debt of a burst."""
    async with door(rate_limit={"items_per_second": 1e-6, "burst_items": 2}) as router:
        request = router.request("r")
        live = router.generate(request)
        await router.engine.submitted()
        for number in range(4):
            before, live = live, router.resume(request, token_ids=[7] if number % 2 else [])
            assert await before.end() == "UNAVAILABLE: request 'r' continues in another call"
            await router.engine.submitted(number + 2)
            await router.stopped(number)
        refused = "RATE_LIMITED: .* used up its 1e-06 items a second"
        assert re.match(refused, await router.resume(request).end())
        elsewhere = router.resume(router.request("another"), token_ids=[7])
        assert re.match(refused, await elsewhere.end())
        await router.finish(4, offset=1)
        assert await live.end() == "OK"


async def test_fully_received_request_is_accepted_and_over() -> None:
    async with door() as router:
        over = router.resume(router.request("r", items=2), finished_items=[0, 1])
        assert await over.end() == "OK"
        (accepted,) = over.events
        assert accepted.accepted.request_id == "r"


async def test_explain_keeps_the_items_own_indexes() -> None:
    async with door() as router:
        call = router.resume(router.request("r", items=3), finished_items=[0])
        await router.engine.submitted(2)
        told = await router.client.admin.explain("r")
        assert len(told.usages) == 2
        assert list(told.usage_batch_indexes) == [1, 2]
        for number in range(2):
            await router.finish(number)
        assert await call.end() == "OK"


async def test_priority_above_the_callers_own_is_refused() -> None:
    engine = ScriptedEngine(supported_fields=["stopping.max_tokens", "priority"])
    async with scene(engine, rate_limit={"max_priority": 3}) as on:
        with pytest.raises(
            InvalidField, match="priority is 4, but anonymous may ask for at most 3"
        ):
            await on.ask([5], max_tokens=1, text=False, priority=4)
        asked = on.ask([5], max_tokens=1, text=False, priority=3)
        (submit,) = await on.engine.submitted()
        await on.engine.step((submit.handle, 0, [65]), ends=[(submit.handle, LENGTH)])
        assert (await asked)[0].error is None


async def test_waiting_requests_are_not_judged_before_a_message_can_be_unread_for_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judged: list[Pace] = []
    judge = Pace.judge

    def counted(self: Pace, now: float) -> None:
        judged.append(self)
        judge(self, now)

    monkeypatch.setattr(Pace, "judge", counted)
    patch(monkeypatch, client_unread_seconds=3600)
    async with door() as router:
        asked = [router.generate(router.request(f"r{number}")) for number in range(50)]
        await eventually(lambda: len(router.engine.submits) == len(asked))
        # Ten looks of the router.
        await asyncio.sleep(10 * WATCH_SECONDS)
        assert len(judged) <= len(asked)
        for number in range(len(asked)):
            await router.finish(number)
        assert [await each.end() for each in asked] == ["OK"] * len(asked)
