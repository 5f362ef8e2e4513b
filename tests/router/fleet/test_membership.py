"""Admin operations on workers, and their reports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Any

import pytest
from e2e.mesh import SIMULATED
from log_lines import LogLine
from processes import service_process
from router.scripted import (
    LENGTH,
    PATIENCE_SECONDS,
    READY,
    RouterClient,
    ScriptedEngine,
    eventually,
    serving_engine,
    serving_router,
    until_states,
)
from router.scripted_fleet import refusal
from trtmesh.chassis import addresses
from trtmesh.chassis.addresses import Address
from trtmesh.chassis.errors import (
    AlreadyExists,
    Draining,
    InvalidField,
    NotFound,
    NoWorker,
    WorkerLost,
)
from trtmesh.chassis.logs import request_id_bound
from trtmesh.router.fleet import link_local, membership
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import router_admin_pb2 as admin_pb

DRAINING = admin_pb.WORKER_STATE_DRAINING
REFUSED = admin_pb.WORKER_STATE_REFUSED


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
        await self._end(self.one.submits[:1])

    async def end_rest(self) -> None:
        await self._end(self.one.submits[1:])

    async def _end(self, submits: Sequence[epb.SubmitCommand]) -> None:
        handles = [submit.handle for submit in submits]
        tokens = [(handle, 0, [7]) for handle in handles]
        await self.one.step(*tokens, ends=[(handle, LENGTH) for handle in handles])

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
        serving_router([first], deadlines={"silence_seconds": 60}) as client,
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


@pytest.mark.parametrize(
    "address",
    ["file:/etc/passwd", "file:x:1", "nowhere", "", "vlm://a:1", "vllm://a", "http://a:1"],
)
async def test_only_an_address_is_added(address: str) -> None:
    async with serving_router([]) as client:
        with pytest.raises(InvalidField) as refused:
            await client.admin.add_worker(address)
        assert (refused.value.field, refused.value.value) == ("address", repr(address))
        assert refused.value.limit.startswith(
            "host:port, with an IPv6 host in brackets, or that after"
        )
        await until_states(client, [], [])


@pytest.mark.parametrize(
    "address",
    [
        *("169.254.169.254:80", "169.254.0.1:9000", "[fe80::1]:9000", "[fd00:ec2::254]:80"),
        *("[::ffff:169.254.169.254]:80", "100.100.100.200:80", "metadata.test:80"),
        *("[64:ff9b::a9fe:a9fe]:80", "[64:ff9b:1::169.254.169.254]:80", "[2002:a9fe:a9fe::1]:80"),
        *("[::169.254.169.254]:80", "[::ffff:0:169.254.169.254]:80", "[fe80::1%1]:80"),
        "[2001:0:a9fe:a9fe::f5ff:fffe]:80",
    ],
)
async def test_link_local_and_metadata_addresses_are_refused_unless_allowed(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No resolver is at hand; every other host is an address and needs none.
    monkeypatch.setattr(addresses, "resolved", named({"metadata.test": [PLAIN, METADATA]}))
    async with serving_router([]) as client:
        with pytest.raises(InvalidField, match=r"router\.admin\.allow_link_local") as refused:
            await client.admin.add_worker(address, wait_seconds=0)
        assert refused.value.field == "address"
        assert not (await client.status()).workers
    async with serving_router([], admin={"allow_link_local": True}) as client:
        await client.admin.add_worker(address, wait_seconds=0)
        assert len((await client.status()).workers) == 1


PLAIN, METADATA = "10.0.0.1", "169.254.169.254"


def named(hosts: Mapping[str, list[str]]) -> Any:
    """A lookup that knows some hosts."""
    look_up = addresses.resolved

    async def found(address: Address) -> Sequence[str]:
        return hosts[address.host] if address.host in hosts else await look_up(address)

    return found


async def test_name_is_checked_again_when_it_is_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first lookup may have another answer than its second, or one of tomorrow."""
    refused = ip_network("127.0.0.2/32")
    monkeypatch.setattr(link_local, "REFUSED_NETWORKS", (refused,))
    hosts = {"rebinding.test": ["127.0.0.1"]}
    monkeypatch.setattr(addresses, "resolved", named(hosts))
    reached = asyncio.Event()
    async with (
        # Held, so that no worker of another test has this port and answers at the first address.
        await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1") as plain,
        await asyncio.start_server(
            lambda *_: reached.set(), "127.0.0.2", port := plain.sockets[0].getsockname()[1]
        ),
        serving_router([]) as client,
    ):
        address = f"rebinding.test:{port}"
        await client.admin.add_worker(address, wait_seconds=0)
        hosts["rebinding.test"] = ["127.0.0.1", "127.0.0.2"]

        async def problem() -> str:
            (worker,) = (await client.status()).workers
            return str(worker.problem)

        expected = "at 127.0.0.2: link-local and metadata addresses are refused"
        async with asyncio.timeout(PATIENCE_SECONDS):
            while expected not in await problem():  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.01)
        assert not reached.is_set()


