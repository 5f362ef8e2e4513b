"""SMG's gateway of PyPI, in an environment of its own below `.foreign/`, which is made once and kept."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from e2e.mesh import PATIENCE_SECONDS
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
PLACE = ROOT / ".foreign" / "smg"
REQUIREMENT = "smg==1.13.0"
INSTALL_SECONDS = 600.0


def program() -> str:
    """The gateway's program. Skips the test if it cannot be installed."""
    stamp = PLACE / "installed"
    if not stamp.exists() or stamp.read_text() != REQUIREMENT:
        shutil.rmtree(PLACE, ignore_errors=True)
        _install(sys.executable, "-m", "venv", str(PLACE))
        pip = (str(PLACE / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check")
        _install(*pip, "install", "--only-binary", ":all:", REQUIREMENT)
        stamp.write_text(REQUIREMENT)
    return str(PLACE / "bin" / "smg")


def _install(*command: str) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
    )
    if done.returncode:
        problem = (done.stderr or done.stdout).strip().splitlines()[-1:]
        pytest.skip(f"{' '.join(command[-2:])} failed: {' '.join(problem)}")


@dataclass
class Gateway:
    """A running gateway, called as its clients do."""

    url: str
    metrics_url: str
    session: aiohttp.ClientSession
    log: list[str]
    pid: int

    async def complete(self, prompt: str | Sequence[str], **fields: Any) -> Any:
        """The answer to a completion as a whole."""
        asked = {"model": "demo", "prompt": prompt, "temperature": 0, **fields}
        async with self.session.post(f"{self.url}/v1/completions", json=asked) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    @asynccontextmanager
    async def streaming(self, prompt: str, **fields: Any) -> AsyncIterator[AsyncIterator[Any]]:
        """The events of a completion; leaving the block disconnects."""
        asked = {"model": "demo", "prompt": prompt, "temperature": 0, "stream": True, **fields}
        async with self.session.post(f"{self.url}/v1/completions", json=asked) as response:
            assert response.status == 200, await response.text()
            yield _events(response)
            response.close()

    async def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        async with self.session.get(self.metrics_url) as response:
            families = text_string_to_metric_families(await response.text())
        samples = [sample for family in families for sample in family.samples]
        return sum(sample.value for sample in samples if sample.name == name)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    async for line in response.content:
        data = line.decode().removeprefix("data: ").strip()
        if data == "[DONE]":
            return
        if data:
            yield json.loads(data)


@asynccontextmanager
async def running(*flags: str, log_level: str = "debug") -> AsyncIterator[Gateway]:
    """Runs the gateway until it is ready; kills it on exit."""
    command = await asyncio.to_thread(program)
    port, metrics_port = _free_ports(2)
    process = await asyncio.create_subprocess_exec(
        *(command, "launch", "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-port", str(metrics_port), "--log-level", log_level, *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    log: list[str] = []
    collecting = asyncio.create_task(_collect(process, log))
    url = f"http://127.0.0.1:{port}"
    try:
        async with aiohttp.ClientSession() as session:
            try:
                await _ready(session, url, process)
            except (TimeoutError, AssertionError) as error:
                problem = str(error) or "the gateway is not ready"
                raise AssertionError(f"{problem}:\n" + "".join(log[-100:])) from None
            yield Gateway(
                url, f"http://127.0.0.1:{metrics_port}/metrics", session, log, process.pid
            )
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await collecting


async def _ready(
    session: aiohttp.ClientSession, url: str, process: asyncio.subprocess.Process
) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            assert process.returncode is None, "the gateway ended"
            with suppress(aiohttp.ClientError):
                async with session.get(f"{url}/readiness") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.1)


async def _collect(process: asyncio.subprocess.Process, log: list[str]) -> None:
    assert process.stdout
    while line := await process.stdout.readline():
        log.append(line.decode(errors="replace"))


def _free_ports(count: int) -> list[int]:
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in taken]
    for each in taken:
        each.close()
    return ports


def choices(answer: Mapping[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]
