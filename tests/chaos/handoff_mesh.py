"""A mesh for faults of handoffs: two routers, a prefill and two decode workers. The proxy in front of each worker tells
routers and receivers apart."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from chaos.dialers import dialer_of
from chaos.proxy import Link, Proxy, proxy_to
from e2e.mesh import BUSY_GAUGES, DEMO, SIMULATED, WIDE_TOKENS, lasting, scrape
from process_constants import constants
from processes import ServiceProcess, service_process
from trtmesh.client import AdminClient, Client
from trtmesh.v1 import router_admin_pb2 as admin_pb

SENDER = "sender"
RECEIVERS = ("one", "two")
ROUTERS = ("router", "other-router")
ROLES = {SENDER: "prefill", **dict.fromkeys(RECEIVERS, "decode")}

SHAPES = {
    RECEIVERS[0]: ("--simulated-kv-cache-shards", "2"),
    RECEIVERS[1]: ("--simulated-kv-cache-tokens-per-block", "16"),
}
"""Flags of workers with other shapes than the sender's 32 tokens a block and one shard."""

PROMPT_TOKENS = 500
FIRST_TOKEN, LAST_TOKEN = 8, 6143
WHOLE = 50
"""A whole character, for the end of a prompt: generated text continues one that the prompt began."""

LEASE_SECONDS = 1.0

SILENT_SECONDS = 30.0
"""Longer than an idle process takes to answer, on any machine."""

SIMULATED_WORKER = (
    *SIMULATED,
    *WIDE_TOKENS,
    # A few tokens take as long as a handoff.
    *("--simulated-timing-step-ms", "32", "--load-interval-seconds", "0.2"),
    # A prefill takes several chunks.
    *("--simulated-timing-prefill-tokens-per-step", "32"),
    *("--simulated-timing-prefill-tokens-per-second", "10000"),
    *("--simulated-kv-cache-total-blocks", "1024"),
    *("--simulated-kv-cache-token-bytes", "1024"),
)

ROUTER = (
    *("--handoff-enabled", "always", "--grace-seconds", "1"),
    *constants(lease_seconds=LEASE_SECONDS, handoff_prefill_seconds=3, handoff_transfer_seconds=1),
    # Every lost process comes back.
    *("--retries-worker-wait-seconds", "60"),
    *constants(tokenizer_wait_seconds=60, max_lost_workers=100, max_lost_tokenizers=100),
    *constants(client_unread_seconds=60, buffer_tokens=25),
)


@dataclass
class Worker:
    """A worker, its proxy, and its links."""

    name: str
    process: ServiceProcess
    proxy: Proxy
    flags: tuple[str, ...]

    @property
    def router_link(self) -> Link:
        """Connections of the first router."""
        return self.proxy.link(ROUTERS[0])

    def fetch_link(self, receiver: str) -> Link:
        """Fetches of a receiver."""
        return self.proxy.link(receiver)


