"""Engines die, freeze and come back: their items migrate, and clients see the same output."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from e2e.backends import BACKENDS, Backend
from e2e.mesh import (
    ENDLESS,
    INSIDE,
    PATIENT,
    Mesh,
    StreamReader,
    check_beginning,
    decode,
    eventually,
    running_mesh,
)
from trtmesh.chassis.errors import NoWorker, WorkerLost
from trtmesh.client import FinishReason, ItemResult

PROMPTS = [f"item {number}" for number in range(6)]
TOKENS = 40
ENGINES = tuple(f"engine-{number}" for number in range(2))


# What a router does for its items hardly depends on what executes them.
@pytest.fixture(params=["simulated", pytest.param("tensorrt_llm", marks=pytest.mark.soak)])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    return BACKENDS[request.param](tmp_path / "backend")


@asynccontextmanager
async def two_engines(backend: Backend, *flags: str) -> AsyncIterator[Mesh]:
    """Two named engines, and their router with flags and a tokenizer inside."""

    async def start(mesh: Mesh) -> None:
        starts = (backend.start(mesh, "--worker", name) for name in ENGINES)
        await asyncio.gather(*starts)
        await mesh.start_router("--placement-policy", "round_robin", *flags, env=INSIDE)
        await mesh.ready(workers=2, tokenizers=1)

    async with running_mesh(start=start) as mesh:
        yield mesh


@asynccontextmanager
async def one_engine(backend: Backend, *flags: str) -> AsyncIterator[Mesh]:
    """An engine, a tokenizer and their router with flags."""

    async def start(mesh: Mesh) -> None:
        await asyncio.gather(mesh.start_tokenizer(), backend.start(mesh))
        await mesh.start_router(*flags)
        await mesh.ready(workers=1, tokenizers=1)

    async with running_mesh(start=start) as mesh:
        yield mesh


async def opened(mesh: Mesh) -> StreamReader:
    """Opens an endless request."""
    reader = mesh.open(PROMPTS, max_tokens=ENDLESS, ignore_end_id=True)
    await reader.until(lambda r: all(r.tokens(index) > 10 for index in range(len(PROMPTS))))
    return reader


def items_of(reader: StreamReader) -> Counter[str]:
    """The number of items that each engine began."""
    return Counter(worker_of(item) for item in reader.items)


async def both_serve(mesh: Mesh, *names: str) -> bool:
    """Whether both engines begin some of the next items: on a busy machine one may be late with a report."""
    items = await mesh.client.complete(PROMPTS, max_tokens=4)
    return {worker_of(item) for item in items} == set(names)


def worker_of(item: ItemResult) -> str:
    assert item.started
    return item.started.worker


async def check_moved(
    mesh: Mesh, reader: StreamReader, items: int, expected: Sequence[ItemResult]
) -> None:
    """Checks the migration of every item of the lost engine, and the output."""
    await mesh.counted("moved_sequences", items)
    here = max(reader.tokens(index) for index in range(len(PROMPTS)))
    check_beginning(await reader.stopped_at(max(TOKENS, here + 5)), expected)


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
async def test_killed_engine_moves_its_items_and_rejoins_after_a_restart(backend: Backend) -> None:
    async with two_engines(backend, *PATIENT) as mesh:
        expected = await mesh.client.complete(PROMPTS, max_tokens=TOKENS, ignore_end_id=True)
        reader = await opened(mesh)
        assert items_of(reader) == dict.fromkeys(ENGINES, len(PROMPTS) / 2)
        killed = mesh.engines[0]
        killed.signal(signal.SIGKILL)
        await check_moved(mesh, reader, len(PROMPTS) // 2, expected)
        print(f"worst stall after a kill: {reader.worst_gap_seconds() * 1000:.0f} ms")
        await mesh.only_ready(ENGINES[1])
        alone = await mesh.client.complete(PROMPTS, max_tokens=4)
        assert {worker_of(item) for item in alone} == {ENGINES[1]}
        await killed.wait()
        port = int(killed.address.rpartition(":")[2])
        await backend.start(mesh, "--worker", "engine-again", port=port)
        await mesh.only_ready("engine-again", ENGINES[1])
        both = await mesh.client.complete(PROMPTS, max_tokens=4)
        assert {worker_of(item) for item in both} == {"engine-again", ENGINES[1]}
        await mesh.idle()


async def test_frozen_engine_moves_its_items_and_rejoins_when_it_thaws(backend: Backend) -> None:
    async with two_engines(backend) as mesh:
        expected = await mesh.client.complete(PROMPTS, max_tokens=TOKENS, ignore_end_id=True)
        reader = await opened(mesh)
        # On a busy machine an engine may have all of them.
        ((name, items),) = items_of(reader).most_common(1)
        frozen = mesh.engines[ENGINES.index(name)]
        frozen.signal(signal.SIGSTOP)
        await check_moved(mesh, reader, items, expected)
        print(f"worst stall after a freeze: {reader.worst_gap_seconds() * 1000:.0f} ms")
        frozen.signal(signal.SIGCONT)
        await mesh.only_ready(*ENGINES)
        await eventually(lambda: both_serve(mesh, *ENGINES))
        await mesh.idle()


async def test_killed_only_engine_fails_its_items_after_the_recovery_time(backend: Backend) -> None:
    flags = (*PATIENT, "--retries-worker-wait-seconds", "0.5")
    async with one_engine(backend, *flags) as mesh:
        (expected,) = await mesh.client.complete(["prompt"], max_tokens=TOKENS)
        reader = mesh.open(["prompt"], max_tokens=ENDLESS)
        await reader.tokens_here(10)
        mesh.engines[0].signal(signal.SIGKILL)
        (item,) = await reader.result()
        assert isinstance(item.error, WorkerLost)
        assert item.error.worker
        count = len(item.token_ids)
        assert item.token_ids[:TOKENS] == expected.token_ids[:count]
        assert item.text == decode(item.token_ids)
        assert item.usage.generated_tokens == count
        (item,) = await mesh.client.complete(["prompt"], max_tokens=4)
        assert isinstance(item.error, NoWorker)
        assert "demo" in item.error.message
        await mesh.idle()


async def test_killed_only_engine_resumes_its_items_after_a_restart(backend: Backend) -> None:
    async with one_engine(backend, "--retries-worker-wait-seconds", "60") as mesh:
        options: dict[str, Any] = {
            **backend.draws,
            "max_tokens": 60,
            "num_return_sequences": 3,
        }
        (expected,) = await mesh.client.complete(["prompt"], **options)
        reader = mesh.open(["prompt"], **options)
        await reader.tokens_here(10)
        killed = mesh.engines[0]
        killed.signal(signal.SIGKILL)
        await killed.wait()
        stopped = mesh.open(["another"], max_tokens=5, request_id="waits for a worker")
        await eventually(lambda: mesh.has_stage("place"))
        assert await mesh.client.stop("waits for a worker")
        (item,) = await stopped.result()
        assert item.reason is FinishReason.STOPPED
        await backend.start(mesh, port=int(killed.address.rpartition(":")[2]))
        (item,) = await reader.result()
        assert [s.token_ids for s in item.sequences] == [s.token_ids for s in expected.sequences]
        assert [s.finished for s in item.sequences] == [s.finished for s in expected.sequences]
        await mesh.idle()


async def test_draining_engine_finishes_its_items_and_gets_no_more(backend: Backend) -> None:
    async with two_engines(backend, *PATIENT) as mesh:
        expected = await mesh.client.complete(PROMPTS, max_tokens=TOKENS, ignore_end_id=True)
        reader = await opened(mesh)
        assert items_of(reader)[ENGINES[0]]
        mesh.engines[0].signal(signal.SIGTERM)
        await mesh.only_ready(ENGINES[1])
        # Its items finish there, within its grace.
        here = max(reader.tokens(index) for index in range(len(PROMPTS)))
        check_beginning(await reader.stopped_at(max(TOKENS, here + 10)), expected)
        assert await mesh.engines[0].wait() == 0
        alone = await mesh.client.complete(PROMPTS, max_tokens=4)
        assert {worker_of(item) for item in alone} == {ENGINES[1]}
        await mesh.idle()
