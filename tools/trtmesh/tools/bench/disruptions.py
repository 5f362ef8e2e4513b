"""Faults during a run: kills, freezes, drains and changed roles, of a stack on this machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from random import Random

import psutil
from trtmesh.chassis.bearer import AdminToken
from trtmesh.chassis.errors import TrtmeshError
from trtmesh.cli.stacks import RunningStack
from trtmesh.cli.tables import role_word
from trtmesh.client import AdminClient
from trtmesh.tools.bench.faults import DisruptionOptions, Fault
from trtmesh.tools.bench.record import Disruption
from trtmesh.tools.bench.stack_processes import StackProcess, frozen, processes_of, stack_of
from trtmesh.tools.bench.targets.target import Url
from trtmesh.v1 import router_admin_pb2 as pb

RETURN_SECONDS = 120.0
"""Longest wait for what was killed: a large model loads as long."""
POLL_SECONDS = 0.05


def faults_of(options: DisruptionOptions, url: Url, seed: int) -> Faults:
    """Raises SettingsError, also where the target's stack does not run here."""
    return Faults(options.faults(), stack_of(url.addresses[0], options.stack), seed)


class FaultFailed(Exception):
    """A fault could not be made, or did not end."""


class Faults:
    """Makes faults of a stack at their times, each on its own."""

    def __init__(self, faults: Sequence[Fault], stack: RunningStack, seed: int) -> None:
        self.made: list[Disruption] = []
        self._faults = faults
        self._stack = stack
        self._seed = seed

    async def run(self, clock: Callable[[], float]) -> None:
        """When the task is cancelled, what was frozen, drained or changed is as before."""
        self.made = []
        async with asyncio.TaskGroup() as group:
            for number, fault in enumerate(self._faults):
                group.create_task(self._suffer(fault, Random(f"{self._seed} {number}"), clock))

    async def _suffer(self, fault: Fault, draw: Random, clock: Callable[[], float]) -> None:
        target, error, began = fault.target, "the run ended before", fault.at_s
        try:
            await asyncio.sleep(max(0.0, fault.at_s - clock()))
            began, error = clock(), "the run ended before its end"
            async with self._made(fault, draw) as target:
                await asyncio.sleep(fault.length_s)
            error = ""
        except psutil.NoSuchProcess:
            error = "the process ended before"
        except (FaultFailed, TrtmeshError, psutil.Error) as failure:
            error = str(failure)
        finally:
            self.made.append(Disruption(fault.kind, target, began, max(began, clock()), error))

    def _made(self, fault: Fault, draw: Random) -> AbstractAsyncContextManager[str]:
        """Makes a fault for the length of a block, and yields the name of what has it."""
        ways = {"kill": self._killed, "freeze": self._frozen}
        return ways.get(fault.kind, self._administered)(fault, draw)

    @asynccontextmanager
    async def _killed(self, fault: Fault, draw: Random) -> AsyncIterator[str]:
        victim, before = self._process(fault.target, draw), await self._ready()
        count = len(self._processes(victim.service))
        victim.process.kill()
        yield victim.name
        try:
            async with asyncio.timeout(RETURN_SECONDS):
                # Neither the kernel nor the router sets an event.
                while not self._is_replaced(victim, count) or not before <= await self._ready():  # noqa: ASYNC110
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise FaultFailed(f"it was not back after {RETURN_SECONDS:g} s") from None

    @asynccontextmanager
    async def _frozen(self, fault: Fault, draw: Random) -> AsyncIterator[str]:
        victim = self._process(fault.target, draw)
        with frozen(victim.process):
            yield victim.name

    @asynccontextmanager
    async def _administered(self, fault: Fault, draw: Random) -> AsyncIterator[str]:
        """Drains a worker, or changes its role."""
        async with self._admin() as admin:
            worker = await self._worker(admin, fault.target, draw)
            try:
                if fault.kind == "drain":
                    await admin.drain_worker(worker.worker, finish_seconds=0)
                else:
                    await admin.set_worker_role(worker.worker, fault.role)
                yield worker.worker
            finally:
                if fault.kind == "drain":
                    await admin.resume_worker(worker.worker)
                else:
                    await admin.set_worker_role(worker.worker, role_word(worker))

    def _admin(self) -> AdminClient:
        return AdminClient(
            self._stack.admin, token=AdminToken.read(None, os.environ), tls=self._stack.tls(None)
        )

    async def _worker(self, admin: AdminClient, target: str, draw: Random) -> pb.Worker:
        listed = (await admin.list_workers()).workers
        ready = sorted(
            (each for each in listed if each.state == pb.WORKER_STATE_READY),
            key=lambda each: each.worker,
        )
        fitting = [each for each in ready if target in ("engine", each.worker)]
        if not fitting:
            raise FaultFailed(f"no {target} is ready")
        return draw.choice(fitting)

    async def _ready(self) -> set[str]:
        """Addresses of the workers and tokenizers that are ready; none if the router does not answer."""
        with suppress(TrtmeshError):
            async with self._admin() as admin:
                listed = await admin.list_workers()
                states = [(each.address, each.state) for each in listed.workers]
                states += [(each.address, each.state) for each in listed.tokenizers]
                return {address for address, state in states if state == pb.WORKER_STATE_READY}
        return set()

    def _process(self, target: str, draw: Random) -> StackProcess:
        found = processes_of(self._stack)
        fitting = [each for each in found if target in (each.service, each.name)]
        if not fitting:
            have = ", ".join(sorted({each.name for each in found})) or "none"
            raise FaultFailed(f"the stack has no process {target}; it has {have}")
        return draw.choice(fitting)

    def _is_replaced(self, victim: StackProcess, count: int) -> bool:
        now = self._processes(victim.service)
        return victim not in now and len(now) == count

    def _processes(self, service: str) -> list[StackProcess]:
        return [each for each in processes_of(self._stack) if each.service == service]
