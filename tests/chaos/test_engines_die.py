"""Engines die, freeze and come back: their items end with the name of the worker, everything else goes on."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from e2e.mesh import SIMULATED, Mesh, StreamReader, decode, running_mesh
from trtmesh.chassis.errors import NoWorker, WorkerLost
from trtmesh.client import ItemFailed, ItemResult

PROMPTS = [f"item {number}" for number in range(6)]
TOKENS = 300
ENGINES = tuple(f"engine-{number}" for number in range(2))


async def two_engines(mesh: Mesh) -> None:
    """Two named engines, a tokenizer and their router, ready."""
    await mesh.start_tokenizer()
    for name in ENGINES:
        await mesh.start_engine(*SIMULATED, "--worker", name)
    await mesh.start_router("--silence-seconds", "2", "--policy", "round_robin")
    await mesh.ready(workers=2, tokenizers=1)


async def opened(mesh: Mesh) -> StreamReader:
    """One request whose items run on both engines."""
    reader = mesh.open(PROMPTS, max_tokens=TOKENS, ignore_end_id=True)
    await reader.until(lambda r: all(r.tokens(index) > 10 for index in range(len(PROMPTS))))
    assert {workers_of(item) for item in reader.items} == set(ENGINES)
    return reader


def workers_of(item: ItemResult) -> str:
    assert item.started
    return item.started.worker


def check_items_of(lost: str, items: Sequence[ItemResult], expected: Sequence[ItemResult]) -> None:
    """Those on the lost worker failed and kept what they had; the others are whole."""
    for item, whole in zip(items, expected, strict=True):
        if workers_of(item) == lost:
            assert isinstance(item.error, WorkerLost)
            assert item.error.worker == lost
            assert lost in item.error.message
            count = len(item.token_ids)
            assert item.token_ids == whole.token_ids[:count]
            assert item.text == decode(item.token_ids)
            assert item.usage.generated_tokens == count
        else:
            assert item.error is None
            assert (item.token_ids, item.text) == (whole.token_ids, whole.text)


async def test_one_of_two_is_killed_and_comes_back() -> None:
    async with running_mesh(start=two_engines) as mesh:
        expected = await mesh.client.complete(PROMPTS, max_tokens=TOKENS, ignore_end_id=True)
        reader = await opened(mesh)
        killed = mesh.engines[0]
        killed.signal(signal.SIGKILL)
        check_items_of(ENGINES[0], await reader.result(), expected)
        assert len([event for event in reader.events if isinstance(event, ItemFailed)]) == 3
        alone = await mesh.client.complete(PROMPTS, max_tokens=4)
        assert {workers_of(item) for item in alone} == {ENGINES[1]}
        await killed.wait()
        port = int(killed.address.rpartition(":")[2])
        await mesh.start_engine(*SIMULATED, "--worker", "engine-again", port=port)
        await mesh.ready(workers=2)
        both = await mesh.client.complete(PROMPTS, max_tokens=4)
        assert {workers_of(item) for item in both} == {"engine-again", ENGINES[1]}
        await mesh.idle()


async def test_one_of_two_freezes_and_thaws() -> None:
    async with running_mesh(start=two_engines) as mesh:
        expected = await mesh.client.complete(PROMPTS, max_tokens=TOKENS, ignore_end_id=True)
        reader = await opened(mesh)
        mesh.engines[1].signal(signal.SIGSTOP)
        items = await reader.result()
        check_items_of(ENGINES[1], items, expected)
        mesh.engines[1].signal(signal.SIGCONT)
        await mesh.ready(workers=2)
        both = await mesh.client.complete(PROMPTS, max_tokens=4)
        assert {workers_of(item) for item in both} == set(ENGINES)
        await mesh.idle()


async def test_the_only_one_is_killed() -> None:
    async with running_mesh() as mesh:
        reader = mesh.open(["prompt"], max_tokens=4000)
        await reader.tokens_here(10)
        mesh.engines[0].signal(signal.SIGKILL)
        (item,) = await reader.result()
        assert isinstance(item.error, WorkerLost)
        (item,) = await mesh.client.complete(["prompt"], max_tokens=4)
        assert isinstance(item.error, NoWorker)
        assert "demo" in item.error.message
        await mesh.idle()


async def test_one_of_two_drains() -> None:
    async with running_mesh(start=two_engines) as mesh:
        expected = await mesh.client.complete(PROMPTS, max_tokens=TOKENS, ignore_end_id=True)
        reader = await opened(mesh)
        mesh.engines[0].signal(signal.SIGTERM)
        items = await reader.result()
        assert [item.error for item in items] == [None] * len(items)
        assert [item.text for item in items] == [item.text for item in expected]
        assert await mesh.engines[0].wait() == 0
        alone = await mesh.client.complete(PROMPTS, max_tokens=4)
        assert {workers_of(item) for item in alone} == {ENGINES[1]}
        await mesh.idle()
