"""The service processes under measurement and their CPU time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NotRequired, TypeAlias, TypedDict
from urllib.request import urlopen

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from trtmesh.chassis.tls.client import ClientTls
from trtmesh.cli.temporary_ca import TemporaryCa

MODEL_DIR = Path(__file__).parent.parent / "models" / "demo"
READY_SECONDS = 600.0
NOTHING: Mapping[str, str] = MappingProxyType({})

Shape: TypeAlias = Literal["three processes", "local tokenizer", "one process"]


@dataclass(frozen=True, slots=True)
class Stack:
    """A running mesh: the router's address and the process id of each service."""

    address: str
    pids: Mapping[str, int]
    engine_metrics_port: int | None = None
    engine_address: str = ""
    http_address: str = ""
    router_metrics_port: int | None = None

    def cpu_seconds(self) -> dict[str, float]:
        """User and system CPU time of each service, by the operating system's accounting."""
        return {name: cpu_seconds(pid) for name, pid in self.pids.items()}


def cpu_seconds(pid: int) -> float:
    """The time of all threads: /proc/PID/stat has it in ticks of 10 ms, and this in nanoseconds."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def renderers_of(tokenizer: int) -> list[int]:
    """The processes in which a tokenizer renders templates, by its process id."""
    children = Path(f"/proc/{tokenizer}/task").glob("*/children")
    return [int(pid) for each in children for pid in each.read_text().split()]


@contextmanager
def stack(
    *engine_flags: str,
    backend: str = "simulated",
    model_dir: Path = MODEL_DIR,
    tls: TemporaryCa | None = None,
    python: str = sys.executable,
    shape: Shape = "three processes",
    http_port: str = "none",
    env: Mapping[str, str] = NOTHING,
) -> Iterator[Stack]:
    """Runs one tokenizer, one engine and one router on free ports until the block ends. `model_dir` is the tokenizer's,
    `tls` is for the router's clients; `python` may be that of another tree; `env` is added to the variables."""
    of_engine = ("--backend", backend, *engine_flags)
    of_router = ("--port", "0", "--admin-port", "0", "--http-port", http_port,
                 *(tls.server_flags if tls else ()))  # fmt: skip
    inside = {
        **env,
        "TRTMESH_ROUTER_TOKENIZERS": "local",
        "TRTMESH_TOKENIZER_MODEL_DIR": str(model_dir),
    }
    with _ended() as children:
        start = partial(_start, children, python=python, env=env)
        if shape == "one process":
            names = (f"TRTMESH_ENGINE_{f[2:].replace('-', '_').upper()}" for f in of_engine[::2])
            inside |= dict(zip(names, of_engine[1::2], strict=True))
            router = start("cli.one_process", *of_router, "--engines", "", env=inside)
            wait_until_serving(router["address"], tls.client if tls else None)
            yield Stack(router["address"], {"all": router["pid"]})
            return
        engine = start("engine", "--port", "0", *of_engine)
        of_router += ("--engines", engine["address"])
        if shape == "local tokenizer":
            router = start("router", *of_router, env=inside)
            pids = {"router": router["pid"], "engine": engine["pid"]}
        else:
            tokenizer = start("tokenizer", "--port", "0", "--model-dir", str(model_dir))
            router = start("router", *of_router, "--tokenizers", tokenizer["address"])
            pids = {"router": router["pid"], "tokenizer": tokenizer["pid"], "engine": engine["pid"]}
        wait_until_serving(router["address"], tls.client if tls else None)
        http_address = router.get("http_address", "")
        yield Stack(
            router["address"], pids, engine["metrics_port"], engine["address"], http_address
        )


@contextmanager
def lone_engine(*flags: str) -> Iterator[tuple[str, int]]:
    """Runs a simulated engine until the block ends: its address and process id."""
    with _ended() as children:
        engine = _start(children, "engine", "--port", "0", "--backend", "simulated", *flags)
        yield engine["address"], engine["pid"]


@contextmanager
def simulated_fleet(workers: int, *flags: str) -> Iterator[tuple[str, int]]:
    """Runs the workers of `_simulated_fleet.py` until the block ends: a router's --engines, and their process id."""
    script = str(Path(__file__).with_name("_simulated_fleet.py"))
    with _ended() as children:
        line = _first_line(children, "fleet", [sys.executable, script, str(workers), *flags])
        yield ",".join(json.loads(line)), children[0].pid


