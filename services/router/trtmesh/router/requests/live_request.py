"""A request for the duration of the RPC."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from trtmesh.chassis.errors import TrtmeshError
from trtmesh.chassis.fair.budget import Budget
from trtmesh.chassis.fair.start_scheduler import StartQueue
from trtmesh.router.admission import Account, Permit
from trtmesh.router.callers.identity import Identity
from trtmesh.router.requests.context import Mesh, RequestContext
from trtmesh.router.requests.item import ItemRun
from trtmesh.router.requests.item_events import ItemEvents
from trtmesh.router.requests.siblings import Siblings
from trtmesh.router.streams.client_stream import ClientStream
from trtmesh.router.streams.pace import ClientLimits, Pace
from trtmesh.router.values.request import GenerationRequest
from trtmesh.router.values.resumption import Received
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb


@dataclass(frozen=True, slots=True)
class Admitted:
    """The right of a request to run: a permit per item, and the account of its owner."""

    model: str
    permits: Sequence[Permit]
    owner: Identity
    account: Account


class LiveRequest:
    """A request for the duration of the RPC."""

    def __init__(
        self,
        mesh: Mesh,
        request: GenerationRequest,
        admitted: Admitted,
        received: Received,
        remaining_seconds: float | None,
        origin: str,
        client_limits: ClientLimits,
        waiting: Budget,
    ) -> None:
        now = asyncio.get_running_loop().time()
        self.owner = admitted.owner
        self.permits = admitted.permits
        seed = request.default_seed
        if seed is None:
            seed = secrets.randbits(64)
        accepted = router_pb.RequestAccepted(
            request_id=request.request_id, model=admitted.model, seed=seed
        )
        self.client = ClientStream(
            router_pb.GenerateEvent(accepted=accepted), mesh.writes, client_limits.credit
        )
        self.pace = Pace(client_limits, waiting, self.client, mesh.metrics, self._on_pace, self.end)
        self.client.watcher = self.pace
        self.context = RequestContext(
            mesh=mesh,
            request_id=request.request_id,
            model=admitted.model,
            drawn_seed=seed,
            received=received,
            client=self.client,
            pace=self.pace,
            siblings=Siblings(mesh.sibling_wait_seconds) if len(self.permits) > 1 else None,
            owner=admitted.owner.name,
            bucket=admitted.account.tokens,
            arrival_time=now,
            deadline=None if remaining_seconds is None else now + remaining_seconds,
            starting=StartQueue(mesh.starts, origin),
            running=StartQueue(mesh.continuations, origin),
        )
        self.ended: TrtmeshError | None = None
        """The error, if this router ended the call."""
        self.gone = asyncio.Event()
        self._handler = asyncio.current_task()
        self.waiting = deque(zip(received.rest_of(request), self.permits, strict=True))
        """Items that have not begun."""
        self.items: list[ItemRun] = []
        """The others."""
        self._stopped = set[int]()
        """Items that were stopped before they began."""
        self._live_items = len(self.waiting)
        self._has_refused = False
        for refused in request.refused:
            if refused.batch_index not in received.finished_items:
                self._has_refused = True
                ItemEvents(refused.batch_index, self.context).failed(refused.error, pb.Usage())
        if not self.waiting:
            self.client.close()

    def begin_next(self) -> ItemRun:
        """The next item, for `run`."""
        requested, permit = self.waiting.popleft()
        item = ItemRun(self.context, requested, permit)
        self.items.append(item)
        if requested.batch_index in self._stopped:
            item.stop()
        return item

    async def run(self, item: ItemRun) -> None:
        """Runs an item; the end of the last item closes the client's stream."""
        try:
            await item.run()
        finally:
            self._live_items -= 1
            if not self._live_items:
                self.client.close()

    @property
    def failed(self) -> bool:
        """Whether any of its items failed."""
        return self._has_refused or any(item.failed for item in self.items)

    def stop(self, batch_indexes: Collection[int]) -> int:
        """Stops the named items, or all; returns the number of stopped items."""
        before = len(self._stopped)
        self._stopped.update(
            item.batch_index
            for item, _ in self.waiting
            if not batch_indexes or item.batch_index in batch_indexes
        )
        chosen = [
            item for item in self.items if not batch_indexes or item.batch_index in batch_indexes
        ]
        return len(self._stopped) - before + sum(item.stop() for item in chosen)

    def end(self, error: TrtmeshError) -> None:
        """Ends the call with an error, even during a write to a stalled client."""
        if self.ended is None and self._handler is not None:
            self.ended = error
            self._handler.cancel()

    def dissolve(self) -> None:
        """Breaks the request's reference cycles after the end, so that memory is freed at once."""
        self.client.watcher = None
        for item in self.items:
            item.dissolve()
        self.items = []
        self.ended = self._handler = None

    def _on_pace(self) -> None:
        for item in self.items:
            item.on_pace()
