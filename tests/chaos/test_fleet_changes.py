"""Admin calls and address files add, drain, resume and remove workers under running streams."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from e2e.mesh import (
    ENDLESS,
    PATIENT,
    SIMULATED,
    Mesh,
    StreamReader,
    check_beginning,
    eventually,
    running_mesh,
)
from process_constants import constants
from trtmesh.chassis.errors import InvalidField, NotFound
from trtmesh.client import ItemResult
from trtmesh.v1 import router_admin_pb2 as admin_pb

PROMPTS = [f"item {number}" for number in range(6)]
TOKENS = 40
# Few tokens take as long as a change.
ENGINE = (*SIMULATED, "--simulated-timing-step-ms", "12")
NAMES = ("one", "two")


async def two_engines(mesh: Mesh) -> None:
    await mesh.start_tokenizer()
    for name in NAMES:
        await mesh.start_engine(*ENGINE, "--worker", name, "--grace-seconds", "3")
    await mesh.start_router(*PATIENT, "--placement-policy", "round_robin")
    await mesh.ready(workers=2, tokenizers=1)


async def opened(mesh: Mesh) -> StreamReader:
    """Opens an endless request with items on every worker."""
    reader = mesh.open(PROMPTS, max_tokens=ENDLESS, ignore_end_id=True)
    await reader.until(lambda r: all(r.tokens(index) > 5 for index in range(len(PROMPTS))))
    return reader


def contents(items: Sequence[ItemResult]) -> list[object]:
    return [(item.error, item.token_ids, item.text, item.reason, item.usage) for item in items]


def workers_of(items: Sequence[ItemResult]) -> set[str]:
    return {item.started.worker for item in items if item.started}


async def test_admin_drains_resumes_removes_and_adds_workers_under_streams() -> None:
    async with running_mesh(start=two_engines) as mesh:
        expected = await mesh.client.complete(PROMPTS, max_tokens=TOKENS, ignore_end_id=True)
        reader = await opened(mesh)
        drained = await mesh.admin.drain_worker("one", finish_seconds=0)
        assert (drained.moved_sequences, drained.left_sequences) == (3, 0)
        assert drained.worker.state == admin_pb.WORKER_STATE_DRAINING
        check_beginning(await reader.stopped_at(TOKENS), expected)
        few = await mesh.client.complete(PROMPTS, max_tokens=2)
        assert workers_of(few) == {"two"}

        resumed = await mesh.admin.resume_worker("one")
        assert resumed.worker.state == admin_pb.WORKER_STATE_READY
        reader = await opened(mesh)
        draining = asyncio.create_task(mesh.admin.drain_worker("two"))
        await mesh.only_ready("one")
        check_beginning(await reader.stopped_at(TOKENS), expected)
        waiting = await draining
        assert (waiting.finished_sequences, waiting.moved_sequences) == (3, 0)
        await mesh.admin.resume_worker("two")

        reader = await opened(mesh)
        removed = await mesh.admin.remove_worker(mesh.engines[0].address)
        assert removed.moved_sequences == 3
        check_beginning(await reader.stopped_at(TOKENS), expected)
        await eventually(lambda: has_workers(mesh, {"two"}))
        await mesh.admin.add_worker(mesh.engines[0].address)
        await mesh.only_ready(*NAMES)
        few = await mesh.client.complete(PROMPTS, max_tokens=2)
        assert workers_of(few) == set(NAMES)
        await mesh.idle()


async def test_drain_reports_sequences_that_no_worker_accepts() -> None:
    async with running_mesh(router_flags=PATIENT) as mesh:
        name = (await mesh.status()).workers[0].worker
        reader = mesh.open(["alone"], max_tokens=ENDLESS)
        await reader.tokens_here(5)
        drained = await mesh.admin.drain_worker(name, finish_seconds=0)
        assert (drained.moved_sequences, drained.left_sequences) == (0, 1)
        (item,) = await reader.stopped_at(reader.tokens() + 25)
        assert item.error is None
        with pytest.raises(NotFound, match="'nobody' is not known"):
            await mesh.admin.drain_worker("nobody")
        with pytest.raises(InvalidField, match="host:port"):
            await mesh.admin.add_worker("nowhere")


async def test_items_leave_an_engine_before_its_grace_ends() -> None:
    async with running_mesh(start=two_engines) as mesh:
        expected = await mesh.client.complete(PROMPTS, max_tokens=TOKENS, ignore_end_id=True)
        reader = await opened(mesh)
        mesh.engines[0].signal(signal.SIGTERM)
        await mesh.counted("moved_sequences", 3)
        assert await mesh.engines[0].wait() == 0
        here = max(reader.tokens(index) for index in range(len(PROMPTS)))
        check_beginning(await reader.stopped_at(max(TOKENS, here + 10)), expected)
        await mesh.idle()


async def test_changed_address_file_replaces_workers(tmp_path: Path) -> None:
    names = tmp_path / "engines"
    names.write_text("# nobody yet\n")

    async def start(mesh: Mesh) -> None:
        await mesh.start_tokenizer()
        for name in NAMES:
            await mesh.start_engine(*ENGINE, "--worker", name)
        await mesh.start_router(*constants(resolve_seconds=0.05), "--engines", f"file:{names}")

    async with running_mesh(start=start) as mesh:
        one, two = (engine.address for engine in mesh.engines)
        write(names, f"{one}\n")
        await eventually(lambda: has_workers(mesh, {"one"}))
        await mesh.ready(workers=1)
        expected = contents(await mesh.client.complete(PROMPTS, max_tokens=40))
        reader = mesh.open(PROMPTS, max_tokens=40)
        await reader.tokens_here(5)
        write(names, f"{two}  # the new one\n")
        await eventually(lambda: has_workers(mesh, {"two"}))
        assert contents(await reader.result()) == expected
        write(names, "nonsense")

        async def complained() -> bool:
            return "nonsense" in mesh.router.stderr

        await eventually(complained)
        assert await has_workers(mesh, {"two"})


def write(file: Path, text: str) -> None:
    """Replaces a file atomically."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


async def has_workers(mesh: Mesh, names: set[str]) -> bool:
    return {worker.worker for worker in (await mesh.status()).workers} == names


async def test_watch_reports_every_change_of_state() -> None:
    async with running_mesh(engines=2) as mesh:
        watch = mesh.admin.watch_workers()
        try:
            states = {worker.state for worker in (await anext(watch)).workers}
            while states != {admin_pb.WORKER_STATE_READY}:
                states = {worker.state for worker in (await anext(watch)).workers}
            mesh.engines[0].signal(signal.SIGSTOP)
            while admin_pb.WORKER_STATE_STALLED not in states:
                states = {worker.state for worker in (await anext(watch)).workers}
            mesh.engines[0].signal(signal.SIGCONT)
            while states != {admin_pb.WORKER_STATE_READY}:
                states = {worker.state for worker in (await anext(watch)).workers}
        finally:
            await watch.aclose()
