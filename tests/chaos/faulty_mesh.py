"""A mesh for random faults: two routers and engines, one under two addresses. Two tokenizers serve both routers, one of
which has another inside; or each router has its only one inside. A proxy is in front of each tokenizer and engine.
"""

from __future__ import annotations

import asyncio
import math
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

from chaos.proxy import Proxy, proxy_to
from e2e.mesh import BUSY_GAUGES, DEMO, INSIDE, SIMULATED, WIDE_TOKENS, eventually, scrape
from process_constants import constants
from processes import ServiceProcess, held_ports, service_process
from trtmesh.chassis.errors import DeadlineExceeded, NotFound, Unavailable
from trtmesh.client import AdminClient, Client

LONGEST_SECONDS = 1.5
"""Longest fault, longer than routers wait for a silent worker."""

BUSY = {
    "router": tuple(f"trtmesh_router_{name}" for name in (*BUSY_GAUGES, "queued_items")),
    "engine": tuple(
        f"trtmesh_engine_{name}"
        for name in ("used_blocks", "live_sequences", "held_leases", "quarantined_blocks")
    ),
    "tokenizer": ("trtmesh_tokenizer_open_decode_states",),
}
"""Gauges of resources in use, by service."""

READY = ("trtmesh_router_ready_workers", "trtmesh_router_ready_tokenizers")

ENGINE = (
    *(*SIMULATED, *WIDE_TOKENS, "--simulated-vocabulary-end-probability", "0.004"),
    # Few tokens take as long as a fault.
    *("--simulated-timing-step-ms", "16"),
)


@dataclass(frozen=True)
class Shape:
    """What a mesh consists of beside its routers."""

    roles: tuple[str, ...]
    """Of the engines."""
    tokenizers: int = 2


MIXED = Shape(("mixed", "mixed"))
SPLIT = Shape(("prefill", "decode", "decode"))
INSIDE_ALONE = Shape(MIXED.roles, tokenizers=0)

ROUTER = (
    # Every lost process comes back.
    *("--retries-worker-wait-seconds", "60"),
    *constants(tokenizer_wait_seconds=60, max_lost_workers=100, max_lost_tokenizers=100),
    # With roles, the KV of every prompt moves.
    *("--handoff-enabled", "always", "--grace-seconds", "1"),
    *("--hedge-share", "0.5"),
    *constants(lease_seconds=1, handoff_prefill_seconds=3, handoff_transfer_seconds=2),
)


