"""What every stream of a worker shares."""

from __future__ import annotations

from dataclasses import dataclass

from trtmesh.engine.backend import Backend, BackendInfo
from trtmesh.engine.metrics import EngineMetrics
from trtmesh.engine.settings import EngineSettings
from trtmesh.engine.streams import Streams
from trtmesh.v1 import engine_pb2 as epb


@dataclass
class Worker:
    """A worker whose model is loaded."""

    name: str
    settings: EngineSettings
    backend: Backend
    info: BackendInfo
    description: epb.GetEngineResponse
    streams: Streams
    metrics: EngineMetrics
    draining: bool = False
