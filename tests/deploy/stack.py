"""The compose stack under test, operated through compose and the container engine."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.images import ROOT, TAG, compose_command, container_engine
from trtmesh.chassis.errors import Unavailable
from trtmesh.client import Client

COMPOSE_FILE = ROOT / "deploy" / "docker-compose.yml"
VARIABLES = {
    "tokenizer": "TOKENIZERS",
    "engine": "ENGINES",
    "prefill": "PREFILL",
    "decode": "DECODE",
    "simulated": "SIMULATED",
}
READY_SECONDS = 180.0
MEMORY_GIB = {"router": 1, "tokenizer": 2, "engine": 3}
"""Limits other than the defaults of the compose file."""

STOP_SECONDS = 40
"""Seconds until a stopping container is killed, as `stop_grace_period` in the compose file."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True)
class Container:
    """A running container of the stack."""

    id: str
    pid: int


@dataclass
class ComposeStack:
    """A compose project with ports of its own."""

    project: str = "trtmesh-test"
    model_dir: Path = ROOT / "models" / "demo"
    model_name: str = "model"
    engine: str = field(default_factory=container_engine)
    ports: dict[str, int] = field(
        default_factory=lambda: {
            router + name: free_port()
            for router in ("", "SECOND_")
            for name in ("GRPC_PORT", "HTTP_PORT", "METRICS_PORT", "ADMIN_PORT")
        }
    )
    scales: dict[str, int] = field(default_factory=dict)
    profiles: list[str] = field(default_factory=lambda: ["simulated"])

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.ports['GRPC_PORT']}"

    @property
    def second_address(self) -> str:
        return f"127.0.0.1:{self.ports['SECOND_GRPC_PORT']}"

    @property
    def admin_address(self) -> str:
        return f"127.0.0.1:{self.ports['ADMIN_PORT']}"

    def up(self, **scales: int) -> None:
        """Starts missing and stops surplus containers; leaves the others alone."""
        self.scales |= scales
        # Without --no-recreate podman-compose recreates all containers of a service when their number changes.
        self.compose("up", "--detach", "--no-build", "--no-recreate")
        for service, count in self.scales.items():
            # Docker has stopped them by now; podman-compose only adds.
            for container in self.containers(service)[count:]:
                self.stop(container)
                self.remove(container)

    async def until_it_answers(self) -> None:
        """Waits until the router serves the model."""
        try:
            async with asyncio.timeout(READY_SECONDS), Client(self.address) as client:
                while True:
                    try:
                        await client.complete(["x"], model=self.model_name, max_tokens=1)
                    except Unavailable:
                        await asyncio.sleep(0.5)
                    else:
                        return
        except TimeoutError:
            raise AssertionError(f"it did not answer in time:\n{self.logs()}") from None

    def compose(self, *arguments: str) -> str:
        return self._run(
            *compose_command(),
            "--project-name",
            self.project,
            "--file",
            str(COMPOSE_FILE),
            *(f"--profile={profile}" for profile in self.profiles),
            *arguments,
        )

    def containers(self, service: str) -> list[Container]:
        """The running containers of a service by number; compose starts the lowest missing one."""
        labels = {"com.docker.compose.project": self.project, "com.docker.compose.service": service}
        filters = [f"--filter=label={name}={value}" for name, value in labels.items()]
        ids = self._run(self.engine, "ps", "--quiet", *filters).split()
        found = sorted(map(self.inspect, ids), key=_number)
        return [Container(one["Id"], int(one["State"]["Pid"])) for one in found]

    def inspect(self, container_id: str) -> dict[str, Any]:
        """The container engine's description of a container, running or not."""
        (known,) = json.loads(self._run(self.engine, "inspect", container_id))
        return dict(known)

    def crash(self, container: Container) -> None:
        """Sends SIGKILL to the service itself, as the kernel does when memory is out.

        A kill through the container engine counts as an operator's stop and disables the restart policy. Hence only the
        fallback where the process belongs to another user or machine, as on a Mac.
        """
        try:
            ours = b"trtmesh." in Path(f"/proc/{container.pid}/cmdline").read_bytes()
            if ours:
                os.kill(container.pid, signal.SIGKILL)
        except (FileNotFoundError, PermissionError):
            ours = False
        if not ours:
            self._run(self.engine, "kill", "--signal", "KILL", container.id)

    def disconnect(self, container: Container) -> None:
        self._run(
            self.engine, "network", "disconnect", "--force", f"{self.project}_default", container.id
        )

    def remove(self, container: Container) -> None:
        self._run(self.engine, "rm", "--force", container.id)

    def stop(self, container: Container) -> None:
        """Sends SIGTERM; the service must drain and end before the container engine kills it."""
        self._run(self.engine, "stop", "--time", str(STOP_SECONDS), container.id)
        status = self.inspect(container.id)["State"]["ExitCode"]
        if status != 0:
            log = self._run(self.engine, "logs", "--tail", "20", container.id)
            raise AssertionError(f"asked to stop, it ended with {status} instead of 0:\n{log}")

    def restart(self, container: Container) -> None:
        self.stop(container)
        self._run(self.engine, "start", container.id)

    def inside(self, service: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a program in the image of a service."""
        image = f"localhost/trtmesh/{service}:{TAG}"
        arguments = ["run", "--rm", "--network=none", f"--entrypoint={command[0]}", image]
        return subprocess.run(
            [self.engine, *arguments, *command[1:]], capture_output=True, text=True, check=False
        )

    def execute(self, container: Container, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a program inside a running container."""
        return subprocess.run(
            [self.engine, "exec", container.id, *command],
            capture_output=True,
            text=True,
            check=False,
        )

    def health(self, container: Container) -> str:
        """The complaint of the image's health check about a running container; '' if healthy."""
        kind, *check = self.inspect(container.id)["Config"]["Healthcheck"]["Test"]
        assert kind == "CMD"
        done = self.execute(container, *check)
        return "" if done.returncode == 0 else done.stdout + done.stderr

    def logs(self) -> str:
        return self.compose("logs", "--tail", "50")

    def down(self) -> None:
        for service in ("router", "second-router", *VARIABLES):
            for container in self.containers(service):
                self.remove(container)
        self.compose("down", "--volumes", "--timeout", "5")

    def _run(self, *command: str) -> str:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=self._environment()
        )
        if done.returncode:
            raise RuntimeError(
                f"{shlex.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}"
            )
        return done.stdout

    def _environment(self) -> Mapping[str, str]:
        # podman-compose honours a single --scale, so the numbers are passed as variables.
        scales = {VARIABLES[service]: count for service, count in self.scales.items()}
        images = {"REGISTRY": "localhost/", "TAG": TAG}
        model = {"MODEL_DIR": self.model_dir, "MODEL_NAME": self.model_name}
        memory = {f"{service.upper()}_MEMORY": f"{most}g" for service, most in MEMORY_GIB.items()}
        variables = self.ports | scales | images | model | memory
        return {**os.environ, **{name: str(value) for name, value in variables.items()}}


def _number(known: Mapping[str, Any]) -> int:
    return int(known["Config"]["Labels"]["com.docker.compose.container-number"])


@contextmanager
def running(stack: ComposeStack) -> Iterator[ComposeStack]:
    """Runs a router, a tokenizer and an engine; removes everything on exit."""
    try:
        stack.up(tokenizer=1, engine=1, simulated=0)
        yield stack
    finally:
        stack.down()
