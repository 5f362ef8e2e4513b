"""`python -m trtmesh.cli.one_process`: a router with a tokenizer and an engine inside, for `trtmesh up --one-process`.

Services do not know each other, and the command that starts them knows all. The router's door, ports and settings are
those of the process; tokenizer and engine read their own sections and variables, and their messages are handed over in
memory (`chassis/in_memory.py`), with the credit, the deadlines and the failures of a connection.

Unlike a router's process it keeps the memory of large messages, some 100 MiB: returned at once, as the router returns
it, the tensors of a prefill would be mapped anew, for 40 % more CPU.
"""

import trtmesh.chassis.environment  # noqa: F401 - before anything imports gRPC

# isort: split
import sys
from collections.abc import Sequence
from functools import partial

from trtmesh.chassis.errors import SettingsError
from trtmesh.chassis.service import Runtime, run
from trtmesh.chassis.settings import load_beside
from trtmesh.engine.__main__ import build as build_engine
from trtmesh.engine.__main__ import exit_with
from trtmesh.engine.settings import EngineSettings
from trtmesh.router.__main__ import SWITCH_SECONDS
from trtmesh.router.__main__ import build as build_router
from trtmesh.router.links.local import LocalService
from trtmesh.router.router import Router
from trtmesh.router.settings import RouterSettings


def build(argv: Sequence[str], settings: RouterSettings, runtime: Runtime) -> Router:
    """The whole mesh. Raises SettingsError."""
    own = load_beside(EngineSettings, argv)
    try:
        _check(own)
    except SettingsError as error:
        error.setting = own.spelling(error.setting)
        raise
    inside = Runtime(registry=runtime.registry, tracer=runtime.tracer)
    engine = LocalService(build_engine(own, inside), own, inside)
    return build_router(argv, settings, runtime, engine)


def _check(engine: EngineSettings) -> None:
    """Raises SettingsError for an engine that needs other processes, or a port of its own."""
    if engine.backend not in ("torch", "simulated"):
        problem = "but the engine of a mesh in one process is torch or simulated"
        raise SettingsError(f"is {engine.backend} {problem}", setting="engine.backend")
    if engine.role != "mixed":
        problem = "but the only engine of a mesh in one process has both phases"
        raise SettingsError(f"is {engine.role} {problem}", setting="engine.role")
    if len(engine.torch.device.names) > 1:
        problem = "but the engine of a mesh in one process runs on one device"
        raise SettingsError(f"is {engine.torch.device} {problem}", setting="engine.torch.device")
    if engine.trtllm_service:
        problem = "but the engine of a mesh in one process has no port for gateways"
        raise SettingsError(f"is true {problem}", setting="engine.trtllm_service")


if __name__ == "__main__":
    sys.setswitchinterval(SWITCH_SECONDS)
    exit_with(run(RouterSettings, partial(build, sys.argv[1:]), sys.argv[1:]))
