"""Adds and removes workers for discovery and admins, without losing an item."""

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
"""Poll interval of a drain."""

TAKEN_SECONDS = 1.0
"""Longest wait of a drain for the moved sequences to be placed."""


@dataclass(frozen=True, slots=True)
class Drained:
    """Fate of the sequences on a drained worker. Each counts once."""

    worker: Worker
    finished: int
    """Ended on the worker or before another took them."""
    moved: int
    """Taken by another worker."""
    left: int
    """Not yet taken by another worker."""

    @classmethod
    def of(cls, worker: Worker, runs: Sequence[SequenceRun]) -> Drained:
        moved = sum(run.address not in ("", worker.address) for run in runs)
        left = sum(_has(worker, run) or run.waits_for_worker for run in runs)
        return cls(worker, len(runs) - moved - left, moved, left)


def _has(worker: Worker, run: SequenceRun) -> bool:
    return run.assignment is not None and run.address == worker.address


@dataclass(frozen=True, slots=True)
class Membership:
    """Membership of the fleet. `_make` builds a worker; `_link` keeps its stream open."""

    _fleet: Fleet
    _make: Callable[[str], Worker]
    _link: Callable[[Worker], None]

    def find(self, name: str) -> Worker:
        """Finds a worker by name or address. Raises NotFound, or InvalidField for an ambiguous name."""
        workers = self._fleet.workers
        if name in workers:
            return workers[name]
        found = [worker for worker in workers.values() if worker.engine.worker == name]
        if not found:
            known = ", ".join(sorted(worker.name for worker in workers.values())) or "none"
            raise NotFound(
                f"{name!r} is not known; workers are: {known}",
                field="worker",
                value=repr(name),
                limit=f"one of {known}",
            )
        if len(found) > 1:
            addresses = ", ".join(sorted(worker.address for worker in found))
            raise InvalidField(
                f"{name!r} is the name of several workers; name one by address: {addresses}",
                field="worker",
                value=repr(name),
                limit=f"one of {addresses}",
            )
        return found[0]

    def join(self, address: str) -> Worker:
        """Adds the worker at `address`, or keeps a leaving one."""
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
        """Lets a worker without an address finish: addresses disappear when a worker begins to stop."""
        if (worker := self._fleet.workers.get(address)) is not None:
            worker.leaving = True

    def add(self, address: str) -> Worker:
        """Adds a worker for an admin. Raises InvalidField unless `address` is host:port."""
        try:
            Address.parse(address)
        except ValueError as error:
            limit = "host:port, with an IPv6 host in brackets"
            raise InvalidField.of("address", address, limit) from error
        return self.join(address)

    def remove(self, name: str) -> int:
        """Moves a worker's sequences and forgets the worker once empty; returns the number moved now.

        Discovery re-adds the worker only after the address disappears and returns.
        """
        worker = self.find(name)
        worker.leaving = True
        # A later `add` makes the worker take items.
        worker.drained = False
        before = len(worker.sequences)
        worker.evict("an admin removed it")
        return before - len(worker.sequences)

    async def drain(self, name: str, finish_seconds: float | None) -> Drained:
        """Places nothing more on a worker, waits for its sequences within the limit, if any, and moves the rest."""
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
        """Undoes a drain. Raises NotFound for a leaving worker."""
        worker = self.find(name)
        if worker.leaving:
            raise NotFound(
                f"{name!r} leaves: it was removed, or its address is gone; add {worker.address} to take it back",
                field="worker",
                value=repr(name),
            )
        worker.drained = False
        worker.evict("")
        self._fleet.changed()
        return worker