async def test_checked_name_is_dialled_at_each_of_its_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving_engine(scripted("one")) as one, serving_router([]) as client:
        host, port = Address.parse(one)
        monkeypatch.setattr(addresses, "resolved", named({"engine.test": ["127.0.0.3", host]}))
        await client.admin.add_worker(f"engine.test:{port}")
        await until_states(client, [READY], [])


async def test_worker_without_an_answer_is_told_and_removed() -> None:
    async with serving_engine(scripted("one")) as one, serving_router([one]) as client:
        await until_states(client, [READY], [])
        with pytest.raises(WorkerLost, match=r"no worker answered at 127\.0\.0\.1:1 within 0.3 s"):
            await client.admin.add_worker("127.0.0.1:1", wait_seconds=0.3)
        await until_states(client, [READY], [])
        added = await client.admin.add_worker(one, wait_seconds=0.3)
        assert added.worker.state == READY


async def test_known_worker_stays_without_an_answer() -> None:
    async with serving_router(["127.0.0.1:1"]) as client:
        with pytest.raises(WorkerLost, match="it stays, as it was there before"):
            await client.admin.add_worker("127.0.0.1:1", wait_seconds=0.1)
        await until_states(client, [admin_pb.WORKER_STATE_CONNECTING], [])


async def test_admin_who_leaves_during_the_wait_leaves_no_worker() -> None:
    async with serving_router([]) as client:
        adding = asyncio.create_task(client.admin.add_worker("127.0.0.1:1", wait_seconds=60))
        await until_states(client, [admin_pb.WORKER_STATE_CONNECTING], [])
        adding.cancel()
        await asyncio.gather(adding, return_exceptions=True)
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
        await client.admin.add_worker("127.0.0.1:1", wait_seconds=0)
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


ROLES = [epb.WORKER_ROLE_MIXED, epb.WORKER_ROLE_PREFILL, epb.WORKER_ROLE_DECODE]


def changing(name: str) -> ScriptedEngine:
    return ScriptedEngine(worker=name, supported_fields=["stopping.max_tokens"], roles=ROLES)


@asynccontextmanager
async def two_items_on_one() -> AsyncIterator[tuple[RouterClient, ScriptedEngine, ScriptedEngine]]:
    """A router with two items on one of two workers that take any role."""
    one, two = changing("one"), changing("two")
    async with (
        serving_engine(one) as first,
        serving_engine(two) as second,
        serving_router([first], deadlines={"silence_seconds": 60}) as client,
    ):
        await until_states(client, [READY], [])
        asked = asyncio.create_task(client.complete([[5], [6]], max_tokens=9, text=False))
        try:
            await one.submitted(2)
            await client.admin.add_worker(second)
            await until_states(client, [READY, READY], [])
            yield client, one, two
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)


async def until_asked(engine: ScriptedEngine) -> epb.WorkerRole.ValueType:
    """Waits for a change of role; returns the role."""
    await eventually(lambda: any(c.HasField("set_role") for c in engine.commands))
    return next(c.set_role.role for c in engine.commands if c.HasField("set_role"))


async def test_sequences_leave_a_worker_that_becomes_a_prefill_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "ROLE_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(membership, "TAKEN_SECONDS", PATIENCE_SECONDS)
    async with two_items_on_one() as (client, one, two):
        changed = asyncio.create_task(client.admin.set_worker_role("one", "prefill"))
        assert await until_asked(one) == epb.WORKER_ROLE_PREFILL
        await one.report(role=epb.WORKER_ROLE_PREFILL)
        response = await changed
        assert response.moved_sequences == 2
        assert response.worker.load.role == epb.WORKER_ROLE_PREFILL
        assert len(two.submits) == 2
        (seen,) = [w for w in (await client.status()).workers if w.worker == "one"]
        assert seen.state == READY


async def test_sequences_leave_when_another_router_changed_the_role() -> None:
    async with two_items_on_one() as (_, one, two):
        await one.report(role=epb.WORKER_ROLE_PREFILL)
        await two.submitted(2)


async def test_sequences_stay_on_a_worker_that_becomes_a_decode_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "ROLE_SECONDS", PATIENCE_SECONDS)
    async with two_items_on_one() as (client, one, two):
        changed = asyncio.create_task(client.admin.set_worker_role("one", "decode"))
        assert await until_asked(one) == epb.WORKER_ROLE_DECODE
        await one.report(role=epb.WORKER_ROLE_DECODE)
        assert (await changed).moved_sequences == 0
        assert not two.submits


async def test_sequences_without_another_worker_stay_through_a_change_of_role() -> None:
    async with two_items_on_one() as (client, one, two):
        await client.admin.drain_worker("two")
        await one.report(role=epb.WORKER_ROLE_PREFILL)
        async with aclosing(client.admin.watch_workers()) as updates:
            async for update in updates:
                (seen,) = [worker for worker in update.workers if worker.worker == "one"]
                if seen.load.role == epb.WORKER_ROLE_PREFILL:
                    break
        assert seen.items == 2
        assert not two.submits


