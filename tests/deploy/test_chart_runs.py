"""The chart's default values as processes: each runs its pod's arguments, and the release's own test passes."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from cli.commands import trtmesh
from deploy.chart import EXAMPLES, Pod, config_of, of_kind, pods, render, services
from e2e.mesh import (
    DEMO,
    ENDLESS,
    INSIDE,
    PATIENT,
    SIMULATED,
    Mesh,
    eventually,
    page_of,
    running_mesh,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc
from processes import ServiceProcess, service_process

pytestmark = pytest.mark.asyncio(loop_scope="module")

SERVING = health_pb2.HealthCheckResponse.SERVING


@dataclass
class Release:
    """The processes of a release on the loopback, by component."""

    pods: dict[str, Pod]
    processes: dict[str, ServiceProcess]


def flags_of(pod: Pod, directory: Path, addresses: dict[str, str]) -> list[str]:
    """A pod's arguments, where files are of this machine and ports are free ones."""
    config = directory / f"{pod.component}.yaml"
    config.write_text(config_of(pod, render({})), "utf-8")
    replaced = {
        "--config": str(config),
        "--host": "127.0.0.1",
        "--model-dir": str(DEMO),
        **dict.fromkeys(("--port", "--http-port", "--metrics-port", "--admin-port"), "0"),
        "--engines": addresses.get("engine", ""),
        "--tokenizers": addresses.get("tokenizer", ""),
    }
    split = [word.split("=", 1) for word in pod.flags]
    return [word for name, value in split for word in (name, replaced.get(name, value))]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def release(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Release]:
    directory = tmp_path_factory.mktemp("release")
    running = Release({pod.component: pod for pod in services(render({}))}, {})
    addresses: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        for component in ("tokenizer", "engine", "router"):
            flags = flags_of(running.pods[component], directory, addresses)
            process = await stack.enter_async_context(service_process(component, *flags))
            running.processes[component] = process
            addresses[component] = process.address
        yield running


async def passes(pod: Pod, when: str, process: ServiceProcess) -> bool:
    """Asks what a probe asks, as the kubelet does: without TLS."""
    probe = pod.container[f"{when}Probe"]["grpc"]
    async with grpc.aio.insecure_channel(process.address) as channel:
        request = health_pb2.HealthCheckRequest(service=probe.get("service", ""))
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == SERVING)


async def test_the_release_answers_its_own_test(release: Release) -> None:
    router = release.processes["router"]
    await eventually(lambda: passes(release.pods["router"], "readiness", router))
    (test,) = [pod for pod in pods(render({})) if pod.component == "test"]
    _, _, _, command = test.container["command"]
    told = [
        re.sub(r"^--router=.*", f"--router={router.address}", a) for a in test.container["args"]
    ]
    done = await asyncio.to_thread(trtmesh, command, *told)
    assert done.returncode == 0, done.stderr
    assert "8 new" in done.stderr


@pytest.mark.parametrize("component", ["router", "tokenizer", "engine"])
async def test_every_probe_passes(component: str, release: Release) -> None:
    process = release.processes[component]
    for when in ("startup", "readiness", "liveness"):
        await eventually(partial(passes, release.pods[component], when, process))


@pytest.mark.parametrize("component", ["router", "tokenizer", "engine"])
async def test_probes_of_a_release_with_tls_are_commands(component: str, release: Release) -> None:
    """Run here against a port without TLS, as the variables that turn it on are not given."""
    process = release.processes[component]
    (pod,) = [p for p in services(render(EXAMPLES["mutual-tls"])) if p.component == component]
    for when in ("readiness", "liveness"):
        _, *words = pod.container[f"{when}Probe"]["exec"]["command"]
        words = [re.sub(r"^127\.0\.0\.1:\d+$", process.address, word) for word in words]
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, *words], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (0, "SERVING\n")


def queries(example: str) -> Sequence[str]:
    scaled: Any = of_kind(render(EXAMPLES[example]), "ScaledObject")
    return [each["metadata"]["query"] for one in scaled for each in one["spec"]["triggers"]]


async def test_scaling_asks_for_metrics_that_are_there(release: Release) -> None:
    pages = {name: await page_of(process) for name, process in release.processes.items()}
    asked = set()
    for query in (*queries("autoscaling"), *queries("from-zero")):
        for metric, labels in re.findall(r"\b(trtmesh_\w+)\{([^}]*)\}", query):
            service = metric.split("_")[1]
            assert f"-{service}" in labels
            asked.add((service, metric))
    assert len(asked) > 6
    for service, metric in asked:
        family = metric.removesuffix("_sum").removesuffix("_count")
        assert re.search(rf"^# TYPE {family} ", pages[service], re.MULTILINE), metric


async def test_an_engine_that_is_too_busy_for_work_stays_alive() -> None:
    """Its steps take longer than `step_gap_seconds`: it is left out by routers, and not killed."""
    slow = ("--step-gap-seconds", "0.2", "--simulated-timing-step-ms", "2000")
    (pod,) = [p for p in services(render(EXAMPLES["monitoring"])) if p.component == "engine"]

    async def start(mesh: Mesh) -> None:
        await mesh.start_engine(*SIMULATED, *slow)
        await mesh.start_router(*PATIENT, env=INSIDE)
        await mesh.ready(1, 1)

    async with running_mesh(start=start) as mesh:
        (engine,) = mesh.engines
        reader = mesh.open(["x"], max_tokens=ENDLESS)

        async def unready() -> bool:
            return not await passes(pod, "readiness", engine)

        await eventually(unready)
        assert await passes(pod, "liveness", engine)
        await reader.cancel()


async def test_a_stop_ends_each_process_within_its_grace(release: Release) -> None:
    """The last test: SIGTERM alone drains, so the pods have no hook before it."""
    for component in ("router", "engine", "tokenizer"):
        assert "lifecycle" not in release.pods[component].container
        assert await release.processes[component].stop() == 0
