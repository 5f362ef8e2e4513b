"""A request that is held at a step of its handoff, suffers a fault there, and gets the tokens of an undisturbed one."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import compress
from typing import Any

import pytest
from chaos.fragile import contents
from chaos.handoff_faults import CLIENT, DAMAGE, can_happen, struck
from chaos.handoff_mesh import ROUTERS, HandoffMesh
from chaos.handoff_scenes import Prefill
from chaos.handoff_steps import PARKED, Held, prepare, reach
from chaos.narrow_client import NarrowClient
from chaos.proxy import Proxy, proxy_to
from e2e.mesh import decode
from trtmesh.chassis.errors import BackendFailed, DeadlineExceeded, Unavailable
from trtmesh.client import Client, FinishReason, ItemResult

TRANSPORTS = ["shared_memory", "grpc"] + ["nixl"] * (find_spec("nixl_cu12") is not None)
ATTEMPTS = 20
"""A slow moment of the machine may end a request before its step."""

LONG = 400
"""Tokens of a request that its client ends: more than a busy machine generates before it does."""

FIRST_DEADLINE_SECONDS = 0.5
"""Less than the mesh takes to do without a held handoff."""

OPTIONS: dict[str, Any] = {"ignore_end_id": True, "temperature": 0.9, "seed": 5}


@dataclass(frozen=True)
class Case:
    """A fault at a step of a scene. No two are equal: pytest would put them together, and restart the mesh for each."""

    transport: str
    scene: str
    step: str
    fault: str

    def __str__(self) -> str:
        return f"{self.transport}-{self.scene}-{self.step}-{self.fault}"

    @property
    def can_happen(self) -> bool:
        # The receiver of messages uses the KV without a confirmation.
        has_step = self.step != "confirming" or self.transport != "grpc"
        return has_step and can_happen(self.fault, self.step)


async def suffer(mesh: HandoffMesh, case: Case, scene: type[Prefill]) -> None:
    """Lets a request suffer a fault, and checks that nothing is lost or left."""
    async with held_at(mesh, case, scene) as held:
        async with struck(held, case.fault) as silenced:
            struck_at = time.monotonic()
            if case.fault in CLIENT:
                await end_by_client(held, case.fault)
                held.lift()
            else:
                held.lift(silenced)
                await held.reader.result()
        items = held.reader.items
        stall = held.reader.stall_seconds(struck_at)
    await mesh.settle()
    held.options.pop("timeout_seconds", None)
    if case.fault in CLIENT:
        held.options["max_tokens"] = longest(items)
    expected = await mesh.client.complete(held.prompts, **held.options)
    if case.fault in CLIENT:
        check_beginning(items, expected)
    else:
        whole = [not isinstance(item.error, BackendFailed) for item in items]
        # A paused sequence that goes on where it was computed meets the damage there, in memory that nobody copies.
        assert all(whole) or (case.fault == DAMAGE and case.scene == "pause")
        check_beginning(items, expected)
        assert contents(compress(items, whole)) == contents(compress(expected, whole))
        print(f"{case}: stall {stall * 1000:.0f} ms")


@asynccontextmanager
async def held_at(mesh: HandoffMesh, case: Case, scene_type: type[Prefill]) -> AsyncIterator[Held]:
    """A request at a step."""
    for attempt in range(ATTEMPTS):
        # Damage must not meet a sequence that still computes; paused ones do not.
        is_alone = case.fault == DAMAGE and case.scene != "pause"
        count = 1 if is_alone else scene_type.prompts
        prompts = mesh.fresh_prompts(count, scene_type.prompt_tokens)
        tokens = LONG if case.fault in CLIENT else scene_type.max_tokens
        options = {**OPTIONS, "max_tokens": tokens}
        if case.fault == "deadline":
            options["timeout_seconds"] = FIRST_DEADLINE_SECONDS * 2**attempt
        async with client_of(mesh, case) as (client, proxy):
            held = Held(mesh, client, proxy, prompts, options)
            scene = scene_type(held)
            try:
                if await scene.begin():
                    prepare(held, case.step, scene.receivers, scene.messages_before)
                    if case.step != PARKED:
                        await scene.trigger()
                    if await reach(held, case.step):
                        yield held
                        return
            finally:
                held.lift()
                await held.reader.cancel()
                await scene.end()
        await mesh.settle()
    raise AssertionError(f"no request was at {case} in {ATTEMPTS} attempts")


@asynccontextmanager
async def client_of(mesh: HandoffMesh, case: Case) -> AsyncIterator[tuple[Client, Proxy]]:
    """A client of the first router, and of the other as its second choice unless it is to lose the request."""
    async with proxy_to(mesh.routers[ROUTERS[0]].address) as proxy:
        leaves = case.fault == "disconnect"
        others = [] if leaves else [mesh.routers[ROUTERS[1]].address]
        kind = NarrowClient if case.scene == "pause" else Client
        seconds = 0 if leaves else 60
        async with kind([proxy.address, *others], resume_seconds=seconds) as client:
            yield client, proxy


async def end_by_client(held: Held, fault: str) -> None:
    """Ends a request early."""
    reader = held.reader
    match fault:
        case "stop":
            await reader.until(lambda reader: reader.events)
            stopped = await held.mesh.client.stop(reader.request_id)
            # A paused client reads the end, too.
            held.client_proxy.mend()
            reasons = [item.reason for item in await reader.result()]
            # On a slow machine one of the items may be over.
            assert 0 < stopped == reasons.count(FinishReason.STOPPED)
        case "cancel":
            await reader.cancel()
        case "disconnect":
            held.client_proxy.cut()
            with pytest.raises(Unavailable):
                await reader.result()
        case "deadline":
            with suppress(DeadlineExceeded):
                items = await reader.result()
                possible = {FinishReason.CANCELLED}
                if held.options["timeout_seconds"] > FIRST_DEADLINE_SECONDS:
                    # After a slow attempt, the mesh may do without the handoff and finish first.
                    possible.add(FinishReason.LENGTH)
                ends = {item.reason for item in items}
                assert ends
                assert ends <= possible


def longest(items: Sequence[ItemResult]) -> int:
    """The most tokens that a client got of a sequence, or 1."""
    return max((len(each.token_ids) for item in items for each in item.sequences), default=0) or 1


def check_beginning(items: Sequence[ItemResult], whole: Sequence[ItemResult]) -> None:
    """What a client got begins as the whole result does."""
    for item, expected in zip(items, whole, strict=True):
        for sequence, undisturbed in zip(item.sequences, expected.sequences, strict=False):
            assert sequence.token_ids == undisturbed.token_ids[: len(sequence.token_ids)]
            assert sequence.text == decode(sequence.token_ids)[: len(sequence.text)]
