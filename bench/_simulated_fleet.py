"""Simulated workers in one process, each with its own server, port and backend. Prints their addresses.

The router is measured and sees as many connections; a process per worker would cost gigabytes.
"""

from __future__ import annotations

# gRPC reads the environment when it is first imported.
import trtmesh.chassis.environment  # noqa: F401  # isort: skip

import asyncio
import json
import sys

import grpc
import uvloop
from trtmesh.chassis.grpc.server import GrpcServer
from trtmesh.chassis.health import Health
from trtmesh.chassis.service import Runtime
from trtmesh.chassis.settings import load_settings
from trtmesh.engine.backends.simulated.backend import SimulatedBackend
from trtmesh.engine.service.engine_service import EngineService
from trtmesh.engine.settings import EngineSettings


async def serve(number: int, flags: list[str]) -> tuple[grpc.aio.Server, str]:
    """Starts one worker and returns its server and address; the server ends with the last reference to it."""
    arguments = ["--backend", "simulated", "--worker", f"worker-{number}", *flags]
    settings = load_settings(EngineSettings, arguments)
    runtime = Runtime()
    service = EngineService(settings, runtime, SimulatedBackend(settings.simulated))
    runtime.health = Health(service.service_names)
    server = GrpcServer(settings.max_message_bytes)
    service.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await service.start()
    return server, f"127.0.0.1:{port}"


async def main(count: int, flags: list[str]) -> None:
    workers = [await serve(number, flags) for number in range(count)]
    print(json.dumps([address for _, address in workers]), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(int(sys.argv[1]), sys.argv[2:]))
