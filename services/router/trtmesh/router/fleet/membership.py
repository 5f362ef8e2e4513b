"""Workers join and leave: by discovery or by an admin's word, and no item is lost by it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trtmesh.chassis.addresses import Address
from trtmesh.chassis.errors import InvalidField, NotFound
from trtmesh.router.fleet.fleet import Fleet
from trtmesh.router.fleet.worker import Worker
from trtmesh.router.streams.sequence import SequenceRun

POLL_SECONDS = 0.05
"""How often it is looked whether a draining worker is empty."""

TAKEN_SECONDS = 1.0
"""How long a drain waits, when nothing is on its worker any more, for others to take what left it."""


@dataclass(frozen=True, slots=True)
class Drained:
    """What became of the sequences that a worker had when it was drained. Each is counted once."""

    worker: Worker
    finished: int
    """Ended on it, or before another worker took them."""
    moved: int
    """Another worker took them."""
    left: int
    """No other worker took them yet."""

    @classmethod
    def of(cls, worker: Worker, runs: Sequence[SequenceRun]) -> Drained:
        moved = sum(run.address not in ("", worker.address) for run in runs)
        left = sum(_has(worker, run) or run.waits_for_worker for run in runs)
        return cls(worker, len(runs) - moved - left, moved, left)


def _has(worker: Worker, run: SequenceRun) -> bool:
    return run.assignment is not None and run.address == worker.address


class Membership:
    """Who belongs to the fleet. `make` builds a worker; `link` begins to keep its stream open."""

    def __init__(
        self, fleet: Fleet, make: Callable[[str], Worker], link: Callable[[Worker], None]
    ) -> None:
        self._fleet = fleet
        self._make = make
        self._link = link

    def find(self, name: str) -> Worker:
        """The worker of that name or address. Raises NotFound, and InvalidField for a name that several have."""
        workers = self._fleet.workers
        if name in workers:
            return workers[name]
        found = [worker for worker in workers.values() if worker.engine.worker == name]
        if not found:
            known = ", ".join(sorted(worker.name for worker in workers.values())) or "none"
            raise NotFound(f"worker {name!r} is not known; workers are: {known}")
        if len(found) > 1:
            addresses = ", ".join(sorted(worker.address for worker in found))
            raise InvalidField(
                f"worker {name!r} is the name of several; name one by address: {addresses}"
            )
        return found[0]

    def join(self, address: str) -> Worker:
        """The worker at `address`, a new one or one that was about to leave."""
        known = self._fleet.workers.get(address)
        if known is not None:
            known.leaving = False
            known.evict("")
            self._fleet.changed()
            return known
        worker = self._make(address)
        self._fleet.join(worker)
        self._link(worker)
        return worker

    def leave(self, address: str) -> None:
        """The address of a worker is gone: it finishes what it has. An address goes when its worker begins to stop."""
        if (worker := self._fleet.workers.get(address)) is not None:
            worker.leaving = True

    def add(self, address: str) -> Worker:
        """Joins what an admin names. Raises InvalidField for what is no host:port."""
        try:
            Address.parse(address)
        except ValueError as error:
            raise InvalidField(f"address {error}; an IPv6 host is in brackets") from error
        return self.join(address)

    def remove(self, name: str) -> int:
        """Forgets a worker as soon as nothing is on it, and moves what another one takes; how many sequences went.

        Discovery that names its address brings it back only after it stopped naming it.
        """
        worker = self.find(name)
        worker.leaving = True
        # Whoever adds it again wants it to take items.
        worker.drained = False
        before = len(worker.sequences)
        worker.evict("an admin removed it")
        return before - len(worker.sequences)

    async def drain(self, name: str, finish_seconds: float | None) -> Drained:
        """Places nothing more on a worker, lets it finish for so long or, without limit, for as long as it takes, and
        moves the rest."""
        worker = self.find(name)
        worker.drained = True
        runs = list(worker.sequences.values())
        loop = asyncio.get_running_loop()
        ends_at = float("inf") if finish_seconds is None else loop.time() + finish_seconds
        while worker.sequences and worker.drained and loop.time() < ends_at:  # noqa: ASYNC110 - any of them may end it
            await asyncio.sleep(POLL_SECONDS)
        if worker.sequences and worker.drained:
            worker.evict("an admin drained it")
        ends_at = loop.time() + TAKEN_SECONDS
        while any(run.waits_for_worker for run in runs) and loop.time() < ends_at:  # noqa: ASYNC110 - items wait in many places
            await asyncio.sleep(POLL_SECONDS)
        return Drained.of(worker, runs)

    def resume(self, name: str) -> Worker:
        """Takes a drain back. Raises NotFound for a worker that leaves."""
        worker = self.find(name)
        if worker.leaving:
            raise NotFound(
                f"worker {name!r} leaves: it was removed, or its address is gone; add {worker.address} to take it back"
            )
        worker.drained = False
        worker.evict("")
        self._fleet.changed()
        return worker
