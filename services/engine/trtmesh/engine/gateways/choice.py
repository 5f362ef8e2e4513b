"""Opens the gateways chosen by settings."""

from __future__ import annotations

from trtmesh.chassis.errors import SettingsError
from trtmesh.engine.service.engine_service import EngineService
from trtmesh.engine.settings import EngineSettings


def open_gateways(service: EngineService, settings: EngineSettings) -> None:
    """Imports only the chosen contracts. Raises SettingsError where a package is missing."""
    if not settings.trtllm_service:
        return
    try:
        from trtmesh.engine.gateways.trtllm.servicer import TrtllmService
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"is on but needs the package smg-grpc-proto ({error}); install trtmesh[gateways]",
            setting="engine.trtllm_service",
        ) from error
    service.add_gateway(TrtllmService)