@dataclass
class Peer:
    """A place in the mesh: the current process, whose successors take the same address."""

    service: str
    flags: tuple[str, ...]
    process: ServiceProcess
    proxies: list[Proxy] = field(default_factory=list)
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a fault lasts."""
    most_tasks: float = math.inf
    """Tasks of the idle process."""
    env: Mapping[str, str] | None = None
    policy: str = ""
    """Set where an admin changed the policy of a router."""

    @property
    def address(self) -> str:
        return self.process.address

    @property
    def has_tokenizer(self) -> bool:
        """Whether it is a router with a tokenizer inside."""
        return any(each.split(",")[0] == "local" for each in self.flags)

    def mend(self) -> None:
        for proxy in self.proxies:
            proxy.mend()


class FaultyMesh:
    """Processes and their faults; made by `faulty_mesh`."""

    def __init__(self, stack: AsyncExitStack, shape: Shape) -> None:
        self._processes: dict[int, AsyncExitStack] = {}
        self._stack = stack
        self._shape = shape
        self.engines: list[Peer] = []
        self.tokenizers: list[Peer] = []
        self.routers: list[Peer] = []
        self._routers_lock = asyncio.Lock()
        """Keeps at least one router alive."""
        self.faults: Mapping[str, Callable[[random.Random], Awaitable[None]]] = {
            "kill an engine": self._kill_engine,
            "freeze an engine": self._freeze_engine,
            "drain an engine": self._drain_engine,
            "drain an engine by an admin": self._drain_by_admin,
            **({"change a role": self._change_role} if shape is SPLIT else {}),
            **(self._tokenizer_faults() if shape.tokenizers else {}),
            "kill a router": self._kill_router,
            "drain a router": self._drain_router,
            "delay a link": self._delay,
            "silence a link": self._silence,
            "cut a link": self._cut,
            "half close a link": self._half_close,
        }

    def _tokenizer_faults(self) -> Mapping[str, Callable[[random.Random], Awaitable[None]]]:
        return {
            "kill a tokenizer": self._kill_tokenizer,
            "freeze a tokenizer": self._freeze_tokenizer,
            "drain a tokenizer": self._drain_tokenizer,
        }

    @property
    def peers(self) -> list[Peer]:
        return [*self.engines, *self.tokenizers, *self.routers]

    async def start(self) -> None:
        """Starts every process and waits until all are ready."""
        tokenizer = ("--model-dir", str(DEMO))
        started = [
            self._start("engine", (*ENGINE, "--worker", f"engine-{number}", "--role", role))
            for number, role in enumerate(self._shape.roles)
        ]
        started += [self._start("tokenizer", tokenizer) for _ in range(self._shape.tokenizers)]
        peers = await asyncio.gather(*started)
        count = len(self._shape.roles)
        self.engines, self.tokenizers = peers[:count], peers[count:]
        for peer in (*peers, self.engines[0]):
            proxy = await self._stack.enter_async_context(proxy_to(peer.address))
            peer.proxies.append(proxy)
        beside, engines = _addresses(self.tokenizers), _addresses(self.engines)
        self.routers = await asyncio.gather(
            *(
                self._start("router", (*ROUTER, "--engines", engines, "--tokenizers", each), INSIDE)
                for each in ((beside, f"local,{beside}") if beside else ("local", "local"))
            )
        )
        await self.settle()
        # The first call builds caches.
        for router in self.routers:
            async with Client(router.address) as client:
                await client.complete(["the first"], max_tokens=2)
        await self.settle()
        for peer in self.peers:
            tasks = (await scrape(peer.process))["trtmesh_tasks"]
            # gRPC keeps another task for a tokenizer's stream until its first message.
            peer.most_tasks = tasks + len(self.tokenizers)

    def client(self, first: int) -> Client:
        """A client with the given router first."""
        addresses = [router.address for router in self.routers]
        return Client([*addresses[first:], *addresses[:first]], resume_seconds=60)

    async def set_policies(self, policies: Sequence[str]) -> None:
        """Sets the placement policy of each router and of its successors."""
        for router, policy in zip(self.routers, policies, strict=True):
            async with AdminClient(router.process.admin_address) as admin:
                await admin.set_policy(policy)
            router.policy = policy

    async def settle(self) -> None:
        """Waits until every process is ready and idle, tasks included; the failure names the remaining resources."""
        left: list[str] = []

        async def settled() -> bool:
            left[:] = [word for peer in self.peers for word in await self._left(peer)]
            return not left

        try:
            await eventually(settled)
        except TimeoutError:
            raise AssertionError(f"still so: {left}") from None

    async def _left(self, peer: Peer) -> list[str]:
        samples = await scrape(peer.process)
        gauges = (*BUSY[peer.service], *(BUSY["tokenizer"] if peer.has_tokenizer else ()))
        busy = [name for name in gauges if samples[name]]
        if samples["trtmesh_tasks"] > peer.most_tasks:
            busy.append("trtmesh_tasks")
        if peer.service == "router":
            # A second address of an engine is no second worker.
            links = (len(self.engines), len(self.tokenizers) + peer.has_tokenizer)
            busy += [
                name for name, count in zip(READY, links, strict=True) if samples[name] != count
            ]
        return [f"{name} of {peer.service} {peer.address} is {samples[name]:g}" for name in busy]

    async def suffer(self, name: str, draw: random.Random) -> None:
        """Causes a fault and repairs it."""
        await self.faults[name](draw)

    async def _start(
        self, service: str, flags: tuple[str, ...], env: Mapping[str, str] | None = None
    ) -> Peer:
        return Peer(service, flags, await self._run(service, flags, 0, env), env=env)

    async def _run(
        self, service: str, flags: tuple[str, ...], port: int, env: Mapping[str, str] | None
    ) -> ServiceProcess:
        own = await self._stack.enter_async_context(AsyncExitStack())
        common = ("--metrics-port", "0", "--log-level", "error", "--port", str(port))
        process = await own.enter_async_context(service_process(service, *common, *flags, env=env))
        self._processes[process.pid] = own
        return process

    async def _replace(self, peer: Peer, number: signal.Signals, seconds: float) -> None:
        """Ends a process and, after a pause, starts a successor at its address."""
        peer.process.signal(number)
        await peer.process.wait()
        await self._processes.pop(peer.process.pid).aclose()
        port = int(peer.address.rpartition(":")[2])
        with held_ports(("--port", str(port))):
            await asyncio.sleep(seconds)
        flags = (*peer.flags, "--placement-policy", peer.policy) if peer.policy else peer.flags
        peer.process = await self._run(peer.service, flags, port, peer.env)

    async def _kill_engine(self, draw: random.Random) -> None:
        await self._end_one(self.engines, signal.SIGKILL, draw)

    async def _kill_tokenizer(self, draw: random.Random) -> None:
        await self._end_one(self.tokenizers, signal.SIGKILL, draw)

    async def _drain_engine(self, draw: random.Random) -> None:
        await self._end_one(self.engines, signal.SIGTERM, draw)

    async def _drain_by_admin(self, draw: random.Random) -> None:
        """Drains an engine through one router, then resumes it through any: the drain outlives its router."""
        router, engine = draw.choice(self.routers), draw.choice(self.engines)
        seconds, proxy = draw.uniform(0, LONGEST_SECONDS / 2), draw.choice(engine.proxies)
        async with AdminClient(router.process.admin_address) as admin:
            with suppress(Unavailable, DeadlineExceeded, NotFound):
                await admin.drain_worker(proxy.address, finish_seconds=seconds)
                await asyncio.sleep(seconds)
        await eventually(lambda: self._resumed(engine))

    async def _resumed(self, engine: Peer) -> bool:
        """Resumes an engine through every router that answers; whether one did."""
        done = False
        for router in self.routers:
            with suppress(Unavailable, DeadlineExceeded, NotFound):
                async with AdminClient(router.process.admin_address) as admin:
                    for proxy in engine.proxies:
                        await admin.resume_worker(proxy.address)
                done = True
        return done

    async def _change_role(self, draw: random.Random) -> None:
        """Gives an engine another role for a while. An engine that restarts has its first role."""
        router, number = draw.choice(self.routers), draw.randrange(len(self.engines))
        seconds, proxy = draw.uniform(0, LONGEST_SECONDS), self.engines[number].proxies[0]
        async with AdminClient(router.process.admin_address) as admin:
            with suppress(Unavailable, DeadlineExceeded, NotFound):
                await admin.set_worker_role(proxy.address, draw.choice(["prefill", "decode"]))
                await asyncio.sleep(seconds)
            with suppress(Unavailable, DeadlineExceeded, NotFound):
                await admin.set_worker_role(proxy.address, self._shape.roles[number])

    async def _drain_tokenizer(self, draw: random.Random) -> None:
        await self._end_one(self.tokenizers, signal.SIGTERM, draw)

    async def _kill_router(self, draw: random.Random) -> None:
        await self._end_router(signal.SIGKILL, draw)

    async def _drain_router(self, draw: random.Random) -> None:
        await self._end_router(signal.SIGTERM, draw)

    async def _end_one(
        self, peers: list[Peer], number: signal.Signals, draw: random.Random
    ) -> None:
        peer, seconds = draw.choice(peers), draw.uniform(0, LONGEST_SECONDS)
        async with peer.busy:
            await self._replace(peer, number, seconds)

    async def _end_router(self, number: signal.Signals, draw: random.Random) -> None:
        peer, seconds = draw.choice(self.routers), draw.uniform(0, LONGEST_SECONDS)
        async with self._routers_lock:
            await self._replace(peer, number, seconds)
            await eventually(lambda: _serves(peer))

    async def _freeze_engine(self, draw: random.Random) -> None:
        await self._freeze(draw.choice(self.engines), draw)

    async def _freeze_tokenizer(self, draw: random.Random) -> None:
        await self._freeze(draw.choice(self.tokenizers), draw)

    async def _freeze(self, peer: Peer, draw: random.Random) -> None:
        seconds = draw.uniform(0, LONGEST_SECONDS)
        async with peer.busy:
            peer.process.signal(signal.SIGSTOP)
            await asyncio.sleep(seconds)
            peer.process.signal(signal.SIGCONT)

    async def _delay(self, draw: random.Random) -> None:
        seconds = draw.uniform(0, 0.1)
        await self._disturb(draw, lambda proxy: proxy.delay(seconds))

    async def _silence(self, draw: random.Random) -> None:
        to_target, from_target = draw.choice([(True, True), (True, False), (False, True)])
        await self._disturb(
            draw, lambda proxy: proxy.freeze(to_target=to_target, from_target=from_target)
        )

    async def _cut(self, draw: random.Random) -> None:
        await self._disturb(draw, lambda proxy: proxy.cut())

    async def _half_close(self, draw: random.Random) -> None:
        to_target = draw.random() < 0.5
        await self._disturb(draw, lambda proxy: proxy.half_close(to_target=to_target))

    async def _disturb(self, draw: random.Random, disturb: Callable[[Proxy], None]) -> None:
        """Disturbs one address of a process; a second address stays healthy."""
        peer = draw.choice([*self.engines, *self.tokenizers])
        proxy, seconds = draw.choice(peer.proxies), draw.uniform(0, LONGEST_SECONDS)
        async with peer.busy:
            disturb(proxy)
            await asyncio.sleep(seconds)
            peer.mend()


async def _serves(router: Peer) -> bool:
    samples = await scrape(router.process)
    return all(samples[name] for name in READY)


def _addresses(peers: list[Peer]) -> str:
    return ",".join(proxy.address for peer in peers for proxy in peer.proxies)


@asynccontextmanager
async def faulty_mesh(shape: Shape) -> AsyncIterator[FaultyMesh]:
    """Starts a mesh and waits until ready; kills the processes on exit."""
    async with AsyncExitStack() as stack:
        mesh = FaultyMesh(stack, shape)
        await mesh.start()
        yield mesh
