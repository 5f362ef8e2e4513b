"""The admin address: separate from the client address, and closed to calls without the token."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from processes import run_to_exit, service_process
from router.adapters.contents_of import content
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
from trtmesh.chassis.connecting import WrongService
from trtmesh.chassis.errors import TrtmeshError, Unauthenticated
from trtmesh.client import AdminClient, AdminToken
from trtmesh.v1 import router_admin_pb2 as admin_pb
from trtmesh.v1 import router_pb2, router_pb2_grpc

SECRET = "s3cret-and-long"
NOBODY = "127.0.0.1:1"


async def every_call(admin: AdminClient) -> list[TrtmeshError]:
    """The error of each failed call."""

    async def watch() -> None:
        async for _ in admin.watch_workers():
            return

    calls: list[Callable[[], Awaitable[object]]] = [
        admin.list_workers,
        watch,
        lambda: admin.add_worker("h:1", wait_seconds=0),
        lambda: admin.drain_worker("w"),
        lambda: admin.resume_worker("w"),
        lambda: admin.remove_worker("w"),
        admin.list_requests,
        lambda: admin.stop_request("r"),
        lambda: admin.move_request("r"),
        admin.get_policy,
        lambda: admin.set_policy("auto"),
        lambda: admin.explain("r"),
        admin.list_adapters,
        lambda: admin.add_adapter(admin_pb.AddAdapterRequest(name="a", source="a")),
        lambda: admin.upload_adapter(admin_pb.AddAdapterRequest(name="a"), content()),
        lambda: admin.remove_adapter(7),
        lambda: admin.pin_adapter(7),
    ]
    errors = []
    for call in calls:
        try:
            await call()
        except TrtmeshError as error:
            errors.append(error)
    return errors


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[RouterClient]:
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\n")
    async with serving_router([NOBODY], admin={"token_file": file}) as client:
        yield client


@pytest.mark.parametrize("token", [None, AdminToken.of("wrong"), AdminToken.of(SECRET + "x")])
async def test_call_without_the_token_is_refused(
    guarded: RouterClient, token: AdminToken | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with AdminClient(guarded.admin.address, token=token) as admin:
        errors = await every_call(admin)
    assert [type(error) for error in errors] == [Unauthenticated] * 17
    assert SECRET not in caplog.text


@pytest.mark.parametrize("token", [AdminToken.of(SECRET), f"{SECRET}\n"])
async def test_token_opens_every_call(guarded: RouterClient, token: AdminToken | str) -> None:
    async with AdminClient(guarded.admin.address, token=token) as admin:
        assert not [e for e in await every_call(admin) if isinstance(e, Unauthenticated)]
        assert (await admin.get_policy()).policy == "auto"


async def test_health_check_needs_no_token(guarded: RouterClient) -> None:
    async with grpc.aio.insecure_channel(guarded.admin.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        name = "trtmesh.v1.RouterAdminService"
        answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
        # Admin calls must work without a worker.
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask]))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_client_and_admin_address_serve_different_services() -> None:
    async with serving_router([NOBODY]) as client:
        async with AdminClient(client.address) as lost:
            errors = await every_call(lost)
        assert [type(error) for error in errors] == [WrongService] * 17
        async with grpc.aio.insecure_channel(client.admin.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await router_pb2_grpc.MeshServiceStub(channel).Stop(router_pb2.StopRequest())
            assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_moved_request_continues_elsewhere_without_a_gap() -> None:
    one, two = (
        ScriptedEngine(worker=name, supported_fields=["stopping.max_tokens"])
        for name in ("one", "two")
    )
    async with (
        serving_engine(one) as first,
        serving_engine(two) as second,
        serving_router([first]) as client,
    ):
        await until_states(client, [READY], [])
        options: dict[str, Any] = {"text": False, "max_tokens": 9, "request_id": "r"}
        asked = asyncio.create_task(client.complete([[1, 2]], **options))
        (submit,) = await one.submitted()
        await one.step((submit.handle, 0, [7, 8]))

        async def tokens_arrived() -> bool:
            (request,) = (await client.admin.list_requests("r")).requests
            return request.items[0].generated_tokens == 2

        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await tokens_arrived():  # noqa: ASYNC110 - another process has the state
                await asyncio.sleep(0.01)
        moved = await client.admin.move_request("r")
        assert (moved.moved_sequences, moved.left_sequences) == (0, 1)
        await client.admin.add_worker(second)
        await until_states(client, [READY, READY], [])
        moved = await client.admin.move_request("r")
        assert (moved.moved_sequences, moved.left_sequences) == (1, 0)
        (again,) = await two.submitted()
        assert (list(again.token_ids), again.emitted_tokens) == ([1, 2, 7, 8], 2)
        await two.step((again.handle, 2, [9]), ends=[(again.handle, LENGTH)])
        (item,) = await asked
        assert list(item.token_ids) == [7, 8, 9]
        # The worker is well, and takes the next item.
        await until_states(client, [READY, READY], [])
        assert not (await client.admin.move_request("r")).moved_sequences


async def test_live_request_is_listed_with_its_sequences() -> None:
    fields = ["stopping.max_tokens", "sampling.num_return_sequences"]
    engine = ScriptedEngine(worker="w", supported_fields=fields)
    async with serving_engine(engine) as address, serving_router([address]) as client:
        await until_states(client, [READY], [])
        first = client.generate(
            [[1, 2], [3]], request_id="first", text=False, max_tokens=9, num_return_sequences=2,
            timeout_seconds=3600,
        )  # fmt: skip
        second = client.generate([[4]], request_id="second", text=False, max_tokens=9)
        await anext(first)
        await anext(second)
        submits = await engine.submitted(3)
        handle = next(s.handle for s in submits if list(s.token_ids) == [1, 2])
        await engine.step((handle, 0, [7, 8]), (handle + 1, 0, [9]))

        async def tokens_arrived() -> bool:
            (request,) = (await client.admin.list_requests("first")).requests
            return request.items[0].generated_tokens == 3

        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await tokens_arrived():  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.005)
        (told,) = (await client.admin.list_requests("first")).requests
        assert (told.request_id, told.model) == ("first", "m")
        # gRPC sends a deadline with three digits, rounded up.
        assert 0 < told.remaining_ms <= 3_640_000
        item, other = told.items
        assert (item.batch_index, item.stage, item.worker) == (0, "generate", "w")
        assert (item.prompt_tokens, other.prompt_tokens) == (2, 1)
        ones = [(s.sequence_index, s.worker, s.generated_tokens) for s in item.sequences]
        assert ones == [(0, "w", 2), (1, "w", 1)]
        assert [s.next_token_offset for s in item.sequences] == [2, 1]
        assert [s.generated_tokens for s in other.sequences] == [0, 0]

        listed = await client.admin.list_requests(limit=1)
        assert [r.request_id for r in listed.requests] == ["first"]
        assert listed.live_requests == 2
        assert not (await client.admin.list_requests("third")).requests
        await first.aclose()
        await second.aclose()


async def test_token_comes_from_the_environment() -> None:
    env = {"TRTMESH_ADMIN_TOKEN": SECRET}
    async with service_process("router", "--port", "0", "--engines", NOBODY, env=env) as router:
        async with AdminClient(router.admin_address) as admin:
            with pytest.raises(Unauthenticated):
                await admin.list_workers()
        async with AdminClient(router.admin_address, token=AdminToken.of(SECRET)) as admin:
            assert len((await admin.list_workers()).workers) == 1
        await router.stop()
    assert "Unauthenticated" not in router.stderr
    assert SECRET not in router.stderr


@pytest.mark.parametrize(
    ("flags", "env", "status", "words"),
    [
        ((), {"TRTMESH_ADMIN_TOKEN": ""}, 2, "TRTMESH_ADMIN_TOKEN is empty"),
        (("--admin-token-file", "/nowhere"), {}, 2, "/nowhere"),
        (
            ("--admin-console", "token"),
            {},
            2,
            "--admin-console is token, and there is none: set admin",
        ),
        (("--admin-host", "a" * 64), {}, 2, f"cannot listen for admins on {'a' * 64}"),
    ],
)
async def test_unusable_admin_address_ends_the_process(
    flags: tuple[str, ...], env: dict[str, str], status: int, words: str
) -> None:
    ended = await run_to_exit("router", "--port", "0", "--engines", NOBODY, *flags, env=env)
    assert ended.status == status
    assert words in ended.stderr


async def test_public_address_without_a_token_is_warned_of() -> None:
    flags = ("--port", "0", "--engines", NOBODY, "--admin-host", "0.0.0.0")
    async with service_process("router", *flags) as router:
        await router.stop()
    assert "without an admin token" in router.stderr
