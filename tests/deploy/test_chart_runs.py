"""Releases of the chart as processes: each runs its pod's arguments, and the release's own test passes."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from certificates import Authority
from cli.commands import trtmesh
from deploy.chart import EXAMPLES, Object, Pod, config_of, of_kind, pods, render, services
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
from forks import fork_server, start_module
from grpc_health.v1 import health_pb2, health_pb2_grpc
from process_constants import constants
from processes import ServiceProcess, service_process

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROBE = "trtmesh.chassis.probe"
SERVING = health_pb2.HealthCheckResponse.SERVING


@dataclass
class Release:
    """The processes of a release on the loopback, by component; what its pods mount lies below `directory`."""

    values: Mapping[str, Any]
    directory: Path
    processes: dict[str, ServiceProcess] = field(default_factory=dict)

    @property
    def objects(self) -> Sequence[Object]:
        return render(self.values)

    def pod(self, component: str) -> Pod:
        (found,) = [pod for pod in pods(self.objects) if pod.component == component]
        return found

    def here(self, path: str) -> str:
        """A file of a pod on this machine."""
        return str(self.directory / path.removeprefix("/")) if path.startswith("/") else path

    def flags(self, component: str) -> list[str]:
        """A pod's arguments, where files are of this machine and ports are free ones."""
        pod = self.pod(component)
        config = self.directory / f"{component}.yaml"
        config.write_text(config_of(pod, self.objects), "utf-8")
        address = {name: process.address for name, process in self.processes.items()}
        replaced = {
            "--config": str(config),
            "--host": "127.0.0.1",
            "--model-dir": str(DEMO),
            **dict.fromkeys(("--port", "--http-port", "--metrics-port", "--admin-port"), "0"),
            "--engines": address.get("engine", ""),
            "--tokenizers": address.get("tokenizer", ""),
        }
        split = [word.split("=", 1) for word in pod.flags]
        return [
            word for name, value in split for word in (name, replaced.get(name, self.here(value)))
        ]

    def variables(self, component: str, secrets: Mapping[str, str]) -> dict[str, str]:
        """A pod's variables, with the values of secrets by name."""
        return {
            each["name"]: secrets[each["valueFrom"]["secretKeyRef"]["name"]]
            if "valueFrom" in each
            else self.here(each["value"])
            for each in self.pod(component).container.get("env", ())
        }

    async def start(self, stack: AsyncExitStack) -> None:
        for component in ("tokenizer", "engine", "router"):
            process = service_process(component, *self.flags(component))
            self.processes[component] = await stack.enter_async_context(process)

    async def test(self, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs the release's own test, as `helm test` does."""
        test = self.pod("test").container
        router = self.processes["router"].address
        told = [re.sub(r"^--router=.*", f"--router={router}", word) for word in test["args"]]
        return await asyncio.to_thread(trtmesh, test["command"][-1], *told, env=env)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def release(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Release]:
    running = Release({}, tmp_path_factory.mktemp("release"))
    async with AsyncExitStack() as stack:
        await running.start(stack)
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
    await eventually(lambda: passes(release.pod("router"), "readiness", router))
    done = await release.test()
    assert done.returncode == 0, done.stderr
    assert "8 new" in done.stderr


@pytest.mark.parametrize("component", ["router", "tokenizer", "engine"])
async def test_every_probe_passes(component: str, release: Release) -> None:
    process = release.processes[component]
    for when in ("startup", "readiness", "liveness"):
        await eventually(partial(passes, release.pod(component), when, process))


async def test_a_release_with_tls_and_keys_answers_those_who_have_them(tmp_path: Path) -> None:
    """Its probes are commands, which have the certificates of their pods."""
    secure = Release(EXAMPLES["secure"], tmp_path)
    for name in ("tls", "api-keys", "admin"):
        (tmp_path / name).mkdir()
    authority = Authority(tmp_path)
    pair = authority.issue("mesh", ("trtmesh.internal",))
    for file, name in (
        (pair.certificate, "tls.crt"),
        (pair.key, "tls.key"),
        (authority.ca, "ca.crt"),
    ):
        file.rename(tmp_path / "tls" / name)
    (tmp_path / "admin" / "token").write_text("a-token-of-the-admins")
    keys = str(tmp_path / "api-keys" / "api.keys")
    made = await asyncio.to_thread(trtmesh, "keys", "add", "test", "--file", keys)
    secrets = {"trtmesh-test-key": made.stdout.strip()}

    async def probe(component: str, when: str) -> bool:
        command = secure.pod(component).container[f"{when}Probe"]["exec"]["command"]
        address = secure.processes[component].address
        words = [re.sub(r"^127\.0\.0\.1:\d+$", address, word) for word in command[1:]]
        assert words[:2] == ["-m", PROBE]
        env = {**os.environ, **secure.variables(component, secrets)}
        with start_module(fork_server((PROBE,)), PROBE, words[2:], env) as process:
            await asyncio.to_thread(process.communicate)
        return process.returncode == 0

    async with AsyncExitStack() as stack:
        await secure.start(stack)
        for component in ("engine", "tokenizer", "router"):
            for when in ("startup", "liveness", "readiness"):
                await eventually(partial(probe, component, when))
        done = await secure.test(**secure.variables("test", secrets))
        assert done.returncode == 0, done.stderr
        assert "8 new" in done.stderr
        keyless = secure.variables("test", secrets)
        del keyless["TRTMESH_API_KEY"]
        refused = await secure.test(**keyless)
        assert (refused.returncode, "UNAUTHENTICATED" in refused.stderr) == (1, True)
        # In plain text nobody answers.
        assert (await secure.test()).returncode == 1


def queries(example: str) -> Sequence[str]:
    scaled: Any = of_kind(render(EXAMPLES[example]), "ScaledObject")
    return [each["metadata"]["query"] for one in scaled for each in one["spec"]["triggers"]]


async def test_scaling_asks_for_metrics_that_are_there(release: Release) -> None:
    await eventually(
        lambda: passes(release.pod("router"), "readiness", release.processes["router"])
    )
    # Counts by model begin with its first request.
    assert (await release.test()).returncode == 0
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
    """Its steps take longer than STEP_GAP_SECONDS: it is left out by routers, and not killed."""
    slow = (*constants(step_gap_seconds=0.2), "--simulated-timing-step-ms", "2000")
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
        assert "lifecycle" not in release.pod(component).container
        assert await release.processes[component].stop() == 0
