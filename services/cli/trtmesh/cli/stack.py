"""A local stack: starts all processes together, keeps them alive, stops them in order."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from trtmesh.chassis.addresses import port_is_taken
from trtmesh.chassis.errors import PortInUse, StartupError, TrtmeshError, Unavailable
from trtmesh.cli.child import Addresses, Child, ChildEnded, Log, while_alive
from trtmesh.cli.mesh_settings import MeshSettings
from trtmesh.cli.output import say
from trtmesh.cli.plan import LOOPBACK, Plan, ProcessPlan
from trtmesh.cli.stacks import RunningStack, network
from trtmesh.cli.starting import Tell
from trtmesh.client import AdminClient
from trtmesh.v1.router_admin_pb2 import WORKER_STATE_CONNECTING, AddAdapterRequest

FIRST_RESTART_SECONDS, LONGEST_RESTART_SECONDS = 0.5, 8.0
"""Delay of a first restart, and of the restarts after many of the last minute."""

RESTART_WINDOW_SECONDS = 60.0
RESTARTS_PER_MINUTE = 5
"""Most restarts of a process within the window: one that fails at once would keep a core busy."""

KILL_AFTER_SECONDS = 5.0
"""Time between the end of a process's grace period and SIGKILL."""

COUNT_SECONDS = 0.5
"""Longest wait for a router's count of live requests."""

PORT_USES = {
    "port": "",
    "http_port": " for HTTP",
    "metrics_port": " for metrics",
    "admin_port": " for admins",
}


