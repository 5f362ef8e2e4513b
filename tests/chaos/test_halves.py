"""Halves of a prompt that a client brings together, through faults: equal tokens, and no lease left."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio
from e2e.mesh import PATIENT, SIMULATED, Mesh, eventually, running_mesh
from e2e.test_halves import (
    CONTEXT_ONLY,
    OPTIONS,
    PROMPT,
    first_half,
    generation_only,
    granted,
    no_leases,
    second_half,
    state_of,
    whole,
)
from process_constants import constants
from trtmesh.client import FinishReason

SLOW = (
    *("--simulated-timing-prefill-tokens-per-second", "40"),
    *("--simulated-timing-prefill-tokens-per-step", "8"),
)
"""A prompt takes more than a second."""
SLOWER = (
    *("--simulated-timing-prefill-tokens-per-second", "4"),
    *("--simulated-timing-prefill-tokens-per-step", "1"),
)
"""A prompt takes so long that it is not over when it is stopped."""

BRIEF = constants(handoff_transfer_seconds=1, lease_seconds=1, client_lease_seconds=5)


@pytest_asyncio.fixture
async def mesh(request: pytest.FixtureRequest) -> AsyncIterator[Mesh]:
    """A worker for prefill and one for decode; more flags for both by parameter."""
    more: Sequence[str] = getattr(request, "param", ())

    async def start(mesh: Mesh) -> None:
        flags = (*SIMULATED, *more)
        # In order: the tests name engines by number.
        await mesh.start_tokenizer()
        await mesh.start_engine(*flags, "--worker", "prefill-0", "--role", "prefill")
        await mesh.start_engine(*flags, "--worker", "decode-0", "--role", "decode")
        await mesh.start_router(*PATIENT, *BRIEF, "--handoff-enabled", "never")
        await mesh.ready(2, 1)

    async with running_mesh(start=start) as mesh:
        yield mesh


async def is_live(mesh: Mesh) -> bool:
    """Whether a worker holds a lease."""
    workers = (await mesh.status()).workers
    return any(worker.load.sent_handoffs.held for worker in workers)


async def test_state_of_a_dead_worker_costs_time_only(mesh: Mesh) -> None:
    expected = await whole(mesh)
    state = state_of(await first_half(mesh.client))
    mesh.engines[0].signal(signal.SIGKILL)
    await mesh.engines[0].wait()
    assert (await second_half(mesh.client, state)).token_ids == expected.token_ids
    await mesh.only_ready("decode-0")
    assert (await second_half(mesh.client, state)).token_ids == expected.token_ids


async def test_state_of_a_frozen_worker_costs_time_only(mesh: Mesh) -> None:
    expected = await whole(mesh)
    state = state_of(await first_half(mesh.client))
    mesh.engines[0].signal(signal.SIGSTOP)
    try:
        assert (await second_half(mesh.client, state)).token_ids == expected.token_ids
    finally:
        mesh.engines[0].signal(signal.SIGCONT)
    await mesh.ready(2, 1)
    await granted(mesh, "prefill-0")
    await no_leases(mesh)


async def test_worker_that_restarts_knows_no_state(mesh: Mesh) -> None:
    expected = await whole(mesh)
    state = state_of(await first_half(mesh.client))
    dead = mesh.engines.pop(0)
    dead.signal(signal.SIGKILL)
    await dead.wait()
    port = int(dead.address.rpartition(":")[2])
    flags = ("--worker", "prefill-0", "--role", "prefill")
    await mesh.start_engine(*SIMULATED, *flags, port=port)
    await mesh.ready(2, 1)
    assert (await second_half(mesh.client, state)).token_ids == expected.token_ids
    await no_leases(mesh)


@pytest.mark.parametrize("mesh", [SLOW], indirect=True)
async def test_first_half_survives_the_death_of_its_worker(mesh: Mesh) -> None:
    first = asyncio.create_task(first_half(mesh.client))
    await eventually(lambda: is_live(mesh))
    mesh.engines[0].signal(signal.SIGKILL)
    half = await first
    second = await second_half(mesh.client, state_of(half))
    assert second.token_ids[:1] == half.token_ids
    assert second.token_ids == (await whole(mesh)).token_ids
    mesh.engines.pop(0)
    await mesh.idle()


@pytest.mark.parametrize("mesh", [SLOWER], indirect=True)
@pytest.mark.parametrize("leaves", [False, True])
async def test_client_ends_a_first_half(mesh: Mesh, *, leaves: bool) -> None:
    reader = mesh.open([PROMPT], handoff=CONTEXT_ONLY, request_id="half", **OPTIONS)
    await eventually(lambda: is_live(mesh))
    if leaves:
        await reader.cancel()
    else:
        assert await mesh.client.stop("half") == 1
        (item,) = await reader.result()
        assert item.reason is FinishReason.STOPPED
        assert item.sequences[0].finished is not None
        assert item.sequences[0].finished.handoff_state is None
    await no_leases(mesh)


@pytest.mark.parametrize("leaves", [False, True])
async def test_client_ends_a_second_half(mesh: Mesh, *, leaves: bool) -> None:
    for _ in range(12):
        options = {**OPTIONS, "max_tokens": 5000}
        state = state_of(await first_half(mesh.client))
        reader = mesh.open([PROMPT], handoff=generation_only(state), request_id="half", **options)
        await reader.tokens_here(1)
        if leaves:
            await reader.cancel()
        else:
            assert await mesh.client.stop("half") == 1
            await reader.result()
    await no_leases(mesh)
