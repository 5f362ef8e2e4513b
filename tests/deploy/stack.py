"""The compose stack under test, driven as an operator drives it: by compose and the container engine."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPOSE_FILE = ROOT / "deploy" / "docker-compose.yml"
PROJECT = "trtmesh-test"
VARIABLES = {"tokenizer": "TOKENIZERS", "engine": "ENGINES", "simulated": "SIMULATED"}


def container_engine() -> str:
    """The program that runs containers: $CONTAINER_ENGINE, else docker, else podman; '' where there is none."""
    names = (os.environ.get("CONTAINER_ENGINE", ""), "docker", "podman")
    return next((name for name in names if name and shutil.which(name)), "")


def why_not() -> str:
    """Why containers cannot run here; '' when they can."""
    engine = container_engine()
    if not engine:
        return "neither docker nor podman is installed"
    asked = subprocess.run([engine, "info"], capture_output=True, text=True, check=False)
    return "" if asked.returncode == 0 else f"{engine} info failed: {asked.stderr.strip()[-200:]}"


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
    """One project of compose, with ports of its own."""

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
        """Starts what is missing and stops what is too much; whatever else runs is left alone."""
        self.scales |= scales
        # Without --no-recreate podman-compose starts all containers of a service anew when their number changes.
        self.compose("up", "--detach", "--no-build", "--no-recreate")
        for service, count in self.scales.items():
            # Docker has stopped them by now; podman-compose only ever adds.
            for container in self.containers(service)[count:]:
                self._run(self.engine, "stop", "--time", "40", container.id)
                self.remove(container)

    def compose(self, *arguments: str) -> str:
        command = shlex.split(os.environ.get("COMPOSE", "docker compose"))
        return self._run(
            *command,
            "--project-name",
            PROJECT,
            "--file",
            str(COMPOSE_FILE),
            *(f"--profile={profile}" for profile in self.profiles),
            *arguments,
        )

    def containers(self, service: str) -> list[Container]:
        """The running containers of a service, oldest first."""
        labels = {"com.docker.compose.project": PROJECT, "com.docker.compose.service": service}
        filters = [f"--filter=label={name}={value}" for name, value in labels.items()]
        ids = self._run(self.engine, "ps", "--quiet", *filters).split()
        found = [json.loads(self._run(self.engine, "inspect", one))[0] for one in ids]
        found.sort(key=lambda one: str(one["Created"]))
        return [Container(one["Id"], int(one["State"]["Pid"])) for one in found]

    def crash(self, container: Container) -> None:
        """SIGKILL to the service itself, as the kernel does it when memory is out."""
        os.kill(container.pid, signal.SIGKILL)

    def disconnect(self, container: Container) -> None:
        self._run(
            self.engine, "network", "disconnect", "--force", f"{PROJECT}_default", container.id
        )

    def remove(self, container: Container) -> None:
        self._run(self.engine, "rm", "--force", container.id)

    def restart(self, container: Container) -> None:
        """SIGTERM, its grace period, and a new start."""
        self._run(self.engine, "restart", "--time", "40", container.id)

    def inside(self, service: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a program in the image of a service."""
        image = f"localhost/trtmesh/{service}:latest"
        arguments = ["run", "--rm", "--network=none", f"--entrypoint={command[0]}", image]
        return subprocess.run(
            [self.engine, *arguments, *command[1:]], capture_output=True, text=True, check=False
        )

    def health(self, container: Container) -> str:
        """What the image's own check says of a running container; '' when it is healthy."""
        image = json.loads(self._run(self.engine, "inspect", container.id))[0]["Config"]
        kind, *check = image["Healthcheck"]["Test"]
        assert kind == "CMD"
        done = subprocess.run(
            [self.engine, "exec", container.id, *check], capture_output=True, text=True, check=False
        )
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
        # podman-compose heeds a single --scale, so the numbers go in as variables.
        scales = {VARIABLES[service]: count for service, count in self.scales.items()}
        return {**os.environ, **{name: str(value) for name, value in (self.ports | scales).items()}}


@contextmanager
def compose_stack() -> Iterator[ComposeStack]:
    """One router, one tokenizer and one engine; nothing is left afterwards."""
    stack = ComposeStack()
    try:
        stack.up(tokenizer=1, engine=1, simulated=0)
        yield stack
    finally:
        stack.down()
