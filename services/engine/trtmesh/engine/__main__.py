"""The engine process: `python -m trtmesh.engine --backend simulated --port 9101`."""

import trtmesh.chassis.environment  # noqa: F401 - before anything imports gRPC

# isort: split
import logging
import os
import sys
from typing import NoReturn

from trtmesh.chassis.errors import SettingsError
from trtmesh.chassis.service import Runtime, run
from trtmesh.engine.backend import Backend
from trtmesh.engine.gateways.choice import open_gateways
from trtmesh.engine.service.engine_service import EngineService
from trtmesh.engine.settings import EngineSettings


def build(settings: EngineSettings, runtime: Runtime) -> EngineService:
    """The service around the backend chosen by the settings."""
    service = EngineService(settings, runtime, build_backend(settings))
    open_gateways(service, settings)
    return service


def build_backend(settings: EngineSettings) -> Backend:
    """Imports only the chosen backend."""
    if settings.backend == "simulated":
        from trtmesh.engine.backends.simulated.backend import SimulatedBackend

        return SimulatedBackend(settings.simulated)
    if settings.backend == "foreign":
        return _foreign(settings)
    model_dir = settings.model_dir
    if model_dir is None:
        raise SettingsError(
            f"is not set but the {settings.backend} backend needs it (set --model-dir or TRTMESH_ENGINE_MODEL_DIR)",
            setting="engine.model_dir",
        )
    if settings.backend == "tensorrt_llm":
        from trtmesh.engine.backends.tensorrt_llm.backend import TensorRtLlmBackend

        return TensorRtLlmBackend(model_dir, settings.tensorrt_llm)
    from trtmesh.engine.backends.torch.backend import TorchBackend

    return TorchBackend(model_dir, settings.torch)


def _foreign(settings: EngineSettings) -> Backend:
    try:
        from trtmesh.engine.backends.foreign.backend import ForeignBackend
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"is foreign, which needs {error.name}: pip install 'trtmesh[foreign]'",
            setting="engine.backend",
        ) from error
    return ForeignBackend(settings.foreign, settings.max_message_bytes)


def exit_with(status: int) -> NoReturn:
    """Ends the process of an engine."""
    if status == 0:
        sys.exit()
    # Kernels waiting for a lost rank, or a thread waiting for the kernels, would keep the interpreter from ending.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    exit_with(run(EngineSettings, build, sys.argv[1:]))
