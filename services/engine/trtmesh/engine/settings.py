"""Settings of an engine process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from trtmesh.chassis.settings import ServiceSettings
from trtmesh.engine.backends.simulated.settings import SimulatedSettings

# The settings of the torch backend, and with them the package around them, do not import torch.
from trtmesh.engine.backends.torch.settings import TorchSettings

Seconds = Annotated[float, Field(gt=0, le=86400)]


class EngineSettings(ServiceSettings):
    """Settings of an engine process."""

    section: ClassVar[str] = "engine"

    backend: Literal["torch", "simulated"] = "torch"
    """What executes the model."""
    worker: str = ""
    """Name of the worker, unique in the fleet; unset makes one from host name and process id."""
    model_dir: Path | None = None
    """Directory of the model; the simulated backend needs none."""
    model: str = ""
    """Name that requests ask for; unset takes the directory's name, or "simulated"."""
    role: Literal["mixed", "prefill", "decode"] = "mixed"
    """Phases that the worker is for."""
    load_interval_seconds: Seconds = 0.1
    """Time between two Load events, in seconds."""
    stall_seconds: Seconds = 10.0
    """How long sequences may wait without a step before the worker counts as stuck, in seconds."""
    max_handles_per_stream: Annotated[int, Field(ge=1, le=1_000_000)] = 16384
    """Most sequences of one router."""
    torch: TorchSettings = TorchSettings()
    simulated: SimulatedSettings = SimulatedSettings()