async def test_role_of_an_unknown_worker_is_refused() -> None:
    async with two_items_on_one() as (client, _, _):
        with pytest.raises(NotFound) as refused:
            await client.admin.set_worker_role("three", "decode")
        assert refused.value.field == "worker"


async def test_role_that_a_worker_lacks_is_refused() -> None:
    async with three_items_on_one() as on:
        with pytest.raises(InvalidField) as refused:
            await on.client.admin.set_worker_role("one", "decode")
        assert (refused.value.field, refused.value.value) == ("role", "'decode'")
        assert not any(c.HasField("set_role") for c in on.one.commands)


async def test_worker_that_keeps_its_role_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "ROLE_SECONDS", 0.1)
    async with two_items_on_one() as (client, _, two):
        with pytest.raises(WorkerLost) as failed:
            await client.admin.set_worker_role("one", "decode")
        assert failed.value.worker == "one"
        await two.hang_up()
        two.refusal = "stays away"
        await until_states(client, [READY, admin_pb.WORKER_STATE_REFUSED], [])
        with pytest.raises(WorkerLost) as failed:
            await client.admin.set_worker_role("two", "decode")
        assert failed.value.worker == "two"


async def test_worker_drained_through_one_router_is_drained_for_all_until_any_resumes_it() -> None:
    """Whichever router stops: the drain is the worker's."""
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(service_process("engine", *SIMULATED, "--worker", name))
            for name in ("one", "two")
        ]
        served = [engine.address for engine in engines]
        # A slow moment is no stall.
        patient: dict[str, Any] = {"deadlines": {"silence_seconds": 60}}
        other = await stack.enter_async_context(serving_router(served, **patient))
        async with serving_router(served, **patient) as client:
            for each in (client, other):
                await until_states(each, [READY, READY], [])
            drained = await client.admin.drain_worker("one")
            assert not drained.only_here
            for each in (client, other):
                await until_states(each, [READY, DRAINING], [])
        await only_on_two(other)
        problems = {w.worker: w.problem for w in (await other.status()).workers}
        assert problems == {"one": "an admin drains it", "two": ""}

        async with serving_router(served, **patient) as client:
            await until_states(client, [READY, DRAINING], [])
            await client.admin.drain_worker("one")
            assert (await other.admin.resume_worker("one")).worker.state == READY
            for each in (client, other):
                await until_states(each, [READY, READY], [])


async def only_on_two(client: RouterClient) -> None:
    items = await client.complete([[5], [6], [7], [8]], max_tokens=1, text=False)
    assert {item.started and item.started.worker for item in items} == {"two"}


async def test_drain_of_a_worker_that_takes_no_such_command_says_that_it_is_only_here() -> None:
    async with serving_engine(scripted("old")) as address, serving_router([address]) as client:
        await until_states(client, [READY], [])
        drained = await client.admin.drain_worker("old")
        assert drained.only_here
        assert drained.worker.problem == "an admin drains it, on this router alone"
        assert (await client.admin.resume_worker("old")).worker.state == READY


async def test_stopping_worker_is_not_resumed() -> None:
    one = scripted("one")
    async with serving_engine(one) as address, serving_router([address]) as client:
        await until_states(client, [READY], [])
        await one.report(draining=True, drain_ms=60_000)
        await until_states(client, [DRAINING], [])
        with pytest.raises(Draining, match="one stops"):
            await client.admin.resume_worker("one")


async def test_second_address_of_a_process_is_no_second_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A scripted worker does not tell that it drains.
    monkeypatch.setattr(membership, "ROLE_SECONDS", 0.1)
    one, twin = scripted("same"), scripted("same")
    one.description.instance = twin.description.instance = "a process"
    async with serving_engine(one) as first, serving_engine(twin) as second:
        async with serving_router([first, second]) as client:
            await until_states(client, [READY, REFUSED], [])
            refused = next(w for w in (await client.status()).workers if w.state == REFUSED)
            assert "it is the process at 127.0.0.1:" in refused.problem
            # Its name is the other's.
            assert (await client.admin.drain_worker("same")).worker.address != refused.address
            await client.admin.resume_worker("same")
            # Once the first link is gone, the second address serves.
            await client.admin.remove_worker("same")
            await until_states(client, [READY], [])
        async with serving_router([first]) as client:
            await until_states(client, [READY], [])
            with pytest.raises(AlreadyExists, match="it is the process at"):
                await client.admin.add_worker(second)
            await until_states(client, [READY], [])


async def test_spellings_of_an_address_are_one_worker() -> None:
    async with serving_engine(scripted("one")) as address, serving_router([address]) as client:
        await until_states(client, [READY], [])
        port = address.rpartition(":")[2]
        for host in ("127.0.0.1", "localhost", "127.1", "[::ffff:127.0.0.1]"):
            added = await client.admin.add_worker(f"{host}:{port}")
            assert added.worker.address == address
            await client.admin.drain_worker(f"{host}:{port}")
            await until_states(client, [DRAINING], [])
            await client.admin.resume_worker(f"{host}:{port}")
        await until_states(client, [READY], [])
