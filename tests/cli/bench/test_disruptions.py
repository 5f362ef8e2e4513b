"""Faults of a stack on this machine, made at their times and undone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from cli.commands import EXECUTED, Stack, running_stack, trtmesh
from e2e.mesh import DEMO, eventually
from trtmesh.chassis.errors import SettingsError
from trtmesh.cli.stacks import RunningStack
from trtmesh.cli.tables import role_word
from trtmesh.client import AdminClient, Client
from trtmesh.tools.bench.disruptions import Faults
from trtmesh.tools.bench.faults import Fault, read_fault
from trtmesh.tools.bench.run_file import read_runs
from trtmesh.tools.bench.stack_processes import (
    StackProcess,
    frozen,
    processes_of,
    stack_of,
)
from trtmesh.v1.router_admin_pb2 import WORKER_STATE_DRAINING, WORKER_STATE_READY

ENGINES = ("engine-0", "engine-1")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill:engine@30s", Fault("kill", "engine", 30.0)),
        ("kill:router@1.5", Fault("kill", "router", 1.5)),
        ("freeze:engine-1@3s", Fault("freeze", "engine-1", 3.0, 2.0)),
        ("freeze:tokenizer@3s+0.5s", Fault("freeze", "tokenizer", 3.0, 0.5)),
        ("drain:engine@3s+9s", Fault("drain", "engine", 3.0, 9.0)),
        ("role:engine=decode@3s", Fault("role", "engine", 3.0, 5.0, "decode")),
    ],
)
def test_faults_are_read(text: str, fault: Fault) -> None:
    assert read_fault(text) == fault


@pytest.mark.parametrize(
    "text",
    [
        *("kill", "kill:engine", "kill@3s", "burn:engine@3s", "kill:engine@-3s", "kill:engine@3s+2s"),
        *("drain:router@3s", "role:engine@3s", "role:engine=boss@3s", "kill:engine=decode@3s"),
    ],
)  # fmt: skip
def test_other_faults_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="--disrupt"):
        read_fault(text)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Executed, since processes are known by their command lines."""
    place = str(tmp_path_factory.mktemp("stacks"))
    flags = ("--engines", "2", "--tokenizers", "1", "--port", "0", "--metrics-port", "none")
    slow = {"TRTMESH_ENGINE_SIMULATED_TIMING_STEP_MS": "20"}
    with (
        pytest.MonkeyPatch.context() as patched,
        running_stack(*flags, env={"XDG_RUNTIME_DIR": place, EXECUTED: "1", **slow}) as stack,
    ):
        stack.wait_ready()
        patched.setenv("XDG_RUNTIME_DIR", place)
        yield stack


@pytest.fixture
def found(stack: Stack) -> RunningStack:
    return stack_of(stack.wait_ready(), None)


def test_stack_is_that_of_the_measured_router_or_is_named(
    stack: Stack, found: RunningStack
) -> None:
    assert found.pid == stack.popen.pid
    assert stack_of("somewhere:1", stack.admin) == found
    with pytest.raises(SettingsError, match=rf"no stack of yours has the router.*{stack.admin}"):
        stack_of("somewhere:1", None)
    with pytest.raises(SettingsError, match="is somewhere:2, but must be the admin address"):
        stack_of(stack.wait_ready(), "somewhere:2")


def test_only_services_of_the_stack_are_signalled(found: RunningStack) -> None:
    processes = processes_of(found)
    assert sorted((each.service, each.name) for each in processes) == [
        *(("engine", name) for name in ENGINES),
        ("router", "router"),
        ("tokenizer", "tokenizer"),
    ]
    # A child of somebody else, even if it calls itself a service.
    imitation = ["sh", "-c", "sleep 60", "-m", "trtmesh.engine"]
    with subprocess.Popen(imitation) as other:
        try:
            alien = StackProcess(psutil.Process(other.pid), "engine", "engine")
            assert alien not in processes_of(found)
            # One of this process it is.
            assert alien in processes_of(RunningStack(pid=os.getpid()))
            alien.process.kill()
            assert other.wait() == -signal.SIGKILL
            with pytest.raises(psutil.NoSuchProcess), frozen(alien.process):
                pass
            assert processes_of(RunningStack(pid=other.pid)) == []
        finally:
            other.kill()


@asynccontextmanager
async def disturbed(stack: RunningStack, *texts: str) -> AsyncIterator[Faults]:
    """Faults at their times, until all are over."""
    faults = Faults([read_fault(text) for text in texts], stack, seed=1)
    started = time.monotonic()
    task = asyncio.create_task(faults.run(lambda: time.monotonic() - started))
    try:
        yield faults
        await task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def is_stopped(process: StackProcess) -> bool:
    return bool(process.process.status() == psutil.STATUS_STOPPED)


async def until_stopped(process: StackProcess) -> None:
    while not is_stopped(process):  # noqa: ASYNC110 - the kernel sets no event
        await asyncio.sleep(0.01)


