"""Workers of roles as processes: where items go, why, and what a change of role does to running ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
from e2e.mesh import ENDLESS, PATIENT, SIMULATED, Mesh, check_beginning, eventually, running_mesh
from trtmesh.client import ItemResult
from trtmesh.router.placement.split import ALWAYS, FASTER, NO_DECODE, SLOWER
from trtmesh.v1 import router_admin_pb2 as admin_pb
from trtmesh.v1.engine_pb2 import WORKER_ROLE_PREFILL as PREFILL
from trtmesh.v1.engine_pb2 import WorkerRole

pytestmark = pytest.mark.asyncio(loop_scope="module")

RATE = ("--simulated-timing-prefill-tokens-per-second", "20000")
LONG = list(range(100, 3100))
SHORT = [5, 6, 7]
OPTIONS: dict[str, Any] = {"max_tokens": 24, "seed": 5, "temperature": 0.8, "top_k": 40}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[Mesh]:
    async def start(mesh: Mesh) -> None:
        roles = (("p0", "prefill"), ("d0", "decode"), ("d1", "decode"))
        await asyncio.gather(
            mesh.start_tokenizer(),
            *(
                mesh.start_engine(*SIMULATED, *RATE, "--worker", name, "--role", role)
                for name, role in roles
            ),
        )
        await mesh.start_router(*PATIENT)
        await mesh.ready(3, 1)

    async with running_mesh(start=start) as mesh:
        yield mesh


async def ask(
    mesh: Mesh, prompt: Sequence[int], request_id: str = "", **options: Any
) -> ItemResult:
    named = {"request_id": request_id} if request_id else {}
    (item,) = await mesh.client.complete([prompt], **{**OPTIONS, **named, **options})
    assert item.error is None
    return item


async def placements(mesh: Mesh, request_id: str) -> Sequence[admin_pb.Placement]:
    return (await mesh.admin.explain(request_id)).placements


async def seen(mesh: Mesh) -> dict[str, admin_pb.Worker]:
    return {worker.worker: worker for worker in (await mesh.status()).workers}


async def no_leases(mesh: Mesh) -> None:
    """Waits until every lease of every worker has an outcome: reports lag behind by their interval."""

    async def all_ended() -> bool:
        loads = [worker.load for worker in (await seen(mesh)).values()]
        return all(
            each.granted == each.consumed + each.released + each.expired
            for load in loads
            for each in (load.sent_handoffs, load.received_handoffs)
        )

    await eventually(all_ended)
    await mesh.idle()


async def test_long_prompt_is_split_beside_running_sequences(mesh: Mesh) -> None:
    chats = [mesh.open([[n]], max_tokens=ENDLESS) for n in range(10, 20)]
    for chat in chats:
        await chat.tokens_here(2)
    expected = await ask(mesh, LONG, "split")
    (placement,) = await placements(mesh, "split")
    assert placement.split_reason == FASTER
    assert (placement.prefill_worker, placement.worker[0]) == ("p0", "d")
    assert 0 < placement.split_seconds < placement.whole_seconds
    excluded = {each.worker: each.excluded_by for each in placement.candidates}
    assert excluded == {"p0": "its role is prefill", "d0": "", "d1": ""}
    for chat in chats:
        await chat.cancel()
    await no_leases(mesh)
    again = await ask(mesh, LONG)
    assert again.token_ids == expected.token_ids


async def test_short_prompt_stays_on_one_worker(mesh: Mesh) -> None:
    await ask(mesh, SHORT, "short")
    (placement,) = await placements(mesh, "short")
    assert placement.worker[0] == "d"
    assert placement.prefill_worker == ""
    assert "are fewer than 16" in placement.split_reason
    assert placement.split_seconds == 0 < placement.whole_seconds


async def test_idle_decode_worker_computes_the_prompt_itself(mesh: Mesh) -> None:
    await ask(mesh, LONG[::-1], "idle")
    (placement,) = await placements(mesh, "idle")
    assert (placement.prefill_worker, placement.split_reason) == ("", SLOWER)
    assert 0 < placement.whole_seconds <= placement.split_seconds


async def test_prefill_worker_takes_whole_items_when_no_other_is_left(mesh: Mesh) -> None:
    for name in ("d0", "d1"):
        await mesh.admin.drain_worker(name)
    await ask(mesh, LONG, "last")
    (placement,) = await placements(mesh, "last")
    assert (placement.worker, placement.prefill_worker) == ("p0", "")
    assert placement.split_reason == NO_DECODE
    for name in ("d0", "d1"):
        await mesh.admin.resume_worker(name)
    await mesh.ready(3)


async def test_roles_change_under_load(mesh: Mesh) -> None:
    # The last token is a whole character: a text continues the character in which its prompt ends.
    prompts = [[n, *LONG[: 40 + n], 50] for n in range(8)]
    expected = await asyncio.gather(*(ask(mesh, prompt, max_tokens=200) for prompt in prompts))
    running = [mesh.open([prompt], **{**OPTIONS, "max_tokens": ENDLESS}) for prompt in prompts]
    for reader in running:
        await reader.tokens_here(8)
    moved, workers = 0, await seen(mesh)
    # On a busy machine one of the two may have been given every sequence.
    busy = max("d0", "d1", key=lambda name: workers[name].load.running_sequences)
    for name, role in (("p0", "decode"), (busy, "prefill"), (busy, "decode"), ("p0", "prefill")):
        moved += (await mesh.admin.set_worker_role(name, role)).moved_sequences
        workers = await seen(mesh)
        assert admin_pb.WorkerState.Name(workers[name].state) == "WORKER_STATE_READY"
        assert workers[name].load.role == WorkerRole.Value(f"WORKER_ROLE_{role.upper()}")
        await ask(mesh, SHORT, f"{name}-{role}")
        (placement,) = await placements(mesh, f"{name}-{role}")
        excluded = {each.worker for each in placement.candidates if each.excluded_by}
        assert excluded == {n for n, w in workers.items() if w.load.role == PREFILL}
        assert placement.worker not in excluded
    assert moved > 0
    for reader, undisturbed in zip(running, expected, strict=True):
        check_beginning(await reader.stopped_at(200), [undisturbed])
    await no_leases(mesh)
    workers = await seen(mesh)
    assert sum(worker.load.received_handoffs.consumed for worker in workers.values()) > 0


async def test_always_splits_even_idle_fleets() -> None:
    async def start(mesh: Mesh) -> None:
        for name, role in (("p0", "prefill"), ("d0", "decode")):
            await mesh.start_engine(*SIMULATED, "--worker", name, "--role", role)
        await mesh.start_router(*PATIENT, "--handoff-enabled", "always")
        await mesh.ready(2)

    async with running_mesh(start=start) as mesh:
        item = await ask(mesh, SHORT, "always", text=False)
        assert len(item.token_ids) == 24
        (placement,) = await placements(mesh, "always")
        assert (placement.prefill_worker, placement.worker) == ("p0", "d0")
        assert placement.split_reason == ALWAYS
        await no_leases(mesh)
