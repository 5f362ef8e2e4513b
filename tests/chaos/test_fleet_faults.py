"""Name servers that fail, flap and lie, and drains onto full workers, under streams: none is lost or changed. `make
chaos SEEDS=0-99` runs more seeds."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from chaos.test_random_faults import seeds
from e2e.mesh import SIMULATED, StreamReader
from process_constants import patch
from processes import ServiceProcess, service_process
from router.names import Names
from router.scripted import READY, RouterClient, serving_router, until_states
from trtmesh.client import ItemResult

SEEDS = "0"
ENGINES, BATCH = 4, 3
STREAMS, ROUNDS, TOKENS = 9, 3, 75
"""More streams than the other engines have room for, while two drain."""

HOST = "engines"
LIES = ["127.0.0.90", "127.0.0.91"]
"""Addresses at which nothing listens."""

OPTIONS: dict[str, Any] = {"max_tokens": TOKENS, "ignore_end_id": True, "text": False}

SMALL = (
    *(*SIMULATED, "--simulated-limits-max-batch-size", str(BATCH)),
    *("--simulated-limits-max-queue-size", "0"),
    # Few tokens take as long as some drains, the first of them in a slow moment included.
    *("--simulated-timing-step-ms", "48"),
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        asked: str = metafunc.config.getoption("--seeds", default=None) or SEEDS
        metafunc.parametrize("seed", seeds(asked))


@asynccontextmanager
async def engines() -> AsyncIterator[Sequence[ServiceProcess]]:
    """Engines on one port of successive addresses, as containers behind a name."""
    async with AsyncExitStack() as stack:
        port, started = "0", []
        for number in range(ENGINES):
            where = ("--host", f"127.0.0.{number + 2}", "--port", port, "--worker", f"e{number}")
            engine = await stack.enter_async_context(service_process("engine", *SMALL, *where))
            port = engine.address.rpartition(":")[2]
            started.append(engine)
        yield started


class Disturbance:
    """Disturbs a name service until `over`, and drains workers while `draining`, at random."""

    def __init__(self, names: Names, client: RouterClient, addresses: Sequence[str]) -> None:
        self.names, self.client, self.addresses = names, client, addresses
        self.hosts = [address.rpartition(":")[0] for address in addresses]
        self.drains = self.left = 0
        self.over = self.draining = False

    def fail(self, draw: random.Random) -> None:
        self.names.answers = {}
        self.names.failure = draw.choice([socket.EAI_AGAIN, socket.EAI_FAIL, socket.EAI_SYSTEM])

    def flap(self, draw: random.Random) -> None:
        """Does not know the name, for less than it takes to forget it."""
        self.names.answers, self.names.failure = {}, socket.EAI_NONAME

    def leave_some_out(self, draw: random.Random) -> None:
        self.names.answers[HOST] = draw.sample(self.hosts, draw.randint(1, ENGINES))

    def lie(self, draw: random.Random) -> None:
        self.names.answers[HOST] = [*draw.sample(LIES, draw.randint(1, 2)), draw.choice(self.hosts)]

    async def disturb_names(self, draw: random.Random) -> None:
        disturbances: list[Callable[[random.Random], None]]
        disturbances = [self.fail, self.flap, self.leave_some_out, self.lie]
        while not self.over:
            draw.choice(disturbances)(draw)
            await asyncio.sleep(draw.uniform(0, 0.1))
            self.names.answers[HOST] = self.hosts
            await asyncio.sleep(draw.uniform(0, 0.1))

    async def drain(self, draw: random.Random) -> None:
        """Drains two workers at a time, onto the others, which may be full."""
        while self.draining:
            chosen = draw.sample(self.addresses, 2)
            drained = await asyncio.gather(
                *(self.client.admin.drain_worker(each, finish_seconds=0) for each in chosen)
            )
            self.drains += len(drained)
            self.left += sum(each.left_sequences for each in drained)
            await asyncio.sleep(draw.uniform(0, 0.3))
            for each in chosen:
                await self.client.admin.resume_worker(each)


async def test_names_and_drains_lose_no_stream(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch, resolve_seconds=0.02)
    names, draw = Names(monkeypatch), random.Random(seed)
    async with engines() as started:
        names.answers[HOST] = [engine.address.rpartition(":")[0] for engine in started]
        port = started[0].address.rpartition(":")[2]
        async with serving_router(
            [f"{HOST}:{port}"],
            retries={"worker_wait_seconds": 60},
            # A slow moment is no stall.
            deadlines={"silence_seconds": 60, "step_gap_seconds": 60},
        ) as client:
            await until_states(client, [READY] * ENGINES, [])
            prompts = [[5 + number] for number in range(STREAMS)]
            items = await asyncio.gather(*(ask(client, prompt) for prompt in prompts))
            expected = [contents(item) for item in items]
            on = Disturbance(names, client, [engine.address for engine in started])
            async with asyncio.TaskGroup() as group:
                group.create_task(on.disturb_names(random.Random(draw.random())))
                for _ in range(ROUNDS):
                    await check_round(client, prompts, expected, on, draw)
                on.over = True
            await until_states(client, [READY] * ENGINES, [])
            assert all(stream == 1 for stream in streams_of(client)), "no worker left and joined"
            assert on.left, "some drains found full workers"
            print(f"seed {seed}: {on.drains} drains, {on.left} sequences had no room at once")


async def check_round(
    client: RouterClient,
    prompts: Sequence[list[int]],
    expected: Sequence[object],
    on: Disturbance,
    draw: random.Random,
) -> None:
    """Opens a stream of each prompt, then drains workers until all are complete."""
    readers = [StreamReader(client, [prompt], **OPTIONS) for prompt in prompts]
    for reader in readers:
        await reader.tokens_here(1)
    on.draining = True
    draining = asyncio.create_task(on.drain(random.Random(draw.random())))
    try:
        for reader, whole in zip(readers, expected, strict=True):
            (item,) = await reader.result()
            assert contents(item) == whole
    finally:
        on.draining = False
        await draining


async def ask(client: RouterClient, prompt: list[int]) -> ItemResult:
    (item,) = await client.complete([prompt], **OPTIONS)
    return item


def contents(item: ItemResult) -> tuple[object, tuple[int, ...]]:
    return item.error, item.token_ids


def streams_of(client: RouterClient) -> list[int]:
    """Number of streams that the router opened to each worker."""
    return [worker.streams for worker in client.router._fleet.workers.values()]