async def test_streams_survive_the_death_of_their_engine(found: RunningStack) -> None:
    prompts = [f"stream {number}" for number in range(6)]
    async with Client(found.router) as client:
        whole = await client.complete(prompts, max_tokens=100, seed=7)
        before = processes_of(found)
        async with disturbed(found, "kill:engine@0.3s") as faults:
            again = await client.complete(prompts, max_tokens=100, seed=7)
    assert [item.sequences[0].text for item in again] == [item.sequences[0].text for item in whole]
    (made,) = faults.made
    assert (made.kind, made.error) == ("kill", "")
    assert made.target in ENGINES
    assert 0.3 <= made.at_s < made.ended_s
    dead = {each.name for each in {*before} - {*processes_of(found)}}
    assert dead == {made.target}
    assert {(each.service, each.name) for each in processes_of(found)} == {
        (each.service, each.name) for each in before
    }
    async with AdminClient(found.admin) as admin:
        listed = await admin.list_workers()
    assert [each.state for each in listed.workers] == [WORKER_STATE_READY] * 2


def test_serve_compares_with_the_undisturbed_run(stack: Stack, tmp_path: Path) -> None:
    record = tmp_path / "runs.jsonl"
    asked = ("bench", "serve", f"grpc://{stack.wait_ready()}", "--record", str(record))
    load = ("--requests", "12", "--concurrency", "6", "--output-tokens", "60", "--no-echo")
    place = {"XDG_RUNTIME_DIR": os.environ["XDG_RUNTIME_DIR"]}
    own = ("--tokenizer", str(DEMO))
    done = trtmesh(*asked, *load, *own, "--disrupt", "freeze:engine@0.5s+0.3s", env=place)
    assert done.returncode == 0, done.stderr
    assert "identical to the undisturbed run: 12 of 12 streams (100.00 %)" in done.stdout
    runs = read_runs(record)
    kinds = [[each.kind for each in run.end.disruptions] for run in runs if run.end]
    assert kinds == [[], ["freeze"]]


async def test_frozen_process_runs_again(
    found: RunningStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: list[tuple[str, int]] = []
    times: list[float] = []

    def noted(name: str) -> Any:
        own = getattr(psutil.Process, name)

        def call(process: psutil.Process) -> None:
            signals.append((name, process.pid))
            own(process)
            times.append(time.monotonic())

        return call

    for name in ("suspend", "resume"):
        monkeypatch.setattr(psutil.Process, name, noted(name))
    (process,) = (each for each in processes_of(found) if each.service == "tokenizer")
    async with disturbed(found, "freeze:tokenizer@0+0.1s") as faults:
        pass
    pid = process.process.pid
    assert signals == [("suspend", pid), ("resume", pid)]
    assert times[1] - times[0] >= 0.1
    assert not is_stopped(process)
    assert [(each.target, each.error) for each in faults.made] == [("tokenizer", "")]


async def until_ready(found: RunningStack) -> None:
    """After a fault that outlived its run."""
    async with AdminClient(found.admin) as admin:
        states: list[int] = []
        while states != [WORKER_STATE_READY] * len(ENGINES):
            states = [each.state for each in (await admin.list_workers()).workers]
            await asyncio.sleep(0.05)


async def states(found: RunningStack) -> dict[str, tuple[int, str]]:
    """The state and the role of each engine."""
    async with AdminClient(found.admin) as admin:
        workers = (await admin.list_workers()).workers
    return {each.worker: (each.state, role_word(each)) for each in workers}


@pytest.mark.parametrize(
    ("seconds", "error"), [(0.1, ""), (600, "the run ended before its end")], ids=["over", "cut"]
)
async def test_drained_and_changed_workers_are_as_before(
    found: RunningStack, seconds: float, error: str
) -> None:
    await until_ready(found)
    texts = (f"drain:engine-0@0+{seconds}s", f"role:engine-1=decode@0+{seconds}s")
    with suppress(asyncio.CancelledError):
        async with disturbed(found, *texts) as faults:
            if error:
                changed = {
                    "engine-0": (WORKER_STATE_DRAINING, "mixed"),
                    "engine-1": (WORKER_STATE_READY, "decode"),
                }

                async def is_changed() -> bool:
                    return await states(found) == changed

                await eventually(is_changed)
                raise asyncio.CancelledError
    assert [each.error for each in faults.made] == [error] * 2
    assert await states(found) == dict.fromkeys(ENGINES, (WORKER_STATE_READY, "mixed"))


async def test_end_of_a_run_undoes_its_faults(found: RunningStack) -> None:
    with suppress(asyncio.CancelledError):
        async with disturbed(found, "freeze:engine-0@0+600s", "kill:engine@600s") as faults:
            (process,) = (each for each in processes_of(found) if each.name == "engine-0")
            await until_stopped(process)
            raise asyncio.CancelledError
    assert not is_stopped(process)
    told = sorted((each.kind, each.target, each.error) for each in faults.made)
    assert told == [
        ("freeze", "engine-0", "the run ended before its end"),
        ("kill", "engine", "the run ended before"),
    ]


async def test_fault_that_cannot_be_made_says_why(found: RunningStack) -> None:
    async with disturbed(found, "kill:engine-7@0", "drain:engine-7@0") as faults:
        pass
    assert sorted(each.error for each in faults.made) == [
        "no engine-7 is ready",
        "the stack has no process engine-7; it has engine-0, engine-1, router, tokenizer",
    ]


def test_stack_is_left_whole(stack: Stack, found: RunningStack) -> None:
    """After all that."""
    assert Path(f"/proc/{stack.popen.pid}").exists()
    assert len(processes_of(found)) == 4
