"""SMG, a gateway in Rust, before a simulated engine of ours. Its program comes from PyPI, once, into `.foreign/`."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from _stack import MODEL_DIR, cpu_seconds, lone_engine

# The gateway that is measured is that of the tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from gateways.smg import running

MODEL = "demo"


@dataclass(frozen=True, slots=True)
class Smg:
    """The running gateway: its address, and the CPU time of it and its engine so far."""

    url: str
    cpu_seconds: Callable[[], float]


@asynccontextmanager
async def smg(*engine_flags: str) -> AsyncIterator[Smg]:
    flags = ("--model", MODEL, "--trtllm-service", "true", *engine_flags)
    with lone_engine(*flags) as (address, pid):
        found = running(
            *("--worker-urls", f"grpc://{address}", "--model-path", str(MODEL_DIR)),
            log_level="warn",
        )
        async with found as gateway:
            pids = (pid, gateway.pid)
            yield Smg(gateway.url, lambda: sum(map(cpu_seconds, pids)))
