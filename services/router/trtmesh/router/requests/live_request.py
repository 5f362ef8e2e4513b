"""One request while its RPC runs, and what every request needs."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from trtmesh.chassis.errors import TrtmeshError
from trtmesh.router.admission import Admission, Bucket, Permit, RateLimiter
from trtmesh.router.fleet.fleet import Fleet
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.replay import Recorder
from trtmesh.router.requests.item import ItemRun
from trtmesh.router.requests.siblings import SiblingRules, Siblings
from trtmesh.router.streams.client_stream import ClientStream
from trtmesh.router.streams.pace import Pace, PaceRules
from trtmesh.router.streams.turns import Turns
from trtmesh.router.tokenizers.pool import TokenizerPool
from trtmesh.router.values.request import GenerationRequest
from trtmesh.router.values.resumption import Received
from trtmesh.v1 import router_pb2 as router_pb


@dataclass(frozen=True, slots=True)
class Retry:
    """How long an item looks for a worker."""

    most_attempts: int
    recovery_seconds: float


@dataclass(frozen=True, slots=True)
class Mesh:
    """What every request needs."""

    fleet: Fleet
    tokenizers: TokenizerPool
    admission: Admission
    rate_limiter: RateLimiter
    metrics: RouterMetrics
    turns: Turns
    retry: Retry
    siblings: SiblingRules
    recorder: Recorder | None = None


@dataclass(frozen=True, slots=True)
class Admitted:
    """What a request that may run has: a permit for each item, and the bucket that its tokens are taken from."""

    model: str
    permits: Sequence[Permit]
    api_key: str
    bucket: Bucket | None


class LiveRequest:
    """One request while its RPC runs."""

    def __init__(
        self,
        mesh: Mesh,
        request: GenerationRequest,
        admitted: Admitted,
        received: Received,
        remaining_seconds: float | None,
        pace: PaceRules,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.mesh = mesh
        self.request_id = request.request_id
        self.model = admitted.model
        self.api_key = admitted.api_key
        self.permits = admitted.permits
        self.bucket = admitted.bucket
        self.drawn_seed = secrets.randbits(64)
        accepted = router_pb.RequestAccepted(
            request_id=request.request_id, model=self.model, seed=self.drawn_seed
        )
        opening = router_pb.GenerateEvent(accepted=accepted)
        self.client = ClientStream(opening, mesh.turns, pace.credit)
        self.pace = Pace(pace, self.client, mesh.metrics, self._on_pace, self.end)
        self.client.watcher = self.pace
        self.arrival_time = loop.time()
        self.siblings = Siblings(mesh.siblings)
        self.ended: TrtmeshError | None = None
        """Why this router ended the call, where it did."""
        self.gone = asyncio.Event()
        self._deadline = None if remaining_seconds is None else loop.time() + remaining_seconds
        self._handler = asyncio.current_task()
        self.items = [
            ItemRun(self, item, permit, received)
            for item, permit in zip(received.rest_of(request), self.permits, strict=True)
        ]
        self._items_over = 0
        if not self.items:
            self.client.close()

    def age_seconds(self) -> float:
        return asyncio.get_running_loop().time() - self.arrival_time

    def spend(self, tokens: int) -> None:
        """Takes tokens from those that the caller's API key may use."""
        if self.bucket is not None:
            self.bucket.spend(tokens, asyncio.get_running_loop().time())

    def remaining_ms(self) -> int | None:
        """Time until the client's deadline, at least 1; None when it has none."""
        if self._deadline is None:
            return None
        remaining = self._deadline - asyncio.get_running_loop().time()
        return min(max(1, int(remaining * 1000)), 2**32 - 1)

    def stop(self, batch_indexes: Collection[int]) -> int:
        """Stops some items, or all when none is named; how many were live."""
        chosen = [
            item for item in self.items if not batch_indexes or item.batch_index in batch_indexes
        ]
        return sum(item.stop() for item in chosen)

    def dissolve(self) -> None:
        """Nothing of the request happens any more: lets go of its parts, which know each other and would wait for the
        collector of cycles, which comes rarely."""
        self.client.watcher = None
        for item in self.items:
            item.dissolve()
        self.items = []
        self.ended = self._handler = None

    def _on_pace(self) -> None:
        for item in self.items:
            item.on_pace()

    def on_item_over(self) -> None:
        self._items_over += 1
        if self._items_over == len(self.items):
            self.client.close()

    def end(self, error: TrtmeshError) -> None:
        """Ends the call with an error, also where its handler is stuck in a write because the client does not read."""
        if self.ended is None and self._handler is not None:
            self.ended = error
            self._handler.cancel()
