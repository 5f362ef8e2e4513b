"""The simulated backend."""

from trtmesh.engine.backends.simulated.backend import SimulatedBackend
from trtmesh.engine.backends.simulated.settings import SimulatedSettings

__all__ = ["SimulatedBackend", "SimulatedSettings"]