class HandoffMesh:
    """Processes, links and leases; made by `handoff_mesh`."""

    def __init__(self, stack: AsyncExitStack, seed: int, transport: str) -> None:
        self.transport = transport
        """The only one of its workers; '' for several."""
        self.workers: dict[str, Worker] = {}
        self.routers: dict[str, ServiceProcess] = {}
        self.client: Client
        self.admin: AdminClient
        """Of the first router."""
        self._stack = stack
        self._names: dict[int, str] = {}
        """Of processes, the dead included."""
        self._named = asyncio.Condition()
        self._running: dict[int, AsyncExitStack] = {}
        self._draw = random.Random(seed)
        self._router_flags: tuple[str, ...] = ()

    async def start(
        self, worker_flags: Mapping[str, Sequence[str]], router_flags: Sequence[str]
    ) -> None:
        """Starts every process and waits until all are ready."""
        async with asyncio.TaskGroup() as group:
            starting = group.create_task(
                self._run("tokenizer", "tokenizer", ("--model-dir", str(DEMO)))
            )
            for name, flags in worker_flags.items():
                group.create_task(self._start_worker(name, tuple(flags)))
        tokenizer = starting.result()
        engines = ",".join(worker.proxy.address for worker in self.workers.values())
        self._router_flags = (
            *("--engines", engines, "--tokenizers", tokenizer.address),
            *ROUTER,
            *router_flags,
        )
        processes = await asyncio.gather(
            *(self._run(name, "router", self._router_flags) for name in ROUTERS)
        )
        self.routers = dict(zip(ROUTERS, processes, strict=True))
        addresses = [process.address for process in processes]
        self.client = await self._stack.enter_async_context(Client(addresses, resume_seconds=60))
        admin = AdminClient(processes[0].admin_address)
        self.admin = await self._stack.enter_async_context(admin)
        await self.settle()

    async def _start_worker(self, name: str, flags: tuple[str, ...]) -> None:
        flags = (*flags, "--worker", name)
        process = await self._run(name, "engine", flags)
        proxy = await self._stack.enter_async_context(proxy_to(process.address, self._dialer_of))
        self.workers[name] = Worker(name, process, proxy, flags)

    async def _run(
        self, name: str, service: str, flags: tuple[str, ...], port: str = "0"
    ) -> ServiceProcess:
        own = await self._stack.enter_async_context(AsyncExitStack())
        # Routers log why a handoff failed.
        level = "info" if service == "router" else "error"
        common = ("--metrics-port", "0", "--log-level", level, "--port", port)
        process = await own.enter_async_context(service_process(service, *common, *flags))
        self._running[process.pid] = own
        async with self._named:
            self._names[process.pid] = name
            self._named.notify_all()
        return process

    async def _dialer_of(self, port: int, dialed: int) -> str:
        """The process with a connection between these ports; '' for this process. It may be starting."""
        # In a thread: links must not wait, or routers find workers silent, and dial again.
        pid = await asyncio.to_thread(dialer_of, port, dialed)
        return "" if pid is None else await self._name_of(pid)

    async def _name_of(self, pid: int) -> str:
        async with self._named:
            await self._named.wait_for(lambda: pid in self._names)
        return self._names[pid]

    def processes(self) -> Iterator[tuple[str, ServiceProcess]]:
        """Workers and routers by name."""
        yield from self.routers.items()
        yield from ((worker.name, worker.process) for worker in self.workers.values())

    def process(self, name: str) -> ServiceProcess:
        return dict(self.processes())[name]

    async def restart(self, name: str) -> None:
        """Waits for the end of a killed process, and starts its successor at the same address."""
        dead = self.process(name)
        await dead.wait()
        await self._running.pop(dead.pid).aclose()
        port = dead.address.rpartition(":")[2]
        if name in self.workers:
            worker = self.workers[name]
            worker.process = await self._run(name, "engine", worker.flags, port)
            return
        admin_port = dead.admin_address.rpartition(":")[2]
        flags = (*self._router_flags, "--admin-port", admin_port)
        self.routers[name] = await self._run(name, "router", flags, port)

    def fresh_prompts(self, count: int, tokens: int = PROMPT_TOKENS) -> list[list[int]]:
        """Prompts without a common block."""
        return [
            [*(self._draw.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(tokens - 1)), WHOLE]
            for _ in range(count)
        ]

    async def handoffs(self) -> Sequence[admin_pb.Handoff]:
        """The live handoffs of the first router."""
        return (await self.admin.list_handoffs()).handoffs

    async def ended(self, worker: str, side: str, outcome: str) -> float:
        """Leases of a side, `sent` or `received`, that ended with an outcome since the start of the process."""
        samples = await scrape(self.workers[worker].process, side=side, outcome=outcome)
        return samples.get("trtmesh_engine_handoffs_total", 0.0)

    async def holds_leases(self) -> bool:
        """Whether any worker holds a lease."""
        samples = [await scrape(worker.process) for worker in self.workers.values()]
        return any(each["trtmesh_engine_held_leases"] for each in samples)

    async def settle(self) -> None:
        """Waits until every process is ready, and nothing is held anywhere; the failure names what is left."""
        left: list[str] = []

        async def settled() -> bool:
            for name, process in self.processes():
                # Others are asked once this one has nothing left.
                left[:] = await self._asked(name, process)
                if left:
                    return False
            return True

        try:
            await lasting(settled)
        except TimeoutError:
            raise AssertionError(f"still so: {left}") from None
        await self.check_conservation()

    async def _asked(self, name: str, process: ServiceProcess) -> list[str]:
        """What is left of a process, or that it does not answer."""
        try:
            async with asyncio.timeout(SILENT_SECONDS):
                return [f"{name}: {each}" for each in await self._left(process)]
        except TimeoutError:
            return [f"{name} does not answer"]

    async def _left(self, process: ServiceProcess) -> list[str]:
        samples = await scrape(process)
        if process.admin_address:
            zero = [f"trtmesh_router_{name}" for name in (*BUSY_GAUGES, "queued_items")]
            missing = len(self.workers) - samples["trtmesh_router_ready_workers"]
            left = [f"{missing:g} workers are not ready"] * (missing != 0)
            async with AdminClient(process.admin_address) as admin:
                seen = (await admin.list_handoffs()).handoffs
            # The second half of a given one may have come to another router.
            live = [each for each in seen if each.stage != "given"]
            left += [f"handoff {each.lease_id} is {each.stage}" for each in live]
        else:
            names = ("used_blocks", "live_sequences", "held_leases", "quarantined_blocks")
            zero, left = [f"trtmesh_engine_{name}" for name in names], []
        left += [f"{name} is {samples[name]:g}" for name in zero if samples[name]]
        return left

    async def check_conservation(self) -> None:
        """Of each side, granted = consumed + released + expired + held."""
        for worker in (await self.admin.list_workers()).workers:
            for side in (worker.load.sent_handoffs, worker.load.received_handoffs):
                ended = side.consumed + side.released + side.expired
                assert side.granted == ended + side.held, worker


def flags_of(name: str, role: str, transports: str) -> tuple[str, ...]:
    """The flags of a simulated worker."""
    handoff = ("--role", role, "--handoff-transports", transports, "--handoff-checksums", "all")
    return (*SIMULATED_WORKER, *SHAPES.get(name, ()), *handoff)


@asynccontextmanager
async def handoff_mesh(
    worker_flags: Mapping[str, Sequence[str]],
    router_flags: Sequence[str] = (),
    seed: int = 0,
    transport: str = "",
) -> AsyncIterator[HandoffMesh]:
    """Starts a mesh and waits until ready; kills the processes on exit."""
    async with AsyncExitStack() as stack:
        mesh = HandoffMesh(stack, seed, transport)
        await mesh.start(worker_flags, router_flags)
        yield mesh
