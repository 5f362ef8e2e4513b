"""Random faults and changes of a mesh of handoffs, each undone at its end."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from chaos.handoff_faults import cut, frozen, killed, silent
from chaos.handoff_mesh import ROUTERS, HandoffMesh
from chaos.handoff_progress import HandoffProgress
from chaos.proxy import Link
from e2e.mesh import eventually
from trtmesh.chassis.errors import DeadlineExceeded, NotFound, Unavailable
from trtmesh.client import AdminClient

LONGEST_SECONDS = 1.5
"""Longer than a lease, and than a stage of a handoff."""

AT_ONCE = 2
"""Disturbances at a time, on different processes."""

KILLED_ROUTER = ROUTERS[1]

ROLES = ("prefill", "decode", "mixed")


class Disturbances:
    """Disturbs a mesh as its seed says."""

    def __init__(
        self,
        mesh: HandoffMesh,
        progress: HandoffProgress,
        roles: Mapping[str, str],
        mortals: Sequence[str],
        seed: int,
    ) -> None:
        """`roles` are those of undisturbed workers; only the workers in `mortals` are killed, so that the others show
        what a long life costs."""
        self.counts = Counter[str]()
        self._progress = progress
        self._mesh, self._roles, self._mortals = mesh, roles, mortals
        self._draw = random.Random(seed)
        self._busy: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Held while a process is killed, frozen, or has another role."""
        self._turns = self._in_turns()
        self._kinds: Mapping[str, Callable[[random.Random], Awaitable[None]]] = {
            "kill a worker": self._kill_worker,
            "kill a router": self._kill_router,
            "freeze a worker": self._freeze_worker,
            "freeze a router": self._freeze_router,
            "cut router and worker": self._cut_router,
            "cut two workers": self._cut_workers,
            "silence router and worker": self._silence_router,
            "silence two workers": self._silence_workers,
            "slow two workers": self._slow_workers,
            "damage KV": self._damage,
            "change a role": self._change_role,
            "drain a worker": self._drain,
        }

    async def run(self, gap: int) -> None:
        """Causes a disturbance for every `gap` handoffs, until there are enough."""

        async def lane() -> None:
            while not self._progress.is_reached:
                kind, draw = next(self._turns)
                await self._kinds[kind](draw)
                self.counts[kind] += 1
                await self._progress.more(AT_ONCE * gap)

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(lane())

    def _in_turns(self) -> Iterator[tuple[str, random.Random]]:
        """Every kind once, then again, each time in another order."""
        while True:
            kinds = sorted(self._kinds)
            self._draw.shuffle(kinds)
            for kind in kinds:
                yield kind, random.Random(self._draw.getrandbits(32))

    async def _kill_worker(self, draw: random.Random) -> None:
        await self._kill(draw.choice(self._mortals), draw)

    async def _kill_router(self, draw: random.Random) -> None:
        await self._kill(KILLED_ROUTER, draw)

    async def _kill(self, name: str, draw: random.Random) -> None:
        async with self._busy[name]:
            await self._progress.note()
            async with killed(self._mesh, name):
                await _pause(draw)

    async def _freeze_worker(self, draw: random.Random) -> None:
        await self._freeze(draw.choice(sorted(self._roles)), draw)

    async def _freeze_router(self, draw: random.Random) -> None:
        await self._freeze(draw.choice(ROUTERS), draw)

    async def _freeze(self, name: str, draw: random.Random) -> None:
        async with self._busy[name], frozen(self._mesh, name):
            await _pause(draw)

    async def _cut_router(self, draw: random.Random) -> None:
        with cut(self._router_link(draw)):
            await _pause(draw)

    async def _cut_workers(self, draw: random.Random) -> None:
        with cut(self._fetch_link(draw)):
            await _pause(draw)

    async def _silence_router(self, draw: random.Random) -> None:
        with silent(self._router_link(draw)):
            await _pause(draw)

    async def _silence_workers(self, draw: random.Random) -> None:
        with silent(self._fetch_link(draw)):
            await _pause(draw)

    async def _slow_workers(self, draw: random.Random) -> None:
        link = self._fetch_link(draw)
        link.delay(draw.uniform(0, 0.05))
        await _pause(draw)
        link.mend()

    async def _damage(self, draw: random.Random) -> None:
        """Damages the next KV that each worker sends in messages."""
        names = sorted(self._roles)
        links = [
            self._mesh.workers[sender].fetch_link(receiver)
            for sender in names
            for receiver in names
            if sender != receiver
        ]
        for link in links:
            link.from_target.damage_data()
        damaged = [asyncio.create_task(link.from_target.has_damaged.wait()) for link in links]
        try:
            done, _ = await asyncio.wait(
                damaged, timeout=2 * LONGEST_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            self.counts["damaged messages"] += len(done)
        finally:
            for link, task in zip(links, damaged, strict=True):
                task.cancel()
                link.mend()

    async def _change_role(self, draw: random.Random) -> None:
        name = draw.choice(sorted(self._roles))
        async with self._busy[name]:
            other = draw.choice([role for role in ROLES if role != self._roles[name]])
            await self._set_role(name, other, draw)
            await _pause(draw)
            await self._set_role(name, self._roles[name], draw)

    async def _set_role(self, name: str, role: str, draw: random.Random) -> None:
        """Asks routers until one has changed the role: it may be dead, or its link to the worker cut."""

        async def is_set() -> bool:
            async with self._admin(draw) as admin:
                with suppress(Unavailable, DeadlineExceeded, NotFound):
                    await admin.set_worker_role(name, role)
                    return True
            return False

        await eventually(is_set)

    async def _drain(self, draw: random.Random) -> None:
        """Drains a worker for one router, which forgets it when it dies, then resumes the worker."""
        name, router = draw.choice(sorted(self._roles)), draw.choice(ROUTERS)
        async with self._busy[name]:
            async with AdminClient(self._mesh.routers[router].admin_address) as admin:
                with suppress(Unavailable, DeadlineExceeded, NotFound):
                    await admin.drain_worker(name, finish_seconds=draw.uniform(0, 0.3))
                    await _pause(draw)

            async def is_resumed() -> bool:
                async with AdminClient(self._mesh.routers[router].admin_address) as admin:
                    with suppress(Unavailable, DeadlineExceeded, NotFound):
                        await admin.resume_worker(name)
                        return True
                return False

            await eventually(is_resumed)

    @asynccontextmanager
    async def _admin(self, draw: random.Random) -> AsyncIterator[AdminClient]:
        async with AdminClient(self._mesh.routers[draw.choice(ROUTERS)].admin_address) as admin:
            yield admin

    def _router_link(self, draw: random.Random) -> Link:
        worker = self._mesh.workers[draw.choice(sorted(self._roles))]
        return worker.proxy.link(draw.choice(ROUTERS))

    def _fetch_link(self, draw: random.Random) -> Link:
        sender, receiver = draw.sample(sorted(self._roles), 2)
        return self._mesh.workers[sender].fetch_link(receiver)


async def _pause(draw: random.Random) -> None:
    await asyncio.sleep(draw.uniform(0, LONGEST_SECONDS))