class Stack:
    """Tokenizers, engines and routers. Call order: `start`, `keep_alive`, and in any case `stop`."""

    def __init__(
        self,
        settings: MeshSettings,
        plan: Plan,
        log: Log,
        tell: Tell = lambda _name, _doing: None,
    ) -> None:
        """`tell` gets the progress of the start."""
        self._tell = tell
        self.settings = settings
        self.plan = plan
        self._log = log
        self.tokenizers: list[Child] = []
        self.engines: list[Child] = []
        self.routers: list[Child] = []

    @property
    def children(self) -> list[Child]:
        return [*self.routers, *self.engines, *self.tokenizers]

    @property
    def place(self) -> RunningStack:
        """Where the stack is, for commands of this machine."""
        at, models, ca = self.router, ", ".join(self.plan.models), str(self.plan.ca or "")
        return RunningStack(at.address, at.admin_address, models, ca, network(), os.getpid())

    @property
    def router(self) -> Addresses:
        """The first router for this machine."""
        return self.routers[0].local

    async def start(self) -> None:
        """Returns when all processes serve and the routers know the others. Raises ChildEnded at the end of any."""
        try:
            async with asyncio.timeout(self.settings.start_seconds):
                await self._start()
        except TimeoutError:
            raise StartupError(
                f"is {self.settings.start_seconds:g} but the stack does not serve after this time; the logs of its"
                " processes say why",
                setting="mesh.start_seconds",
            ) from None

    async def _start(self) -> None:
        self._check_ports()
        self.tokenizers = self._children(self.plan.tokenizers())
        self.engines = self._children(self.plan.engines())
        peers = (*self.tokenizers, *self.engines)
        await while_alive(peers, _all(child.start() for child in peers))
        # While models load: a wrong setting of the routers is reported at once.
        self.routers = self._children(
            self.plan.routers(
                [child.bound.address for child in self.tokenizers],
                [child.bound.address for child in self.engines],
            )
        )
        await while_alive(peers, self._start_routers(*self.routers))
        await while_alive(self.children, self._become_ready())

    def _check_ports(self) -> None:
        """Raises PortInUse for a requested port in use, before anything loads."""
        settings = self.settings
        hosts = {"port": settings.host, "http_port": settings.host, "metrics_port": settings.host}
        hosts["admin_port"] = LOOPBACK
        for name, host in hosts.items():
            port = getattr(settings, name) if settings.asks_for(name) else None
            if port and port_is_taken(host, port):
                raise PortInUse(
                    f"is {port}, but another process listens on {host}:{port}; choose another, or 0 for a free one",
                    setting=f"mesh.{name}",
                )

    async def _start_routers(self, first: Child, *others: Child) -> None:
        await self._start_on_free_ports(first)
        await _all(child.start() for child in others)

    async def _become_ready(self) -> None:
        await _all(child.wait_serving() for child in self.children)
        await _all(self._meet_peers(child) for child in self.routers)
        await _all(self._register_adapters(child) for child in self.routers)

    async def _meet_peers(self, router: Child) -> None:
        """Returns when a router knows all tokenizers and engines, and so serves every model."""
        client = self._admin_client(router, self.settings.start_seconds)
        # An ended router is restarted or ends the command.
        with suppress(Unavailable):
            async with client as admin, aclosing(admin.watch_workers()) as lists:
                async for seen in lists:
                    states = {peer.state for peer in seen.workers}
                    states |= {peer.state for peer in seen.tokenizers}
                    if WORKER_STATE_CONNECTING not in states:
                        return

    async def _register_adapters(self, router: Child) -> None:
        """Registers the stack's adapters, unless known to the router; reports unusable adapters."""
        if not self.plan.adapters:
            return
        client = self._admin_client(router, self.settings.start_seconds)
        with suppress(Unavailable):
            async with client as admin:
                known = {adapter.name for adapter in (await admin.list_adapters()).adapters}
                for path in self.plan.adapters:
                    if path.name not in known:
                        await self._register(admin, path)

    async def _register(self, admin: AdminClient, path: Path) -> None:
        model = self.plan.first_model
        adapter = AddAdapterRequest(name=path.name, source=path.name, model=model)
        try:
            await admin.add_adapter(adapter)
        except Unavailable:
            raise
        except TrtmeshError as error:
            say(f"adapter {path} is refused, and the others serve: {error}")

    def _children(self, plans: Sequence[ProcessPlan]) -> list[Child]:
        return [Child(plan, self._log, self._tell) for plan in plans]

    async def _start_on_free_ports(self, router: Child) -> None:
        """Starts a router, on free ports in place of default ports in use."""
        self._leave_taken_ports(router)
        while True:
            try:
                return await router.start()
            except ChildEnded as error:
                if error.exit_status != PortInUse.exit_status:
                    raise
                # Another process was faster.
                if not self._leave_taken_ports(router):
                    raise

    def _leave_taken_ports(self, router: Child) -> bool:
        """Replaces default ports in use by free ports. Returns whether there were any."""
        taken = [
            name for name, port in router.ports.items() if port and self._may_leave(name, port)
        ]
        for name in taken:
            port = router.ports[name]
            say(f"port {port} is in use: the router takes a free one{PORT_USES[name]}")
            router.ports[name] = 0
        return bool(taken)

    def _may_leave(self, name: str, port: int) -> bool:
        host = LOOPBACK if name == "admin_port" else self.settings.host
        return not self.settings.asks_for(name) and port_is_taken(host, port)

    async def keep_alive(self) -> NoReturn:
        """Restarts ended processes until cancelled."""
        await _all(self._keep_alive(child) for child in self.children)
        raise AssertionError("processes are kept alive for ever")

    async def _keep_alive(self, child: Child) -> None:
        budget = RestartBudget()
        while True:
            status = await child.wait()
            delay = budget.take(time.monotonic())
            say(f"{child.name} ended with status {status}; starting it again in {delay:.1f} s")
            await asyncio.sleep(delay)
            try:
                await child.start()
                await child.wait_serving()
            except ChildEnded:
                continue
            say(f"{child.name} serves again at {child.bound.address}")
            if child in self.routers:
                await self._register_adapters(child)

    async def stop(self) -> None:
        """Stops routers, then engines, then tokenizers: each finishes while the services it needs still run."""
        if live := sum(await asyncio.gather(*map(self._count_live, self.routers))):
            what = "1 request" if live == 1 else f"{live} requests"
            say(f"waiting for {what} to finish, {self.settings.grace_seconds:g} s at most")
        for group in (self.routers, self.engines, self.tokenizers):
            await self._stop_group([child for child in group if child.running])

    async def _count_live(self, router: Child) -> int:
        """Counts the live requests of a router; 0 without an answer."""
        if not (router.running and router.served):
            return 0
        try:
            async with self._admin_client(router, COUNT_SECONDS) as admin:
                return (await admin.list_requests(limit=1)).live_requests
        except (TrtmeshError, StartupError):
            return 0

    def _admin_client(self, router: Child, timeout_seconds: float) -> AdminClient:
        return AdminClient(
            router.local.admin_address,
            token=self.plan.admin_token(),
            tls=self.plan.client_tls,
            timeout_seconds=timeout_seconds,
        )

    async def _stop_group(self, group: Sequence[Child]) -> None:
        for child in group:
            child.finish()
        try:
            async with asyncio.timeout(self.settings.grace_seconds + KILL_AFTER_SECONDS):
                await _all(child.wait() for child in group)
        except TimeoutError:
            for child in group:
                if child.running:
                    say(f"{child.name} did not end in time and is killed")
                    child.kill()
            await _all(child.wait() for child in group)

    def kill(self) -> None:
        for child in self.children:
            child.kill()


@dataclass(slots=True)
class RestartBudget:
    """Doubles the delay with each restart of the last minute and bounds their number."""

    most_per_minute: int = RESTARTS_PER_MINUTE
    _times: list[float] = field(default_factory=list)

    def take(self, now: float) -> float:
        """Books a restart and returns the seconds to wait before."""
        self._times = [time for time in self._times if time > now - RESTART_WINDOW_SECONDS]
        delay = min(FIRST_RESTART_SECONDS * 2.0 ** len(self._times), LONGEST_RESTART_SECONDS)
        if len(self._times) >= self.most_per_minute:
            oldest_that_counts = self._times[-self.most_per_minute]
            delay = max(delay, oldest_that_counts + RESTART_WINDOW_SECONDS - now)
        self._times.append(now + delay)
        return delay


async def _all(waits: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Awaits all. The first error cancels the others and is raised unchanged."""
    try:
        async with asyncio.TaskGroup() as group:
            for wait in waits:
                group.create_task(wait)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
