"""Random overlapping faults under random streams, with tokenizers inside routers and beside them, and inside alone;
`make chaos SEEDS=0-99` runs more seeds, and a fleet with tokenizers but without roles too.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
from chaos.faulty_mesh import INSIDE_ALONE, MIXED, SPLIT, FaultyMesh, faulty_mesh
from chaos.fragile import contents
from e2e.mesh import StreamReader
from trtmesh.client import Client
from trtmesh.router.placement import POLICIES

pytestmark = pytest.mark.asyncio(loop_scope="module")

SEEDS = "0"
ROUTERS = 2
REQUESTS = 6
FAULTS = 6
LAST_SECONDS = 2.0
"""Start of the last request and of the last fault."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        asked: str | None = metafunc.config.getoption("--seeds", default=None)
        metafunc.parametrize("seed", seeds(asked or SEEDS))
        # The faults of engines with roles are those of the others and one more.
        fleets = {"mixed": MIXED} if asked else {}
        fleets |= {"roles": SPLIT, "inside alone": INSIDE_ALONE}
        metafunc.parametrize(
            "mesh", fleets.values(), ids=fleets.keys(), indirect=True, scope="module"
        )


def seeds(asked: str) -> range:
    first, _, last = asked.partition("-")
    return range(int(first), int(last or first) + 1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(request: pytest.FixtureRequest) -> AsyncIterator[FaultyMesh]:
    async with faulty_mesh(request.param) as mesh:
        yield mesh


def request(draw: random.Random) -> tuple[list[str], dict[str, Any]]:
    """Draws prompts, and options with a deterministic output."""
    prompts = [
        f"{draw.randint(0, 9)} begins like the others" * draw.choice([1, 1, 20])
        for _ in range(draw.randint(1, 4))
    ]
    options: dict[str, Any] = {"max_tokens": draw.randint(1, 100)}
    match draw.choice(["greedy", "sampled", "held", "ids", "stops"]):
        case "sampled":
            options |= {"temperature": 0.9, "seed": draw.getrandbits(32)}
            options |= {"num_return_sequences": draw.randint(1, 3)}
        case "held":
            options |= {"stream": False, "num_return_sequences": draw.randint(1, 3)}
            options |= {"temperature": 0.9, "seed": draw.getrandbits(32)}
        case "ids":
            options["text"] = False
        case "stops":
            options["stop_texts"] = ["th", "e"]
    return prompts, options


def policies_of(seed: int) -> list[str]:
    """The policy of each router; consecutive seeds go through all policies. test_every_token has each of them."""
    names = sorted(POLICIES)
    return [names[(ROUTERS * seed + router) % len(names)] for router in range(ROUTERS)]


async def test_random_faults_lose_no_token(mesh: FaultyMesh, seed: int) -> None:
    draw = random.Random(seed)
    policies = policies_of(seed)
    print(f"seed {seed}: policies {' and '.join(policies)}")
    await mesh.set_policies(policies)
    async with mesh.client(0) as one, mesh.client(1) as other:
        drawn = [request(draw) for _ in range(REQUESTS)]
        faults = [draw.choice(sorted(mesh.faults)) for _ in range(FAULTS)]
        stall = await suffer(mesh, draw, [one, other], drawn, faults)
        print(f"seed {seed}: worst stall {stall * 1000:.0f} ms")
    await mesh.settle()


async def suffer(
    mesh: FaultyMesh,
    draw: random.Random,
    clients: Sequence[Client],
    requests: Sequence[tuple[list[str], dict[str, Any]]],
    faults: Sequence[str],
    cancelled: float = 0.0,
) -> float:
    """Runs the requests of the clients under faults, all at times drawn in advance; a share is cancelled. Returns the
    worst stall in seconds."""
    undisturbed = await asyncio.gather(*(clients[0].complete(p, **own) for p, own in requests))
    expected = [contents(each) for each in undisturbed]
    opens = sorted((draw.uniform(0, LAST_SECONDS), each) for each in range(len(requests)))
    ends = [draw.uniform(0, 0.5) if draw.random() < cancelled else None for _ in requests]
    suffered = sorted(
        (draw.uniform(0, LAST_SECONDS), name, draw.getrandbits(32)) for name in faults
    )

    async def open_later(seconds: float, number: int) -> float:
        await asyncio.sleep(seconds)
        prompts, options = requests[number]
        reader = StreamReader(clients[number % len(clients)], prompts, **options)
        try:
            if (end := ends[number]) is not None:
                await asyncio.sleep(end)
                return 0.0
            assert contents(await reader.result()) == expected[number], requests[number]
        finally:
            await reader.cancel()
        return reader.worst_gap_seconds()

    async def suffer_later(seconds: float, name: str, detail: int) -> float:
        await asyncio.sleep(seconds)
        print(f"{seconds:.2f} s: {name} ({detail})", file=sys.stderr)
        await mesh.suffer(name, random.Random(detail))
        return 0.0

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(suffer_later(*fault)) for fault in suffered]
        tasks += [group.create_task(open_later(*each)) for each in opens]
    return max(task.result() for task in tasks)
