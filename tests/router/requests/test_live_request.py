"""Stops, departures and deadlines around a request's end: one terminal event per item, and no leaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
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
from trtmesh.router.doors.native import Responses
from trtmesh.router.requests.placer import REPEAT_SECONDS
from trtmesh.router.streams.client_stream import Waiting, as_response
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb
from trtmesh.v1 import router_pb2_grpc

REQUEST = "r"
STOPPED = pb.FINISH_REASON_STOPPED
GAUGES = ("live_requests", "live_items", "queued_items", "worker_sequences", "worker_bookings")


def terminal(event: router_pb.GenerateEvent) -> bool:
    return event.WhichOneof("event") in ("item_finished", "item_failed")


def ends_of(events: list[router_pb.GenerateEvent]) -> list[int]:
    """Items by received terminal event, with repeats."""
    return sorted(event.batch_index for event in events if terminal(event))


@dataclass
class LastWrite:
    """Blocks the write of the message with the first terminal event."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)


@pytest.fixture
def last_write(monkeypatch: pytest.MonkeyPatch) -> LastWrite:
    held, now, later = LastWrite(), Responses.write_now, Responses.write

    def is_last(message: Sequence[Waiting]) -> bool:
        return any(map(terminal, as_response(message).events))

    def write_now(responses: Responses, message: Sequence[Waiting]) -> bool:
        return not is_last(message) and now(responses, message)

    async def write(responses: Responses, message: Sequence[Waiting]) -> None:
        if is_last(message):
            held.begun.set()
            await held.may_end.wait()
        await later(responses, message)

    monkeypatch.setattr(Responses, "write_now", write_now)
    monkeypatch.setattr(Responses, "write", write)
    return held


class Asked:
    """A request over a socket, and the client's events."""

    def __init__(self, client: RouterClient, items: int, timeout: float | None = None) -> None:
        request = router_pb.GenerateRequest(request_id=REQUEST)
        for _ in range(items):
            request.items.add().prompt.token_ids.ids.append(5)
        request.config.stopping.max_tokens = 9
        request.config.output.text = False
        self.request = request
        self.client = client
        self.stub = router_pb2_grpc.MeshServiceStub(client._routers[0].channel)
        self.call = self.stub.Generate(request, timeout=timeout)
        self.events: list[router_pb.GenerateEvent] = []
        self.status: grpc.StatusCode | None = None
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for response in self.call:
                self.events += response.events
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            pass
        self.status = await self.call.code()

    async def end(self) -> None:
        await self._reading

    async def stop(self) -> None:
        await self.client.stop(REQUEST)

    async def cancel(self) -> None:
        self.call.cancel()

    async def stop_and_cancel(self) -> None:
        await self.stop()
        self.call.cancel()

    async def take_over(self) -> None:
        """Resumes in another call, as a client does after a lost call."""
        async for response in self.stub.Resume(router_pb.ResumeRequest(request=self.request)):
            self.events += response.events


@asynccontextmanager
async def router_of(engine: ScriptedEngine, **settings: Any) -> AsyncIterator[RouterClient]:
    async with (
        serving_engine(engine) as address,
        serving_router([address], **settings) as client,
    ):
        await until_states(client, [READY], [])
        yield client
        await until_nothing_is_live(client)


async def until_nothing_is_live(client: RouterClient) -> None:
    await eventually(lambda: not any(map(client.gauge, GAUGES)))


def engine() -> ScriptedEngine:
    return ScriptedEngine(supported_fields=["stopping.max_tokens"])


async def test_stop_during_the_last_write_changes_nothing(last_write: LastWrite) -> None:
    worker = engine()
    async with router_of(worker) as client:
        asked = Asked(client, items=1)
        (submit,) = await worker.submitted()
        await worker.step((submit.handle, 0, [7]), ends=[(submit.handle, LENGTH)])
        await last_write.begun.wait()
        assert await client.stop(REQUEST) == 0
        last_write.may_end.set()
        await asked.end()
        assert asked.status is grpc.StatusCode.OK
        assert ends_of(asked.events) == [0]
        assert asked.events[-1].item_finished.reason == LENGTH
        assert not worker.stops


async def test_stop_during_a_siblings_last_write_ends_the_rest(
    last_write: LastWrite,
) -> None:
    worker = engine()
    async with router_of(worker) as client:
        asked = Asked(client, items=2)
        first, second = sorted(await worker.submitted(2), key=lambda s: s.batch_index)
        await worker.step((first.handle, 0, [7]), ends=[(first.handle, LENGTH)])
        await last_write.begun.wait()
        assert await client.stop(REQUEST) == 1
        await eventually(lambda: worker.stops == [(second.handle, STOPPED)])
        await worker.step((second.handle, 0, [8]), ends=[(second.handle, STOPPED)])
        last_write.may_end.set()
        await asked.end()
        assert asked.status is grpc.StatusCode.OK
        assert ends_of(asked.events) == [0, 1]
        reasons = [e.item_finished.reason for e in asked.events if terminal(e)]
        assert reasons == [LENGTH, STOPPED]


