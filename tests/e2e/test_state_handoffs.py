"""Workers that move KV themselves, as processes, with two routers: pairs, tokens, halves of clients, and figures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from e2e import backends
from e2e.backends import Backend
from e2e.mesh import PATIENT, Mesh, eventually, running_mesh, scrape
from engine.tensorrt_llm.site import half
from engine.tensorrt_llm.stand_in.package import RELEASES
from trtmesh.client import Client, FinishReason, GenerationPhase, HandoffConfig, ItemResult

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True)
class Fleet:
    """Workers of a backend. Each kind, the end of their names, makes pairs of its own."""

    backend: Backend
    workers: Mapping[str, Sequence[str]]
    handoff: str
    """The kind of their state, as an explanation names it."""

    @property
    def kinds(self) -> set[str]:
        return {name.partition("-")[2] for name in self.workers}

    @property
    def by_lease(self) -> list[str]:
        return [name for name in self.workers if name.endswith("-lease")]


def simulated(directory: Path) -> Fleet:
    state = ("--simulated-handoff-by", "state")
    kinds = {
        "bf16": state,
        "fp8": (*state, "--simulated-handoff-compatibility", "fp8"),
        "lease": (),
    }
    workers = {
        f"{role[0]}-{kind}": ("--role", role, *flags)
        for kind, flags in kinds.items()
        for role in ("prefill", "decode")
    }
    return Fleet(backends.simulated(directory), workers, "simulated")


def tensorrt_llm(directory: Path) -> Fleet:
    kinds: dict[str, Any] = {"bf16": {}, "fp8": {"kv_cache_config": {"dtype": "fp8"}}}
    workers = {
        f"{role[0]}-{kind}": half(role, **options)
        for kind, options in kinds.items()
        for role in ("prefill", "decode")
    }
    return Fleet(backends.tensorrt_llm(directory, RELEASES[-1]), workers, "trtllm")


FLEETS: Mapping[str, Callable[[Path], Fleet]] = {
    "simulated": simulated,
    "tensorrt_llm": tensorrt_llm,
}
ROUTER = (*PATIENT, "--handoff-enabled", "always", "--placement-policy", "round_robin")
OPTIONS: dict[str, Any] = {"max_tokens": 24, "text": False}


def prompt(number: int) -> list[int]:
    return [number, *range(100, 300)]


@pytest.fixture(scope="module", params=FLEETS)
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return FLEETS[request.param](tmp_path_factory.mktemp("fleet"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(fleet: Fleet) -> AsyncIterator[Mesh]:
    async def start(mesh: Mesh) -> None:
        workers = fleet.workers.items()
        starts = (fleet.backend.start(mesh, *flags, "--worker", name) for name, flags in workers)
        await asyncio.gather(*starts)
        await mesh.start_router(*ROUTER)
        await mesh.ready(len(fleet.workers))

    async with running_mesh(start=start) as mesh:
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def other(fleet: Fleet, mesh: Mesh) -> AsyncIterator[Client]:
    """A client of a second router of the same workers."""
    engines = ",".join(engine.address for engine in mesh.engines)
    process = await mesh.start("router", "--port", "0", "--engines", engines, *ROUTER)
    async with Client(process.address) as client:

        async def serves() -> bool:
            samples = await scrape(process)
            return samples.get("trtmesh_router_ready_workers") == len(fleet.workers)

        await eventually(serves)
        yield client


async def ask(client: Client, number: int, **options: Any) -> ItemResult:
    (item,) = await client.complete([prompt(number)], **{**OPTIONS, **options})
    assert item.error is None, item.error
    return item


async def consumed(mesh: Mesh, side: str) -> float:
    """Leases whose KV was used, counted by the workers themselves."""
    samples = [await scrape(each, side=side, outcome="consumed") for each in mesh.engines]
    return sum(each.get("trtmesh_engine_handoffs_total", 0.0) for each in samples)


async def no_leases(mesh: Mesh) -> None:
    """Waits until every lease has an outcome, and nothing is in use.

    Receivers count a lease before its item goes on. So the leases of finished items have an outcome once senders
    counted as many, and the reports are newer once they say the same.
    """

    async def all_ended() -> bool:
        received = await consumed(mesh, "received")
        if await consumed(mesh, "sent") != received:
            return False
        loads = [worker.load for worker in (await mesh.status()).workers]
        pairs = [(load.sent_handoffs, load.received_handoffs) for load in loads]
        return all(
            sum(each.consumed for each in side) == received
            and all(each.granted == each.consumed + each.released + each.expired for each in side)
            for side in zip(*pairs, strict=True)
        )

    await eventually(all_ended)
    await mesh.idle()


async def test_two_routers_pair_equal_kinds_and_get_the_tokens_of_one_worker(
    fleet: Fleet, mesh: Mesh, other: Client
) -> None:
    numbers = range(9)
    asked = [
        ask(client, number, **fleet.backend.draws, request_id=f"{name}-{number}")
        for number in numbers
        for name, client in (("here", mesh.client), ("there", other))
    ]
    items = await asyncio.gather(*asked)
    kinds = set()
    for number in numbers:
        (placement,) = (await mesh.admin.explain(f"here-{number}")).placements
        kind = placement.prefill_worker.removeprefix("p-")
        assert placement.worker == f"d-{kind}"
        assert placement.handoff_kind == ("" if kind == "lease" else fleet.handoff)
        kinds.add(kind)
    assert kinds == fleet.kinds
    await no_leases(mesh)

    async def whole(mesh: Mesh) -> None:
        await fleet.backend.start(mesh)
        await mesh.start_router(*PATIENT)
        await mesh.ready(1)

    async with running_mesh(start=whole) as alone:
        expected = [await ask(alone.client, number, **fleet.backend.draws) for number in numbers]
    for number in numbers:
        for item in items[2 * number : 2 * number + 2]:
            assert item.token_ids == expected[number].token_ids


async def test_metrics_name_the_transport(mesh: Mesh) -> None:
    await asyncio.gather(*(ask(mesh.client, number) for number in range(100, 112)))
    await no_leases(mesh)
    names = {worker.address: worker.worker for worker in (await mesh.status()).workers}
    for engine in mesh.engines:
        name = names[engine.address]
        labels = {"side": "sent" if name.startswith("p") else "received", "outcome": "consumed"}
        by_state = await scrape(engine, transport="backend", **labels)
        assert bool(by_state.get("trtmesh_engine_handoffs_total")) is not name.endswith("lease")


async def test_clients_bring_halves_together_without_a_state(fleet: Fleet, mesh: Mesh) -> None:
    """No client gets a state of a backend, so the second half computes the prompt again."""
    context = HandoffConfig(phase=GenerationPhase.GENERATION_PHASE_CONTEXT_ONLY)
    for name in fleet.by_lease:
        await mesh.admin.drain_worker(name)
    try:
        expected = await ask(mesh.client, 7, **fleet.backend.draws)
        first = await ask(mesh.client, 7, **fleet.backend.draws, handoff=context)
        assert first.reason is FinishReason.LENGTH
        assert first.token_ids == expected.token_ids[:1]
        finished = first.sequences[0].finished
        assert finished
        assert finished.handoff_state
        assert b"port" not in finished.handoff_state
        generation = HandoffConfig(
            phase=GenerationPhase.GENERATION_PHASE_GENERATION_ONLY, state=finished.handoff_state
        )
        second = await ask(mesh.client, 7, **fleet.backend.draws, handoff=generation)
        assert second.token_ids == expected.token_ids
    finally:
        for name in fleet.by_lease:
            await mesh.admin.resume_worker(name)
    await no_leases(mesh)
