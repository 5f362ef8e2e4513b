"""The service processes that a benchmark measures, and the CPU that each of them used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

MODEL_DIR = Path(__file__).parent.parent / "models" / "demo"
READY_SECONDS = 120.0
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Stack:
    """A running mesh: the router's address and the process id of each service."""

    address: str
    pids: Mapping[str, int]

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time, user and system, that each service has used, by the operating system's accounting."""
        return {name: _cpu_seconds(pid) for name, pid in self.pids.items()}


def _cpu_seconds(pid: int) -> float:
    # The name, field 2, may hold spaces; fields 14 and 15 count ticks in user and system mode.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


@contextmanager
def stack(*engine_flags: str, backend: str = "simulated") -> Iterator[Stack]:
    """One tokenizer, one engine and one router on free ports; ended on the way out."""
    children: list[subprocess.Popen[str]] = []
    try:
        tokenizer = _start(children, "tokenizer", "--model-dir", str(MODEL_DIR))
        engine = _start(children, "engine", "--backend", backend, *engine_flags)
        router = _start(children, "router", "--port", "0", "--engines", engine["address"],
                        "--tokenizers", tokenizer["address"])  # fmt: skip
        _wait_until_serving(router["address"])
        pids = {"router": router["pid"], "tokenizer": tokenizer["pid"], "engine": engine["pid"]}
        yield Stack(router["address"], pids)
    finally:
        for child in children:
            child.terminate()
        for child in children:
            try:
                child.wait(timeout=10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _start(children: list[subprocess.Popen[str]], service: str, *flags: str) -> dict[str, object]:
    """Starts a service and gives the announcement that it prints when it listens."""
    command = [sys.executable, "-m", f"trtmesh.{service}", "--log-level", "warning", *flags]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    children.append(child)
    line = child.stdout.readline() if child.stdout else ""
    if not line:
        raise SystemExit(f"the {service} did not start (exit status {child.wait()})")
    announcement: dict[str, object] = json.loads(line)
    return announcement


def _wait_until_serving(address: str) -> None:
    deadline = time.monotonic() + READY_SECONDS
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for response in health.Watch(health_pb2.HealthCheckRequest(), timeout=READY_SECONDS):
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                return
            if time.monotonic() > deadline:
                break
    raise SystemExit("the router was not ready in time")
