"""How many handoffs a mesh has made, processes that died since included."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPException

from chaos.handoff_mesh import HandoffMesh
from e2e.mesh import samples_of
from processes import ServiceProcess

HANDOFFS = "trtmesh_router_handoffs_total"
LEASES = "trtmesh_engine_handoffs_total"
BYTES = "trtmesh_engine_handoff_bytes_total"

LOOK_SECONDS = 0.25


class HandoffProgress:
    """The counters of all processes, each as last seen."""

    def __init__(self, mesh: HandoffMesh) -> None:
        self._mesh = mesh
        self._seen: dict[int, Counter[tuple[str, ...]]] = {}
        self._looked = asyncio.Condition()
        self._goal = 0.0

    def counts(self, name: str, *labels: str) -> Counter[tuple[str, ...]]:
        """A counter over all processes, by labels."""
        found = Counter[tuple[str, ...]]()
        for seen in self._seen.values():
            for key, value in seen.items():
                known = dict(zip(key[1::2], key[2::2], strict=True))
                if key[0] == name:
                    found[tuple(known[label] for label in labels)] += value
        return found

    @property
    def handoffs(self) -> int:
        """Handoffs with a result, whatever it is."""
        return self.counts(HANDOFFS).total()

    async def reach(self, handoffs: int) -> None:
        """Looks until there are so many handoffs."""
        self._goal = handoffs
        while not self.is_reached:
            await asyncio.sleep(LOOK_SECONDS)
            await self.note([*self._mesh.routers.values()])
            async with self._looked:
                self._looked.notify_all()

    @property
    def is_reached(self) -> bool:
        """Whether there are as many as `reach` asked for last."""
        return self.handoffs >= self._goal

    async def more(self, handoffs: int) -> None:
        """Waits for so many more handoffs, or until there are enough."""
        least = min(self.handoffs + handoffs, self._goal)
        async with self._looked:
            await self._looked.wait_for(lambda: self.handoffs >= least)

    async def note(self, processes: Sequence[ServiceProcess] = ()) -> None:
        """Looks at processes, by default at all; what they count between this and their death is lost."""
        chosen = processes or [process for _, process in self._mesh.processes()]
        await asyncio.gather(*map(self._look, chosen))

    async def _look(self, process: ServiceProcess) -> None:
        with suppress(OSError, HTTPException):
            samples = await samples_of(process)
            counted = Counter[tuple[str, ...]]()
            for sample in samples:
                if sample.name in (HANDOFFS, LEASES, BYTES):
                    labels = [word for pair in sample.labels.items() for word in pair]
                    counted[sample.name, *labels] += int(sample.value)
            self._seen[process.pid] = counted
