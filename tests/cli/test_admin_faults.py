"""Output and exit status of commands with an absent, frozen or stuck router, and of scripted answers."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from subprocess import CompletedProcess
from typing import Any

import pytest
from cli.commands import running, trtmesh
from processes import service_process
from trtmesh.chassis.grpc.server import GrpcServer
from trtmesh.v1 import generation_pb2, router_admin_pb2_grpc
from trtmesh.v1 import router_admin_pb2 as pb

MESSAGE_BYTES = 64 * 2**20

COMMANDS = (
    ("status",),
    ("top",),
    ("explain", "r"),
    ("policy", "get"),
    ("policy", "set", "auto"),
    ("requests", "list"),
    ("requests", "show", "r"),
    ("requests", "stop", "r"),
    ("workers", "list"),
    ("workers", "watch"),
    ("workers", "add", "h:1"),
    ("workers", "drain", "w"),
    ("workers", "resume", "w"),
    ("workers", "remove", "w"),
)
READY, DRAINING = pb.WORKER_STATE_READY, pb.WORKER_STATE_DRAINING


async def run(*arguments: str) -> CompletedProcess[str]:
    return await asyncio.to_thread(trtmesh, *arguments)


async def run_all(address: str, *flags: str) -> dict[Sequence[str], CompletedProcess[str]]:
    """Every command, two at a time."""
    turns = asyncio.Semaphore(2)

    async def one(command: Sequence[str]) -> CompletedProcess[str]:
        async with turns:
            return await run(*command, "--admin", address, *flags)

    return dict(zip(COMMANDS, await asyncio.gather(*map(one, COMMANDS)), strict=True))


async def test_no_command_hangs_without_a_router() -> None:
    for command, result in (await run_all("127.0.0.1:1")).items():
        assert result.returncode == 1, command
        (line,) = result.stderr.splitlines()
        assert line.startswith("trtmesh: error: UNAVAILABLE: router 127.0.0.1:1: "), command


async def test_no_command_hangs_on_a_frozen_router() -> None:
    async with service_process("router", "--port", "0", "--engines", "127.0.0.1:1") as router:
        router.signal(signal.SIGSTOP)
        for command, result in (await run_all(router.admin_address, "--timeout", "0.5")).items():
            assert result.returncode == 1, command
            (line,) = result.stderr.splitlines()
            # The answer is late, or the greeting of the connection before it.
            assert line.startswith("trtmesh: error: "), command
            assert router.admin_address in line, command
            assert "it is frozen, " in line, command


class ScriptedAdmin(router_admin_pb2_grpc.RouterAdminServiceServicer):
    """Returns scripted answers and records the requests."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.left_sequences = 0
        self.frozen = asyncio.Event()
        self.probes = asyncio.Semaphore(0)
        """One entry for each liveness check of a command."""
        self.watch_ended = asyncio.Event()

    async def AddWorker(self, request: Any, context: Any) -> pb.AddWorkerResponse:
        self.asked.append(request)
        worker = pb.Worker(address=request.address, state=pb.WORKER_STATE_CONNECTING)
        return pb.AddWorkerResponse(worker=worker)

    async def DrainWorker(self, request: Any, context: Any) -> pb.DrainWorkerResponse:
        self.asked.append(request)
        return pb.DrainWorkerResponse(
            worker=pb.Worker(worker="w", address="h:1", state=DRAINING),
            finished_sequences=2,
            moved_sequences=3,
            left_sequences=self.left_sequences,
        )

    async def ResumeWorker(self, request: Any, context: Any) -> pb.ResumeWorkerResponse:
        self.asked.append(request)
        return pb.ResumeWorkerResponse(worker=pb.Worker(worker="w", address="h:1", state=READY))

    async def RemoveWorker(self, request: Any, context: Any) -> pb.RemoveWorkerResponse:
        self.asked.append(request)
        return pb.RemoveWorkerResponse(moved_sequences=4)

    async def Explain(self, request: Any, context: Any) -> pb.ExplainResponse:
        usages = [generation_pb2.Usage(prompt_tokens=2), generation_pb2.Usage(prompt_tokens=3)]
        return pb.ExplainResponse(usages=usages, usage_batch_indexes=[1, 4])

    async def WatchWorkers(self, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            for state in (pb.WORKER_STATE_CONNECTING, READY):
                yield pb.WatchWorkersResponse(workers=[pb.Worker(worker="w", state=state)])
            await asyncio.Event().wait()
        finally:
            self.watch_ended.set()

    async def GetPolicy(self, request: Any, context: Any) -> pb.GetPolicyResponse:
        self.probes.release()
        if self.frozen.is_set():
            await asyncio.Event().wait()
        return pb.GetPolicyResponse()


@asynccontextmanager
async def scripted() -> AsyncIterator[tuple[ScriptedAdmin, str]]:
    # Abstract for mypy: the other calls answer UNIMPLEMENTED.
    admin = ScriptedAdmin()  # type: ignore[abstract]
    server = GrpcServer(MESSAGE_BYTES)
    router_admin_pb2_grpc.add_RouterAdminServiceServicer_to_server(admin, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield admin, f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=None)


async def test_workers_are_added_drained_resumed_and_removed() -> None:
    async with scripted() as (admin, address):
        flags = ("--admin", address)
        added = await run("workers", "add", "h:1", *flags)
        assert (added.returncode, added.stdout) == (0, "worker h:1 is connecting\n")
        drained = await run("workers", "drain", "w", "--finish-seconds", "1.5", *flags)
        assert drained.returncode == 0
        assert drained.stdout == ("worker w at h:1 is draining\nsequences: 2 ended, 3 moved\n")
        resumed = await run("workers", "resume", "w", *flags, "--json")
        assert json.loads(resumed.stdout)["worker"]["state"] == "WORKER_STATE_READY"
        removed = await run("workers", "remove", "w", *flags)
        assert (removed.returncode, removed.stdout) == (0, "w was removed; 4 sequences moved\n")
        assert admin.asked == [
            pb.AddWorkerRequest(address="h:1", wait_ms=5000),
            pb.DrainWorkerRequest(worker="w", finish_ms=1500),
            pb.ResumeWorkerRequest(worker="w"),
            pb.RemoveWorkerRequest(worker="w"),
        ]
        admin.left_sequences = 1
        left = await run("workers", "drain", "w", *flags, "--json")
        assert left.returncode == 1
        assert json.loads(left.stdout)["left_sequences"] == 1
        assert "1 sequences are left" in left.stderr
        assert not admin.asked[-1].HasField("finish_ms")


async def test_watch_ends_with_ctrl_c() -> None:
    async with scripted() as (admin, address):
        with running("workers", "watch", "--admin", address, "--json", "--timeout", "10") as watch:
            await asyncio.to_thread(watch.wait_for, "WORKER_STATE_READY")
            # No change for as long as the timeout, but the router answers: the command continues.
            for _ in range(2):
                await admin.probes.acquire()
            assert watch.popen.poll() is None
            watch.signal(signal.SIGINT)
            assert await asyncio.to_thread(watch.wait) == 130
            assert watch.err == []
        states = [json.loads(line)["workers"][0]["state"] for line in watch.out]
        assert states == ["WORKER_STATE_CONNECTING", "WORKER_STATE_READY"]
        await asyncio.wait_for(admin.watch_ended.wait(), timeout=60)


async def test_watching_outlasts_a_stuck_router() -> None:
    async with scripted() as (admin, address):
        with running("workers", "watch", "--admin", address, "--timeout", "6") as watch:
            await asyncio.to_thread(watch.wait_for, "ready")
            admin.frozen.set()
            told = await asyncio.to_thread(watch.wait_for, "the router is lost")
            assert "gave no answer for 6 s" in told
            admin.frozen.clear()
            await asyncio.to_thread(watch.wait_for, "the router is back")


async def test_items_of_a_resumed_request_keep_their_numbers() -> None:
    async with scripted() as (_, address):
        result = await run("explain", "r", "--admin", address)
        assert result.stdout.splitlines() == [
            "item 1 so far: 2 prompt tokens, 0 new",
            "item 4 so far: 3 prompt tokens, 0 new",
        ]


async def test_unserved_call_is_explained() -> None:
    async with scripted() as (_, address):
        result = await run("requests", "list", "--admin", address)
        assert result.returncode == 2
        assert f"--admin (TRTMESH_ADMIN) is {address}, which does not serve" in result.stderr


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("generate", "hi"), "--router"),
        (("status",), "--admin"),
        (("triton", "infer", "hi"), "--url"),
    ],
)
async def test_address_that_is_none_ends_the_command(words: Sequence[str], option: str) -> None:
    """One line that names option, value and remedy, and nothing of gRPC's."""
    for address, remedy in (("", "it is empty"), ("http://127.0.0.1:8001", "leave out 'http://'")):
        result = await run(*words, option, address)
        assert (result.returncode, result.stdout) == (2, "")
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"trtmesh: error: {option} (TRTMESH_")
        assert line.endswith(f"is {address!r} but must be host:port: {remedy}")


async def test_port_for_admins_is_no_port_for_clients() -> None:
    async with scripted() as (_, address):
        for words, option in ((("generate",), "--router"), (("triton", "infer"), "--url")):
            result = await run(*words, option, address, "hi")
            assert (result.returncode, result.stdout) == (2, "")
            (line,) = result.stderr.splitlines()
            assert f"{option} (TRTMESH_ROUTER) is {address}, which does not serve this call" in line