@contextmanager
def routers(
    engines: str, *flags: str, count: int = 1, ready: int = 0, tokenizer: bool = False
) -> Iterator[list[Announcement]]:
    """Runs routers over the same workers until the block ends, `ready` of which must be so, and a tokenizer if asked
    for, which comes last."""
    given = ("--port", "0", "--admin-port", "0", "--http-port", "none", "--metrics-port", "0")
    flags += ("--engines", engines)
    with _ended() as children:
        last = []
        if tokenizer:
            last = [_start(children, "tokenizer", "--port", "0", "--model-dir", str(MODEL_DIR))]
            flags += ("--tokenizers", last[0]["address"])
        started = [_start(children, "router", *given, *flags) for _ in range(count)]
        for each in started:
            wait_until_serving(each["address"])
            deadline = time.monotonic() + READY_SECONDS
            while samples(each["metrics_port"])["trtmesh_router_ready_workers"] < ready:
                if time.monotonic() > deadline:
                    raise SystemExit("the router did not reach all workers in time")
                time.sleep(0.1)
        yield [*started, *last]


def samples(metrics_port: int | None) -> dict[str, float]:
    """The metrics of a process by name; a histogram's by name and bound, those with a reason by name and reason."""
    with urlopen(f"http://127.0.0.1:{metrics_port}/metrics") as response:
        text = response.read().decode()
    return {
        sample.name + sample.labels.get("le", "") + sample.labels.get("reason", ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@dataclass(frozen=True, slots=True)
class Fleet:
    """A running mesh of several engines: the router's address, and the port with metrics of each service."""

    address: str
    router_metrics_port: int
    engine_metrics_ports: tuple[int, ...]
    engine_pids: tuple[int, ...] = ()


@contextmanager
def fleet(engines: Sequence[Sequence[str]], *router_flags: str) -> Iterator[Fleet]:
    """Runs one tokenizer, one router, and an engine for each list of flags, until the block ends."""
    with _ended() as children:
        tokenizer = _start(children, "tokenizer", "--port", "0", "--model-dir", str(MODEL_DIR))
        started = [
            _start(children, "engine", "--port", "0", "--metrics-port", "0", *flags)
            for flags in engines
        ]
        addresses = ",".join(engine["address"] for engine in started)
        router = _start(children, "router", "--port", "0", "--admin-port", "0", "--http-port", "none",
                        "--metrics-port", "0", "--engines", addresses,
                        "--tokenizers", tokenizer["address"], *router_flags)  # fmt: skip
        wait_until_serving(router["address"])
        ports = [each["metrics_port"] for each in (router, *started)]
        of_engines = tuple(port or 0 for port in ports[1:])
        pids = tuple(engine["pid"] for engine in started)
        yield Fleet(router["address"], ports[0] or 0, of_engines, pids)


@contextmanager
def echo_server() -> Iterator[Stack]:
    """Runs the server of `trtmesh bench` that does nothing but answer in place of a router: a prompt is the number of
    tokens, and the milliseconds between two."""
    with _ended() as children:
        command = [sys.executable, "-m", "trtmesh.tools.bench.echo_server", "grpc"]
        address = _first_line(children, "echo server", command).strip()
        yield Stack(address, {"router": children[0].pid})


@contextmanager
def _ended() -> Iterator[list[subprocess.Popen[str]]]:
    """Ends the processes in the list after the block."""
    children: list[subprocess.Popen[str]] = []
    try:
        yield children
    finally:
        for child in children:
            child.terminate()
        for child in children:
            try:
                child.wait(timeout=10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


class Announcement(TypedDict):
    """The line a service prints when it listens."""

    address: str
    metrics_port: int | None
    pid: int
    http_address: NotRequired[str]
    admin_address: NotRequired[str]


def _start(
    children: list[subprocess.Popen[str]],
    service: str,
    *flags: str,
    python: str = sys.executable,
    env: Mapping[str, str] | None = None,
) -> Announcement:
    """Starts a service and returns its announcement."""
    arguments = [python, "-m", f"trtmesh.{service}", "--log-level", "warning", *flags]
    announcement: Announcement = json.loads(_first_line(children, service, arguments, env))
    return announcement


def _first_line(
    children: list[subprocess.Popen[str]],
    name: str,
    arguments: list[str],
    env: Mapping[str, str] | None = None,
) -> str:
    given = {**os.environ, **(env or {})}
    pipe = subprocess.PIPE
    child = subprocess.Popen(arguments, stdin=pipe, stdout=pipe, text=True, env=given)
    children.append(child)
    line = child.stdout.readline() if child.stdout else ""
    if not line:
        raise SystemExit(f"the {name} did not start (exit status {child.wait()})")
    return line


def wait_until_serving(address: str, tls: ClientTls | None = None) -> None:
    deadline = time.monotonic() + READY_SECONDS
    with (
        grpc.secure_channel(address, tls.credentials(), tls.channel_options())
        if tls
        else grpc.insecure_channel(address)
    ) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        # Its own deadline is an error.
        with suppress(grpc.RpcError):
            for response in health.Watch(health_pb2.HealthCheckRequest(), timeout=READY_SECONDS):
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                if time.monotonic() > deadline:
                    break
    raise SystemExit("the router was not ready in time")
