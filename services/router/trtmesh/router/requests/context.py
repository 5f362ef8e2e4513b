"""The context of a request, shared by all items."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

from trtmesh.chassis.fair.turns import StartQueue, StartScheduler
from trtmesh.chassis.frozen import frozen
from trtmesh.chassis.tracing.spans import Tracer
from trtmesh.router.adapters.adapters import Adapters
from trtmesh.router.admission import Admission, Bucket, RateLimiter
from trtmesh.router.canary.canary import Canary
from trtmesh.router.fleet.fleet import Fleet
from trtmesh.router.handoffs.table import HandoffTable
from trtmesh.router.links.deadlines import Retries
from trtmesh.router.metrics import Latencies, RouterMetrics
from trtmesh.router.receipts import Receipts
from trtmesh.router.recorder import Recorder
from trtmesh.router.requests.siblings import Siblings
from trtmesh.router.streams.client_stream import ClientStream, Pace, WriteScheduler
from trtmesh.router.tokenizers.pool import TokenizerPool
from trtmesh.router.tracing import CallTrace
from trtmesh.router.values.resumption import Received


@dataclass(frozen=True, slots=True)
class Mesh:
    """Parts of the router shared by all requests."""

    fleet: Fleet
    handoffs: HandoffTable
    adapters: Adapters
    tokenizers: TokenizerPool
    admission: Admission
    rate_limiter: RateLimiter
    metrics: RouterMetrics
    writes: WriteScheduler
    retries: Retries
    receipts: Receipts
    recorder: Recorder | None = None
    canary: Canary | None = None
    tracer: Tracer | None = None
    starts: StartScheduler = field(default_factory=StartScheduler)
    """Placements of items that no worker took yet. With the server's handlers in the same turns, each slice would send
    half as many items to a tokenizer and half as many to a worker: twice the messages."""
    continuations: StartScheduler = field(default_factory=StartScheduler)
    """Further placements, and ends."""


@frozen
class RequestContext:
    """An admitted request, seen by an item. Times are the event loop's."""

    mesh: Mesh
    latencies: Latencies
    owner: str
    """Name of the caller."""
    request_id: str
    model: str
    drawn_seed: int
    """Seed of items without a seed."""
    received: Received
    """Output received by the client in another call."""
    client: ClientStream
    pace: Pace
    siblings: Siblings | None
    """None for a request of a single item."""
    bucket: Bucket | None
    """Token bucket of the owner; None without a rate limit."""
    arrival_time: float
    deadline: float | None
    starting: StartQueue
    running: StartQueue
    """Turns of items before and after their first dispatch."""
    trace_id: str = ""
    """The trace of a sampled request, in 32 hexadecimal digits, for exemplars; '' for others."""
    trace: CallTrace | None = None
    """None for most requests."""

    def age_seconds(self) -> float:
        return asyncio.get_running_loop().time() - self.arrival_time

    def remaining_ms(self) -> int | None:
        """Time until the client's deadline, at least 1 ms; None without a deadline. Rounded up: no worker should
        end a call before it."""
        if self.deadline is None:
            return None
        remaining = self.deadline - asyncio.get_running_loop().time()
        return min(max(1, math.ceil(remaining * 1000)), 2**32 - 1)
