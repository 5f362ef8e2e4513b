"""Adds and removes workers for discovery and admins, without losing an item."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from trtmesh.chassis.addresses import host_of, parse_engine
from trtmesh.chassis.errors import AlreadyExists, Draining, InvalidField, NotFound, WorkerLost
from trtmesh.router.fleet.assignments import Held
from trtmesh.router.fleet.discovery import addresses_of
from trtmesh.router.fleet.fleet import Fleet
from trtmesh.router.fleet.link_local import check_dialled, refuse_link_local
from trtmesh.router.fleet.worker import Worker
from trtmesh.router.links.local import LOCAL
from trtmesh.v1 import engine_pb2 as pb

POLL_SECONDS = 0.05
"""Poll interval of drains and changes of role."""

HANDED_OVER_SECONDS = 30.0
"""Longest wait of a drain, or of a change of role, for the sequences that are handed over."""

TAKEN_SECONDS = 1.0
"""Longest wait of a drain, or of a change of role, for the moved sequences to be placed."""

ROLE_SECONDS = 5.0
"""Longest wait for a worker to report another role: many load reports."""


@dataclass(frozen=True, slots=True)
class Drained:
    """A worker that refuses new items, and the sequences that it had. Each counts once, by where it is now."""

    worker: Worker
    runs: Sequence[Held]
    only_here: bool = False
    """Whether other routers still place on the worker."""

    @property
    def finished(self) -> int:
        """Ended on the worker or before another took them."""
        return len(self.runs) - self.moved - self.left

    @property
    def moved(self) -> int:
        """Taken by another worker."""
        return sum(run.address not in ("", self.worker.address) for run in self.runs)

    @property
    def left(self) -> int:
        """Not yet taken by another worker."""
        address = self.worker.address
        return sum(
            run.waits_for_worker or (run.assignment is not None and run.address == address)
            for run in self.runs
        )


def _sequences_of(worker: Worker) -> list[Held]:
    """Its sequences, without second copies of sequences elsewhere."""
    return [run for run in worker.sequences.values() if run.address == worker.address]


async def _until(condition: Callable[[], bool], seconds: float) -> None:
    """Waits for a condition that many things may fulfil, within the limit."""
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + seconds
    while not condition() and loop.time() < ends_at:  # noqa: ASYNC110 - items and workers wait in many places
        await asyncio.sleep(POLL_SECONDS)


async def _only_address(text: str) -> str:
    """Returns the address of a worker in discovery's spelling, or an unknown name unchanged. Raises InvalidField for a
    name of several addresses."""
    try:
        addresses = sorted(await addresses_of(text, parse_engine))
    except (OSError, UnicodeError):
        return text
    if len(addresses) > 1:
        raise InvalidField(
            f"is {text!r}, the name of {len(addresses)} workers; add each of them: {', '.join(addresses)}",
            field="address",
            value=repr(text),
            limit="one worker",
        )
    return addresses[0]


def _check_role(worker: Worker, role: pb.WorkerRole.ValueType) -> None:
    if role not in worker.description.roles:
        names = [_role_name(each) for each in worker.description.roles]
        limit = f"one of {', '.join(names)}" if names else "left alone: the worker has one role"
        raise InvalidField.of("role", _role_name(role), limit)
    if not worker.connected:
        raise WorkerLost(
            f"worker {worker.name} is not connected: {worker.problem}", worker=worker.name
        )


def _role_name(role: int) -> str:
    known = role in pb.WorkerRole.values()
    return pb.WorkerRole.Name(pb.WorkerRole.ValueType(role))[12:].lower() if known else str(role)


@dataclass(frozen=True, slots=True)
class Membership:
    """Membership of the fleet. `_make` builds a worker; `_link` keeps its stream open."""

    _fleet: Fleet
    _make: Callable[[str], Worker]
    _link: Callable[[Worker], None]
    _allow_link_local: bool = False
    _removed: set[str] = field(default_factory=set)
    """Addresses of workers that an admin removed, until they join again or leave discovery."""

    async def find(self, name: str) -> Worker:
        """Finds a worker by name or address, however spelt. Raises NotFound, or InvalidField for an ambiguous name."""
        workers = self._fleet.workers
        if name not in workers:
            with suppress(ValueError, OSError):
                for address in await addresses_of(name, parse_engine):
                    name = address if address in workers else name
        if name in workers:
            return workers[name]
        found = [worker for worker in workers.values() if worker.description.worker == name]
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

    async def _linked(self, name: str) -> Worker:
        """Finds a worker, by a second address too. Returns the worker with the link."""
        worker = await self.find(name)
        return self._fleet.workers.get(worker.twin, worker)

    def join(self, address: str) -> Worker:
        """Adds the worker at `address`, or keeps a leaving one."""
        self._removed.discard(address)
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
        self._removed.discard(address)
        if (worker := self._fleet.workers.get(address)) is not None:
            worker.leaving = True

    def is_in_use(self, address: str) -> bool:
        """Whether discovery keeps an address missing from an answer: the address of a working worker, or of a worker
        removed by an admin, since the next answer would add the worker again."""
        worker = self._fleet.workers.get(address)
        return address in self._removed or (
            worker is not None and worker.works and not worker.stops
        )

    async def add(self, address: str, wait_seconds: float) -> Worker:
        """Adds a worker for an admin, and waits for its answer unless `wait_seconds` is 0.

        Raises InvalidField unless `address` is an engine's and allowed, or WorkerLost without an answer: a new worker
        is then removed again.
        """
        try:
            parsed = host_of(parse_engine(address))
        except ValueError as error:
            limit = "host:port, with an IPv6 host in brackets, or that after vllm://, sglang:// or trtllm://"
            raise InvalidField.of("address", address, limit) from error
        if not self._allow_link_local:
            await refuse_link_local(parsed)
        address = await _only_address(address)
        is_new = address not in self._fleet.workers
        worker = self.join(address)
        if is_new and not self._allow_link_local:
            worker.check_dialled = check_dialled
        keep = not (is_new and wait_seconds)
        try:
            await _until(lambda: worker.answered, wait_seconds)
            keep |= worker.answered and not worker.twin
        finally:
            if not keep:
                worker.leaving = True
        if worker.twin:
            raise AlreadyExists(
                f"is {address}, where {worker.problem}", field="address", value=repr(address)
            )
        if wait_seconds and not worker.answered:
            fate = "it was removed again" if is_new else "it stays, as it was there before"
            raise WorkerLost(
                f"no worker answered at {address} within {wait_seconds:g} s ({worker.problem}); {fate}. Check the"
                " address, or add a worker that starts later without waiting (--wait 0)"
            )
        return worker

    async def remove(self, name: str) -> int:
        """Moves a worker's sequences and forgets the worker once empty. Returns the number of sequences leaving now.

        Discovery re-adds the worker only after the address disappears and returns. Raises InvalidField for the worker
        inside this process, without an address to add again.
        """
        worker = await self.find(name)
        if worker.address == LOCAL:
            raise InvalidField(
                f"{name!r} is inside this router's process and stays; drain it instead",
                field="worker",
                value=repr(name),
            )
        worker.leaving = True
        self._removed.add(worker.address)
        # A later `add` makes the worker take items, unless it drains itself.
        worker.drained = False
        return worker.evict("an admin removed it")

    async def drain(self, name: str, finish_seconds: float | None) -> Drained:
        """Has a worker refuse new items, waits for its sequences within the limit, if any, and moves the rest."""
        drained = await self.begin_drain(name)
        worker = drained.worker
        limit = float("inf") if finish_seconds is None else finish_seconds
        await _until(lambda: not (worker.sequences and worker.drained), limit)
        if worker.sequences and worker.drained:
            worker.evict("an admin drained it")
        await self.end_drain(drained)
        return drained

    async def begin_drain(self, name: str) -> Drained:
        """Has a worker refuse new items."""
        worker = await self._linked(name)
        worker.drain()
        await _until(lambda: worker.load.draining or not worker.drains_itself, ROLE_SECONDS)
        return Drained(worker, _sequences_of(worker), only_here=not worker.load.draining)

    async def end_drain(self, drained: Drained) -> None:
        """Waits until others have what leaves a drained worker, for a while."""
        await _until(lambda: not drained.worker.hands_over, HANDED_OVER_SECONDS)
        await _until(lambda: not any(run.waits_for_worker for run in drained.runs), TAKEN_SECONDS)

    async def set_role(self, name: str, role: pb.WorkerRole.ValueType) -> tuple[Worker, int]:
        """Changes a worker's role for all routers. Returns the worker and the number of sequences moved by the change.

        Raises NotFound, InvalidField for a role that the worker lacks, or WorkerLost.
        """
        worker = await self._linked(name)
        _check_role(worker, role)
        runs = _sequences_of(worker)
        worker.set_role(role)
        await _until(lambda: worker.load.role == role or not worker.connected, ROLE_SECONDS)
        if worker.load.role != role:
            raise WorkerLost(
                f"worker {worker.name} did not take the role within {ROLE_SECONDS:g} s; look at its state with"
                " `trtmesh workers list` and try again",
                worker=worker.name,
            )
        # Not for prefills that end with a handoff anyway: a prefill worker has some all the time.
        await _until(lambda: not worker.leases.moves, HANDED_OVER_SECONDS)
        await _until(lambda: not any(run.waits_for_worker for run in runs), TAKEN_SECONDS)
        return worker, Drained(worker, runs).moved

    async def resume(self, name: str) -> Worker:
        """Undoes a drain. Raises NotFound for a leaving worker, Draining for a stopping worker."""
        worker = await self._linked(name)
        if worker.leaving:
            raise NotFound(
                f"{name!r} leaves: it was removed, or its address is gone; add {worker.address} to take it back",
                field="worker",
                value=repr(name),
            )
        if worker.stops:
            raise Draining(
                f"worker {worker.name} stops: it takes no items until it is started again",
                worker=worker.name,
            )
        worker.resume()
        await _until(lambda: not worker.load.draining, ROLE_SECONDS)
        self._fleet.changed()
        return worker