@pytest.mark.parametrize("items", [1, 2])
@pytest.mark.parametrize("vanish", [Asked.cancel, Asked.stop_and_cancel])
async def test_client_leaving_during_the_last_write_leaves_nothing(
    last_write: LastWrite, vanish: Callable[[Asked], Awaitable[None]], items: int
) -> None:
    worker = engine()
    async with router_of(worker) as client:
        asked = Asked(client, items)
        first, *others = sorted(await worker.submitted(items), key=lambda s: s.batch_index)
        await worker.step((first.handle, 0, [7]), ends=[(first.handle, LENGTH)])
        await last_write.begun.wait()
        await vanish(asked)
        await asked.end()
        assert asked.status is grpc.StatusCode.CANCELLED
        assert not ends_of(asked.events)
        await eventually(
            lambda: [handle for handle, _ in worker.stops] == [s.handle for s in others]
        )
        await worker.step(ends=[(handle, pb.FINISH_REASON_CANCELLED) for handle, _ in worker.stops])


async def end_next(worker: ScriptedEngine) -> None:
    """Ends the next sequence with its first token."""
    *_, submit = await worker.submitted(len(worker.submits) + 1)
    await worker.step((submit.handle, 0, [7]), ends=[(submit.handle, LENGTH)])


async def test_deadline_during_the_last_write_leaves_nothing(
    last_write: LastWrite,
) -> None:
    worker = engine()
    async with router_of(worker) as client:
        seconds = 0.25
        while not last_write.begun.is_set():
            # Some machine takes longer to come to the write.
            seconds *= 2
            asked = Asked(client, items=1, timeout=seconds)
            ending = asyncio.create_task(end_next(worker))
            await asked.end()
            await until_nothing_is_live(client)
            ending.cancel()
        assert asked.status is grpc.StatusCode.DEADLINE_EXCEEDED
        assert not ends_of(asked.events)


async def test_takeover_during_the_last_write_repeats_the_end_once(
    last_write: LastWrite,
) -> None:
    worker = engine()
    async with router_of(worker) as client:
        asked = Asked(client, items=1)
        (submit,) = await worker.submitted()
        await worker.step((submit.handle, 0, [7]), ends=[(submit.handle, LENGTH)])
        await last_write.begun.wait()
        resumed = asyncio.create_task(asked.take_over())
        await asked.end()
        assert asked.status is grpc.StatusCode.UNAVAILABLE
        _, again = await worker.submitted(2)
        last_write.may_end.set()
        await worker.step((again.handle, 0, [7]), ends=[(again.handle, LENGTH)])
        await resumed
        assert ends_of(asked.events) == [0]


@pytest.mark.parametrize("end", [Asked.stop, Asked.cancel, Asked.stop_and_cancel])
async def test_each_item_ends_exactly_once(
    end: Callable[[Asked], Awaitable[None]],
) -> None:
    """The worker's end and another end, separated by a growing number of passes of the event loop."""
    worker = engine()
    async with router_of(worker) as client:
        for passes in range(40):
            worker.commands.clear()
            asked = Asked(client, items=2)
            submits = await worker.submitted(2)
            last = asyncio.create_task(
                worker.step(
                    *((s.handle, 0, [7]) for s in submits),
                    ends=[(s.handle, LENGTH) for s in submits],
                )
            )
            for _ in range(passes):
                await asyncio.sleep(0)
            await end(asked)
            await asyncio.gather(last, asked.end())
            if asked.status is grpc.StatusCode.OK:
                assert ends_of(asked.events) == [0, 1]
            else:
                assert asked.status is grpc.StatusCode.CANCELLED
                assert end is not Asked.stop
                assert len(set(ends_of(asked.events))) == len(ends_of(asked.events))
            await eventually(lambda: not any(map(client.gauge, GAUGES)))


async def test_stop_ends_an_item_waiting_for_a_worker() -> None:
    worker, recovery = engine(), 3600.0
    async with AsyncExitStack() as stack:
        connection = await stack.enter_async_context(AsyncExitStack())
        address = await connection.enter_async_context(serving_engine(worker))
        client = await stack.enter_async_context(
            serving_router([address], retries={"worker_wait_seconds": recovery})
        )
        await until_states(client, [READY], [])
        asked = Asked(client, items=1)
        (submit,) = await worker.submitted()
        await worker.step((submit.handle, 0, [7]))
        await eventually(lambda: any(event.HasField("tokens") for event in asked.events))
        await connection.aclose()
        await eventually(lambda: not client.gauge("worker_sequences"))
        # After a few attempts the item waits for a change of the fleet.
        await asyncio.sleep(3 * REPEAT_SECONDS)
        assert await client.stop(REQUEST) == 1
        await asked.end()
        assert ends_of(asked.events) == [0]
        finished = asked.events[-1].item_finished
        assert (finished.reason, finished.usage.generated_tokens) == (STOPPED, 1)
