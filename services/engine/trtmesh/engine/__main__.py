"""The engine process: `python -m trtmesh.engine --backend simulated --port 9101`."""

import trtmesh.chassis.environment  # noqa: F401 - before anything imports gRPC

# isort: split
import sys

from trtmesh.chassis.errors import SettingsError
from trtmesh.chassis.service import Runtime, run
from trtmesh.engine.backend import Backend
from trtmesh.engine.service.engine_service import EngineService
from trtmesh.engine.settings import EngineSettings


def build(settings: EngineSettings, runtime: Runtime) -> EngineService:
    """The service around the backend that the settings choose."""
    return EngineService(settings, runtime, build_backend(settings))


def build_backend(settings: EngineSettings) -> Backend:
    """Imports only what the chosen backend needs."""
    if settings.backend == "simulated":
        from trtmesh.engine.backends.simulated.backend import SimulatedBackend

        return SimulatedBackend(settings.simulated)
    from trtmesh.engine.backends.torch.backend import TorchBackend

    if settings.model_dir is None:
        raise SettingsError(
            "is not set but the torch backend needs it (set --model-dir or TRTMESH_ENGINE_MODEL_DIR)",
            setting="engine.model_dir",
        )
    return TorchBackend(settings.model_dir, settings.torch)


if __name__ == "__main__":
    sys.exit(run(EngineSettings, build, sys.argv[1:]))
