"""A mesh under load with everything that an operator may meet, and a Prometheus that scrapes it each second."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from certificates import DAY, Authority
from deploy.monitoring_files import ALERTS_FILE, PROMETHEUS
from deploy.stack import free_port
from e2e.mesh import SIMULATED, Mesh, eventually, running_mesh
from process_constants import constants
from processes import ServiceProcess
from router.adapters.contents_of import content
from trtmesh.chassis.errors import TrtmeshError
from trtmesh.client import Client, ClientTls, chat_item
from trtmesh.v1 import router_admin_pb2 as admin_pb

ADAPTERS = ("a", "b", "c")

ENGINE = (
    *SIMULATED,
    # Two of three adapters fit.
    *("--simulated-adapters-slots", "2", "--simulated-adapters-host-adapters", "2"),
    *("--simulated-timing-prefill-tokens-per-second", "20000"),
    *("--simulated-kv-cache-total-blocks", "600"),
)
ENGINES = {"prefill": "prefill", "decode-1": "decode", "decode-2": "decode", "mixed": "mixed"}
ROUTER = (
    *("--handoff-enabled", "always", "--grace-seconds", "1"),
    *constants(lease_seconds=2),
    *("--retries-worker-wait-seconds", "60"),
    *("--rate-limit-max-priority", "0"),
)
FAILS = ("--simulated-faults-fail-item", "3")

SECURE = "router-2"
"""The router with TLS."""

LONG = list(range(100, 2100))
HELLO = ({"role": "user", "content": "Hello"},)


class Prometheus:
    """A Prometheus over HTTP."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def ask(self, path: str, **asked: object) -> Any:
        """The data of an answer of the API."""
        query = urllib.parse.urlencode(asked)
        return (await asyncio.to_thread(_read, f"{self.url}/api/v1/{path}?{query}"))["data"]

    async def values(self, expression: str, seconds: float) -> Sequence[Mapping[str, Any]]:
        """The series of an expression in the last seconds, a value each second."""
        now = (await self.ask("query", query="time()"))["result"][0]
        asked = {"start": now - seconds, "end": now, "step": 1}
        result: Sequence[Mapping[str, Any]] = (
            await self.ask("query_range", query=expression, **asked)
        )["result"]
        return result


def _read(url: str) -> Any:
    with urllib.request.urlopen(url) as response:
        return json.load(response)


@asynccontextmanager
async def prometheus(
    directory: Path, jobs: Mapping[str, Mapping[str, ServiceProcess]], secure: str, ca: Path
) -> AsyncIterator[Prometheus]:
    """Runs Prometheus with the shipped rules over processes by job and name; the one named `secure` has TLS."""
    scraped = {
        name: {
            "targets": [f"127.0.0.1:{process.metrics_port}"],
            "labels": {"job": job, "instance": name},
        }
        for job, processes in jobs.items()
        for name, process in processes.items()
    }
    over_tls = scraped.pop(secure)
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS_FILE)],
        "scrape_configs": [
            {"job_name": "plain", "static_configs": [*scraped.values()]},
            {
                "job_name": "secure",
                "scheme": "https",
                "tls_config": {"ca_file": str(ca)},
                "static_configs": [over_tls],
            },
        ],
    }
    file, log = directory / "prometheus.yml", directory / "prometheus.log"
    file.write_text(yaml.safe_dump(config), "utf-8")
    address = f"127.0.0.1:{free_port()}"
    assert PROMETHEUS.path
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            PROMETHEUS.path,
            f"--config.file={file}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address={address}",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    running = Prometheus(f"http://{address}")

    async def ready() -> bool:
        assert process.returncode is None, log.read_text("utf-8")
        with suppress(urllib.error.URLError):
            await running.ask("query", query="1")
            return True
        return False

    try:
        await eventually(ready)
        yield running
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


