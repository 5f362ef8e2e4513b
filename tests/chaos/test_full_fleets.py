"""Workers that are drained or freeze while the others have no room: no stream leaves a worker before another has room,
and no wait is longer than the retries allow."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from e2e.mesh import (
    ENDLESS,
    PATIENT,
    SIMULATED,
    Mesh,
    StreamReader,
    eventually,
    running_mesh,
    scrape,
)
from router.adapters.contents_of import content
from trtmesh.chassis.errors import AdaptersFull, TrtmeshError
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_admin_pb2 as admin_pb

NAMES = ("one", "two")

FULL_AT_TWO = (
    *("--simulated-limits-max-batch-size", "2", "--simulated-limits-max-queue-size", "0"),
    *("--simulated-timing-step-ms", "32"),
)


@asynccontextmanager
async def two_small_engines(silence_seconds: float = 60.0) -> AsyncIterator[Mesh]:
    async def start(mesh: Mesh) -> None:
        for name in NAMES:
            await mesh.start_engine(*SIMULATED, *FULL_AT_TWO, "--worker", name)
        await mesh.start_router(
            *("--placement-policy", "least_loaded", "--retries-worker-wait-seconds", "1"),
            *("--log-level", "info"),
            *(*PATIENT, "--deadlines-silence-seconds", str(silence_seconds)),
        )
        await mesh.ready(workers=2)

    async with running_mesh(start=start) as mesh:
        yield mesh


async def filled(mesh: Mesh) -> dict[str, list[StreamReader]]:
    """Opens two endless streams on each worker."""
    readers = [
        mesh.open([[5 + number]], text=False, max_tokens=ENDLESS, ignore_end_id=True)
        for number in range(4)
    ]
    by_worker: dict[str, list[StreamReader]] = {}
    for reader in readers:
        await reader.tokens_here(1)
        started = reader.items[0].started
        assert started
        by_worker.setdefault(started.worker, []).append(reader)
    assert {name: len(each) for name, each in by_worker.items()} == {"one": 2, "two": 2}
    return by_worker


async def live(mesh: Mesh, name: str) -> int:
    """Items of the router on a worker."""
    workers = (await mesh.status()).workers
    return next(worker.items for worker in workers if worker.worker == name)


async def test_a_drain_leaves_streams_where_they_run_until_another_worker_has_room() -> None:
    async with two_small_engines() as mesh:
        readers = await filled(mesh)
        drained = await mesh.admin.drain_worker("one", finish_seconds=0)
        assert (drained.moved_sequences, drained.left_sequences) == (0, 2)
        assert drained.worker.state == admin_pb.WORKER_STATE_DRAINING
        for reader in readers["one"]:
            await reader.tokens_here(reader.tokens() + 25)
        assert await live(mesh, "one") == 2

        for stopped, left in zip(readers["two"], (1, 0), strict=True):
            await stopped.stopped_at(1)

            async def moved(left: int = left) -> bool:
                return (await live(mesh, "one"), await live(mesh, "two")) == (left, 2)

            await eventually(moved)
        for reader in readers["one"]:
            await reader.tokens_here(reader.tokens() + 10)
            (item,) = await reader.stopped_at(1)
            assert item.error is None
        samples = await scrape(mesh.router)
        assert samples["trtmesh_router_moved_sequences_total"] == 2, "none was refused"


async def test_streams_of_a_frozen_worker_end_while_the_others_stay_full() -> None:
    # The other worker must not count as lost in a slow moment: its streams would have nowhere to go either.
    async with two_small_engines(silence_seconds=8) as mesh:
        readers = await filled(mesh)
        mesh.engines[0].signal(signal.SIGSTOP)
        for reader in readers["one"]:
            (item,) = await reader.result()
            assert isinstance(item.error, TrtmeshError)
            assert item.error.reason == "WORKER_LOST", item.error
        for reader in readers["two"]:
            await reader.tokens_here(reader.tokens() + 10)
        assert mesh.router.stderr.count(" moves (") <= 4, "once off the lost worker, once refused"
        mesh.engines[0].signal(signal.SIGCONT)


async def test_item_whose_adapter_has_no_slot_beside_a_pinned_one_fails_after_its_wait() -> None:
    async def one_slot(mesh: Mesh) -> None:
        await mesh.start_engine(*SIMULATED, "--simulated-adapters-slots", "1")
        flags = ("--retries-worker-wait-seconds", "2", "--log-level", "info")
        await mesh.start_router(*flags, *PATIENT)
        await mesh.ready(workers=1)

    async with running_mesh(start=one_slot) as mesh:
        for number, name in enumerate(("n0", "n1"), 1):
            asked = admin_pb.AddAdapterRequest(name=name, id=number)
            await mesh.admin.upload_adapter(asked, content(name.encode()))
        await mesh.admin.pin_adapter(1)

        async def pinned() -> bool:
            adapters = (await mesh.admin.list_adapters()).adapters
            return any(r.pinned for a in adapters for v in a.versions for r in v.residencies)

        await eventually(pinned)
        with pytest.raises(AdaptersFull, match="has 1 slots"):
            await mesh.admin.pin_adapter(2)
        options: dict[str, Any] = {"text": False, "max_tokens": 2, "request_id": "crowded"}
        (item,) = await mesh.client.complete([[5]], adapter=pb.LoraConfig(name="n1"), **options)
        assert isinstance(item.error, AdaptersFull)
        assert "pinned adapters take the 1 slots" in item.error.message
        assert mesh.router.stderr.count(" moves (") <= 1
        assert len((await mesh.admin.explain("crowded")).placements) <= 2
        (item,) = await mesh.client.complete([[5]], adapter=pb.LoraConfig(name="n0"), **options)
        assert item.error is None
