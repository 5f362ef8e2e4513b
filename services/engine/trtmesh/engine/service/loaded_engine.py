"""State shared by all streams of a worker."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trtmesh.engine.backend import Backend, BackendInfo, HeldAdapter, HoldsAdapters
from trtmesh.engine.handoff.handoffs import HandoffsByBlocks, HandoffsByState
from trtmesh.engine.service.adapter_delivery import DeliveryMemory
from trtmesh.engine.service.metrics import EngineMetrics
from trtmesh.engine.service.streams import Streams
from trtmesh.engine.service.wire import load_message
from trtmesh.engine.settings import EngineSettings
from trtmesh.v1 import engine_pb2 as epb

STATM = Path("/proc/self/statm")


@dataclass
class LoadedEngine:
    """A worker with a loaded model."""

    name: str
    settings: EngineSettings
    backend: Backend
    info: BackendInfo
    description: epb.GetEngineResponse
    streams: Streams
    metrics: EngineMetrics
    delivery_memory: DeliveryMemory
    adapters: HoldsAdapters | None
    """The backend, where it holds adapters."""
    handoffs: HandoffsByBlocks | HandoffsByState | None
    """None for a backend without handoffs."""
    role: epb.WorkerRole.ValueType
    """Present role."""
    drain_ends_at: float | None = None
    """Monotonic time for cutting the streams of a stopping worker; None before."""
    drained: bool = False
    """Whether an admin drains the worker."""

    @property
    def held_adapters(self) -> Sequence[HeldAdapter]:
        """The adapters in memory, and those of the backend's own directory that cannot be loaded."""
        return self.adapters.adapters() if self.adapters else ()

    @property
    def states(self) -> HandoffsByState | None:
        """The handoffs of a backend with a KV transport of the library's own."""
        return self.handoffs if isinstance(self.handoffs, HandoffsByState) else None

    @property
    def draining(self) -> bool:
        """Whether new items are refused."""
        return self.drained or self.drain_ends_at is not None

    def drain(self, seconds: float) -> None:
        """Refuses new items and cuts the streams after `seconds`."""
        self.drain_ends_at = time.monotonic() + seconds

    def load(self) -> epb.Load:
        """The load as reported to routers."""
        load = load_message(self.backend.stats(), draining=self.draining)
        load.busy_seconds = self.metrics.busy_seconds(time.monotonic())
        load.host_memory_bytes = _resident_bytes()
        load.role = self.role
        if self.handoffs:
            load.sent_handoffs.CopyFrom(self.handoffs.sent.counts())
            load.received_handoffs.CopyFrom(self.handoffs.received.counts())
            load.quarantined_blocks = self.handoffs.received.quarantined_blocks
            load.receiving_tokens = sum(
                lease.lacking_tokens for lease in self.handoffs.received.all()
            )
        if self.drain_ends_at is not None:
            load.drain_ms = max(0, int((self.drain_ends_at - time.monotonic()) * 1000))
        return load


def _resident_bytes() -> int:
    """Resident memory of this process; 0 where the system has no Linux procfs."""
    try:
        _, resident, *_ = STATM.read_bytes().split()
    except OSError:
        return 0
    return int(resident) * resource.getpagesize()