class MonitoredMesh:
    """Two routers, one of them with TLS, a tokenizer, and engines of every role."""

    def __init__(self, mesh: Mesh, directory: Path) -> None:
        self.mesh = mesh
        self.engines: dict[str, ServiceProcess] = {}
        self.second: ServiceProcess
        self.second_client: Client
        self.authority = Authority(directory / "tls")

    async def start(self, stack: AsyncExitStack) -> None:
        mesh = self.mesh
        await asyncio.gather(mesh.start_tokenizer(), *map(self._start_engine, ENGINES))
        await mesh.start_router(*ROUTER)
        # A certificate that ends soon.
        own = self.authority.issue("router", valid=10 * DAY)
        addresses = (
            *("--engines", ",".join(engine.address for engine in mesh.engines)),
            *("--tokenizers", mesh.tokenizers[0].address),
        )
        tls = ("--tls-certificate", str(own.certificate), "--tls-key", str(own.key))
        self.second = await mesh.start("router", "--port", "0", *addresses, *ROUTER, *tls)
        client = Client(self.second.address, tls=ClientTls(self.authority.ca))
        self.second_client = await stack.enter_async_context(client)
        await mesh.ready(len(ENGINES), 1)
        for name in ADAPTERS:
            await mesh.admin.upload_adapter(
                admin_pb.AddAdapterRequest(name=name), content(name.encode())
            )

    async def _start_engine(self, name: str, port: int = 0, metrics_port: int | None = 0) -> None:
        flags = ("--worker", name, "--role", ENGINES[name], "--metrics-port", str(metrics_port))
        more = FAILS if name == "mixed" else ()
        self.engines[name] = await self.mesh.start_engine(*ENGINE, *flags, *more, port=port)

    async def replace(self, name: str) -> None:
        """Kills an engine; another takes its place."""
        engine = self.engines[name]
        engine.signal(signal.SIGKILL)
        await engine.wait()
        port = int(engine.address.rpartition(":")[2])
        await self._start_engine(name, port, engine.metrics_port)

    async def drain(self, name: str) -> None:
        """Drains an engine until its sequences have moved, and has it work again."""
        await self.mesh.admin.drain_worker(name, finish_seconds=0)
        await self.mesh.admin.resume_worker(name)

    def jobs(self) -> Mapping[str, Mapping[str, ServiceProcess]]:
        """The processes by service and name."""
        (tokenizer,) = self.mesh.tokenizers
        return {
            "router": {"router-1": self.mesh.router, SECURE: self.second},
            "tokenizer": {"tokenizer": tokenizer},
            "engine": self.engines,
        }


PAUSE_SECONDS = 0.1
"""Between two requests: more of them would show nothing else."""


async def repeat(request: Callable[[int], Awaitable[object]]) -> None:
    """Sends requests one after the other; errors are part of the load."""
    number = 0
    while True:
        with suppress(TrtmeshError):
            await request(number)
        number += 1
        await asyncio.sleep(PAUSE_SECONDS)


def load(monitored: MonitoredMesh) -> Sequence[Callable[[int], Awaitable[object]]]:
    """What clients do, each of them all the time."""
    one, two = monitored.mesh.client, monitored.second_client

    async def cancelled(_: int) -> None:
        stream = one.generate([[1, 2, 3]], max_tokens=5000)
        async for _event in stream:
            break
        await stream.aclose()

    return (
        *(
            lambda n, c=c: c.complete([f"def f{n}(", "class A:"], max_tokens=100)
            for c in (one, two, one)
        ),
        lambda n: one.complete([[*LONG[: 1500 + n % 50]]], max_tokens=40),
        lambda n: two.complete([[*LONG[: 1500 + n % 50]]], max_tokens=300),
        lambda n: one.complete(
            ["import "], max_tokens=30, adapter=ADAPTERS[n // 4 % len(ADAPTERS)]
        ),
        lambda _: one.complete(["import "], max_tokens=5, adapter="unknown"),
        # The tokenizer takes no templates of strangers.
        lambda _: one.complete([chat_item(HELLO, template="{{ 1 }}")], max_tokens=5),
        lambda _: one.complete(["import "], max_tokens=5, priority=1),
        cancelled,
    )


async def disturb(monitored: MonitoredMesh) -> None:
    """Faults and changes of the fleet, again and again."""
    while True:
        await monitored.replace("decode-1")
        await monitored.mesh.ready(len(ENGINES), 1)
        await monitored.drain("decode-2")
        await monitored.replace("prefill")
        await monitored.mesh.ready(len(ENGINES), 1)


@asynccontextmanager
async def monitored_mesh(directory: Path) -> AsyncIterator[tuple[MonitoredMesh, Prometheus]]:
    """Starts everything, with load and faults until the end."""
    async with AsyncExitStack() as stack:
        started: list[MonitoredMesh] = []

        async def start(mesh: Mesh) -> None:
            monitored = MonitoredMesh(mesh, directory)
            await monitored.start(stack)
            started.append(monitored)

        await stack.enter_async_context(running_mesh(start=start))
        (monitored,) = started
        watching = await stack.enter_async_context(
            prometheus(directory, monitored.jobs(), SECURE, monitored.authority.ca)
        )
        tasks = [asyncio.create_task(repeat(each)) for each in load(monitored)]
        tasks.append(asyncio.create_task(disturb(monitored)))
        try:
            yield monitored, watching
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
