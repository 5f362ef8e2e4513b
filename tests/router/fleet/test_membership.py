"""Admin operations on workers, and their reports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest
from log_lines import LogLine
from router.scripted import (
    LENGTH,
    PATIENCE_SECONDS,
    READY,
    RouterClient,
    ScriptedEngine,
    serving_engine,
    serving_router,
    until_states,
)
from router.scripted_fleet import refusal
from trtmesh.chassis.errors import Draining, InvalidField, NotFound, NoWorker
from trtmesh.chassis.logs import request_id_bound
from trtmesh.router.fleet import membership
from trtmesh.v1 import router_admin_pb2 as admin_pb

DRAINING = admin_pb.WORKER_STATE_DRAINING


def scripted(name: str) -> ScriptedEngine:
    return ScriptedEngine(worker=name, supported_fields=["stopping.max_tokens"])


@dataclass
class Fleet:
    """A router with a worker running three items, and an unconnected second worker."""

    client: RouterClient
    one: ScriptedEngine
    two: ScriptedEngine
    one_address: str
    two_address: str

    async def end_first(self) -> None:
        await self.one.step(ends=[(self.one.submits[0].handle, LENGTH)])

    async def end_rest(self) -> None:
        await self.one.step(ends=[(submit.handle, LENGTH) for submit in self.one.submits[1:]])

    async def refuse_rest(self) -> None:
        """The worker ends its remaining sequences with DRAINING."""
        rest = self.one.submits[1:]
        await self.one.step(ends=[refusal(each.handle, Draining("it stops")) for each in rest])

    async def die(self) -> None:
        await self.one.hang_up()

    async def join_second(self) -> None:
        await self.client.admin.add_worker(self.two_address)
        await until_states(self.client, [DRAINING, READY], [])


@asynccontextmanager
async def three_items_on_one() -> AsyncIterator[Fleet]:
    one, two = scripted("one"), scripted("two")
    async with (
        serving_engine(one) as first,
        serving_engine(two) as second,
        serving_router([first], deadlines={"stall_seconds": 60}) as client,
    ):
        await until_states(client, [READY], [])
        asked = asyncio.create_task(client.complete([[5], [6], [7]], max_tokens=9, text=False))
        try:
            await one.submitted(3)
            yield Fleet(client, one, two, first, second)
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)


@pytest.mark.parametrize(
    ("rest", "finished", "moved"),
    [(Fleet.end_rest, 3, 0), (Fleet.refuse_rest, 1, 2), (Fleet.die, 1, 2)],
)
async def test_drain_counts_ends_and_moves(
    rest: Callable[[Fleet], Awaitable[None]],
    finished: int,
    moved: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "TAKEN_SECONDS", PATIENCE_SECONDS)
    async with three_items_on_one() as on:
        draining = asyncio.create_task(on.client.admin.drain_worker("one"))
        await until_states(on.client, [DRAINING], [])
        await on.join_second()
        await on.end_first()
        await rest(on)
        drained = await draining
        assert (drained.finished_sequences, drained.moved_sequences) == (finished, moved)
        assert drained.left_sequences == 0
        assert len(on.two.submits) == moved


async def test_unplaced_sequences_of_a_lost_worker_count_as_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "TAKEN_SECONDS", 0)
    async with three_items_on_one() as on:
        draining = asyncio.create_task(on.client.admin.drain_worker("one"))
        await until_states(on.client, [DRAINING], [])
        await on.die()
        drained = await draining
        assert (drained.finished_sequences, drained.moved_sequences) == (0, 0)
        assert drained.left_sequences == 3


async def test_ambiguous_name_is_refused() -> None:
    async with AsyncExitStack() as stack:
        addresses = [
            await stack.enter_async_context(serving_engine(scripted("same"))) for _ in range(2)
        ]
        client = await stack.enter_async_context(serving_router(addresses))
        await until_states(client, [READY, READY], [])
        admin = client.admin
        for call in (admin.drain_worker, admin.resume_worker, admin.remove_worker):
            with pytest.raises(InvalidField) as refused:
                await call("same")
            error = refused.value
            assert (error.field, error.value) == ("worker", "'same'")
            assert error.limit == f"one of {', '.join(sorted(addresses))}"
        await until_states(client, [READY, READY], [])
        await admin.drain_worker(addresses[0])
        await until_states(client, [DRAINING, READY], [])
        await admin.remove_worker(addresses[0])
        await until_states(client, [READY], [])
        assert (await admin.drain_worker("same")).worker.address == addresses[1]


@pytest.mark.parametrize("address", ["file:/etc/passwd", "file:x:1", "nowhere", ""])
async def test_only_an_address_is_added(address: str) -> None:
    async with serving_router([]) as client:
        with pytest.raises(InvalidField) as refused:
            await client.admin.add_worker(address)
        assert (refused.value.field, refused.value.value) == ("address", repr(address))
        assert refused.value.limit == "host:port, with an IPv6 host in brackets"
        await until_states(client, [], [])


async def test_removed_worker_returns_only_by_an_add() -> None:
    async with three_items_on_one() as on:
        admin = on.client.admin
        await admin.drain_worker("one", finish_seconds=0)
        await admin.remove_worker("one")
        with pytest.raises(NotFound) as unknown:
            await admin.resume_worker("one")
        assert (unknown.value.field, unknown.value.value) == ("worker", "'one'")
        await until_states(on.client, [DRAINING], [])
        added = await admin.add_worker(on.one_address)
        assert added.worker.state == READY
        await on.end_first()
        await on.end_rest()
        await until_states(on.client, [READY], [])


@pytest.mark.parametrize("model", ["", "m"])
async def test_error_without_workers_names_cause_and_remedy(model: str) -> None:
    async with serving_engine(scripted("one")) as address, serving_router([address]) as client:
        await until_states(client, [READY], [])
        await client.admin.remove_worker("one")
        await until_states(client, [], [])
        with pytest.raises(NoWorker, match="trtmesh workers add"):
            await client.complete([[5]], model=model, text=False)
        await client.admin.add_worker("127.0.0.1:1")
        with pytest.raises(NoWorker, match=r"127\.0\.0\.1:1: "):
            await client.complete([[5]], model=model, text=False)


async def test_log_lines_of_a_link_have_no_request_id(
    logged: Callable[[], list[LogLine]],
) -> None:
    """Not even for a link opened by an admin's call."""
    engine = scripted("one")
    async with serving_engine(engine) as address:
        with request_id_bound("r-admin"):
            async with serving_router([address]) as client:
                await until_states(client, [READY], [])
    (ready,) = [line for line in logged() if line.message == f"{address} is ready"]
    assert ready.request_id == "-"


async def test_workers_are_sorted_by_numbers_in_their_names() -> None:
    names = ["engine-10", "other", "engine-9", "engine-2", "engine-2"]
    async with AsyncExitStack() as stack:
        serving = [serving_engine(scripted(name)) for name in names]
        addresses = [await stack.enter_async_context(engine) for engine in serving]
        client = await stack.enter_async_context(serving_router(addresses))
        await until_states(client, [READY] * len(names), [])
        listed = (await client.status()).workers
        ordered = ["engine-2", "engine-2", "engine-9", "engine-10", "other"]
        assert [worker.worker for worker in listed] == ordered
        assert [worker.address for worker in listed[:2]] == sorted(
            addresses[3:], key=lambda address: int(address.rpartition(":")[2])
        )
