"""Moves streams between workers, with their KV: for an admin, before a worker is gone, and by itself where configured.

A plan is made of one moment and carried out by the handoffs' own verb, a few moves at a time. What fails meanwhile
stays where it is, or continues as after any failed handoff.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from trtmesh.chassis.errors import Draining
from trtmesh.chassis.tasks import next_tick
from trtmesh.router.fleet.fleet import Fleet
from trtmesh.router.fleet.membership import Drained, Membership
from trtmesh.router.fleet.worker import Worker
from trtmesh.router.handoffs.item_handoffs import MAX_MOVES
from trtmesh.router.movement.planner import Move, emptied, evened, roomy
from trtmesh.router.movement.streams import STAY_SECONDS, Scene, items_of
from trtmesh.router.requests.item import ItemRun
from trtmesh.router.streams.sequence import SequenceRun

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Between two looks of a router that moves streams by itself."""
MOVES_PER_LOOK = 4
"""Most moves that it begins then: a bound of their rate."""
MOST_MOVES = 64
"""Most moves of a plan for an admin."""
POLL_SECONDS = 0.05
LEAST_MARGIN_SECONDS, MARGIN_PART = 0.5, 0.1
"""The last part of the time of a worker that will be gone: what is there still leaves without KV."""


@dataclass(frozen=True, slots=True)
class StreamMove:
    run: SequenceRun
    batch_index: int
    tokens: int
    plan: Move
    began: bool


class Movement:
    """The moves of a router's streams."""

    def __init__(self, fleet: Fleet, members: Membership) -> None:
        self._fleet, self._members = fleet, members

    async def rebalance(
        self, room_tokens: int = 0, *, dry_run: bool, most: int = MOST_MOVES
    ) -> list[StreamMove]:
        """Plans moves that pay: to have room for a prompt of so many tokens, else to even out load and KV and to gather
        adapters. Begins them unless it is a `dry_run`."""
        found: list[StreamMove] = []
        for model in sorted(self._fleet.models()):
            scene = Scene.of(self._fleet, model)
            moves: Iterable[Move]
            if room_tokens:
                moves = roomy(scene.sites, scene.streams, room_tokens)
            else:
                moves = evened(scene.sites, scene.streams, most - len(found))
            for move in moves:
                found += await self._carry_out(move, scene, dry_run=dry_run)
        return found

    async def _carry_out(self, move: Move, scene: Scene, *, dry_run: bool) -> list[StreamMove]:
        # To find the next one takes milliseconds.
        await asyncio.sleep(0)
        told = []
        for stream in move.streams:
            run = scene.runs[stream.number]
            item = run.owner
            assert isinstance(item, ItemRun)
            began = not dry_run and await self._begin(item, run, move)
            told.append(StreamMove(run, item.batch_index, stream.tokens, move, began))
        return told

    async def _begin(self, item: ItemRun, run: SequenceRun, move: Move) -> bool:
        """Begins a move, after others of the worker and of the item; False if the stream is gone, or the receiver
        full."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + STAY_SECONDS
        while (sender := self._fleet.workers.get(move.sender)) and loop.time() < ends_at:
            if run.assignment is None or run.address != move.sender:
                return False
            if sender.leases.moves < MAX_MOVES and not item.is_moving:
                run.times.stays_until = loop.time() + STAY_SECONDS
                return item.move_to(run, move.receiver)
            await asyncio.sleep(POLL_SECONDS)
        return False

    async def run(self) -> None:
        """Moves streams that pay, again and again, until cancelled."""
        while True:
            await next_tick(LOOK_SECONDS)
            try:
                await self.look()
            except Exception:
                log.exception("a look for moves failed; the next is in %g s", LOOK_SECONDS)

    async def look(self) -> None:
        """Begins a few moves: first to make room for prompts that wait for blocks."""
        for model in sorted(self._fleet.models()):
            scene = Scene.of(self._fleet, model)
            evening = evened(scene.sites, scene.streams, MOVES_PER_LOOK)
            moves = self._for_waiting(scene) or evening
            for move in islice(moves, MOVES_PER_LOOK):
                if any(each.began for each in await self._carry_out(move, scene, dry_run=False)):
                    log.info(
                        "%d streams move from %s to %s: %s (%.3f s gained for %.3f s)",
                        len(move.streams),
                        move.sender,
                        move.receiver,
                        move.why,
                        move.gain_seconds,
                        move.cost_seconds,
                    )

    def _for_waiting(self, scene: Scene) -> Iterable[Move]:
        """Moves for the longest prompt that waits at a worker for blocks."""
        waiting = [
            stream
            for stream, run in zip(scene.streams, scene.runs, strict=True)
            if run.queued and not run.token_ids
        ]
        for stream in sorted(waiting, key=lambda each: -each.tokens):
            if self._fleet.workers[stream.worker].load.waiting_sequences:
                return roomy(scene.sites, scene.streams, stream.tokens, stream.worker)
        return ()

    def _empty(self, worker: Worker, seconds: float) -> None:
        """Has as many streams as may move at once leave a worker that will be gone in so many seconds."""
        scene = Scene.of(self._fleet, worker.description.model, worker.address)
        site = next((each for each in scene.sites if each.address == worker.address), None)
        if site is None:
            return
        others = [each for each in scene.sites if each.takes]
        receiver = min(others, default=site, key=lambda each: each.transfer_seconds)
        for stream in emptied(site, scene.streams, seconds, receiver):
            if worker.leases.moves >= MAX_MOVES:
                break
            run = scene.runs[stream.number]
            run.owner.hand_over([run], worker.address, "drain")

    async def drain_by(self, name: str, seconds: float) -> Drained:
        """Empties a worker that will be gone in so many seconds: it takes nothing more, and hands over what pays most
        first. What is left near the end continues elsewhere without its KV. Raises as `Membership.drain`."""
        drained = await self._members.begin_drain(name)
        worker = drained.worker
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + seconds - max(LEAST_MARGIN_SECONDS, MARGIN_PART * seconds)
        while any(items_of(worker)) and worker.drained and (left := ends_at - loop.time()) > 0:
            if worker.leases.moves < MAX_MOVES:
                self._empty(worker, left)
            await asyncio.sleep(POLL_SECONDS)
        if worker.drained and worker.sequences:
            worker.migrate_all(Draining(f"worker {worker.name} is left: its time ends"))
        await self._members.end_drain(drained)
        return drained
