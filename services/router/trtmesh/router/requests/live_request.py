"""A request for the duration of the RPC, and its items from start to end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextvars import copy_context
from functools import partial
from os import urandom

from trtmesh.chassis.errors import TrtmeshError
from trtmesh.chassis.fair.limits import Budget
from trtmesh.chassis.fair.turns import StartQueue
from trtmesh.chassis.frozen import frozen
from trtmesh.router.admission import Account, Permit
from trtmesh.router.callers.identity import Identity
from trtmesh.router.metrics import CHAT, TEXT_COMPLETION
from trtmesh.router.requests.context import Mesh, RequestContext
from trtmesh.router.requests.item import ItemRun, TracedItemRun
from trtmesh.router.requests.item_events import ItemEvents
from trtmesh.router.requests.siblings import Siblings
from trtmesh.router.streams.client_stream import ClientStream, Pace
from trtmesh.router.tracing import CallTrace
from trtmesh.router.values.request import GenerationRequest, ItemRequest
from trtmesh.router.values.resumption import Received
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb


@frozen
class Admitted:
    """The right of a request to run: a permit for each item, and the account of its owner."""

    model: str
    items: Sequence[ItemRequest]
    """The items that the client has not received to the end."""
    permits: Sequence[Permit]
    owner: Identity
    account: Account


class LiveRequest:
    """A request for the duration of the RPC. Runs its items from `start` to `end_items`, as a call of its start
    queues."""

    def __init__(
        self,
        mesh: Mesh,
        request: GenerationRequest,
        admitted: Admitted,
        received: Received,
        remaining_seconds: float | None,
        origin: str,
        waiting: Budget,
        paused: set[LiveRequest],
        trace: CallTrace | None,
    ) -> None:
        """`paused` are the requests that wait until their clients read."""
        now = asyncio.get_running_loop().time()
        self.owner = admitted.owner
        self.permits = admitted.permits
        seed = request.default_seed
        if seed is None:
            seed = int.from_bytes(urandom(8))
        opening = router_pb.GenerateEvent()
        accepted = opening.accepted
        accepted.request_id, accepted.model = request.request_id, admitted.model
        accepted.seed = seed
        self.client = ClientStream(opening, mesh.writes)
        self.pace = Pace(waiting, self.client, mesh.metrics, self._on_pace, self.end)
        self.client.watcher = self.pace
        self._paused = paused
        self.context = RequestContext(
            mesh=mesh,
            latencies=mesh.metrics.models[admitted.model].latencies[
                CHAT if request.is_chat else TEXT_COMPLETION
            ],
            request_id=request.request_id,
            model=admitted.model,
            drawn_seed=seed,
            received=received,
            client=self.client,
            pace=self.pace,
            siblings=Siblings() if len(self.permits) > 1 else None,
            owner=admitted.owner.name,
            bucket=admitted.account.tokens,
            arrival_time=now,
            deadline=None if remaining_seconds is None else now + remaining_seconds,
            starting=StartQueue(mesh.starts, origin),
            running=StartQueue(mesh.continuations, origin),
            trace_id="" if trace is None else trace.trace_id,
            trace=trace,
        )
        if trace is not None:
            trace.began(admitted.model)
        self.ended: TrtmeshError | None = None
        """The error, if this router ended the call."""
        self.gone: asyncio.Event | None = None
        """Set at the end of the call, once anybody waits for it."""
        self._handler = asyncio.current_task()
        self._unbegun = deque(zip(admitted.items, self.permits, strict=True))
        """Items that have not begun."""
        self.items: list[ItemRun] = []
        """The others."""
        self._stopped = set[int]()
        """Items that were stopped before they began."""
        self._account = admitted.account
        self._log_context = copy_context()
        """Of the request: turns are given in the contexts of others."""
        self._running: dict[Permit, asyncio.Task[None]] = {}
        """The items that were not cancelled."""
        self._left = len(self._unbegun)
        self._ending = False
        self._over: asyncio.Future[None] | None = None
        """Of `end_items`, which waits for the last item."""
        self._refusal = ""
        for refused in request.refused:
            if refused.batch_index not in received.finished_items:
                self._refusal = refused.error.reason
                ItemEvents(refused.batch_index, self.context).failed(refused.error, pb.Usage())
        if not self._unbegun:
            self.client.close()

    @property
    def failure(self) -> str:
        """The reason word of its first item that failed, or ''."""
        for item in self.items:
            if item.failure:
                return item.failure
        return self._refusal

    def unplaced(self) -> Iterator[tuple[ItemRequest, int]]:
        """Its items that wait for a worker, each with the number of sequences. Read by the thread of the metrics."""
        for requested, _ in [*self._unbegun]:
            yield requested, requested.sequences
        for item in [*self.items]:
            if sequences := item.unplaced:
                yield item.requested, sequences

    def stop(self, batch_indexes: Collection[int]) -> int:
        """Stops the named items, or all; returns the number of stopped items."""
        before = len(self._stopped)
        self._stopped.update(
            item.batch_index
            for item, _ in self._unbegun
            if not batch_indexes or item.batch_index in batch_indexes
        )
        chosen = [
            item for item in self.items if not batch_indexes or item.batch_index in batch_indexes
        ]
        return len(self._stopped) - before + sum(item.stop() for item in chosen)

    async def move(self) -> tuple[int, int]:
        """Moves its running sequences to other workers. Returns how many leave now, and how many stay for want of
        room."""
        moved = left = 0
        for item in [*self.items]:
            leaving, staying = item.leave_workers("an admin moved it")
            moved, left = moved + leaving, left + staying
            # A request may have thousands of items.
            await asyncio.sleep(0)
        return moved, left

    def end(self, error: TrtmeshError) -> None:
        """Ends the call with an error, even during a write to a stalled client."""
        if self.ended is None and self._handler is not None:
            self.ended = error
            self._handler.cancel()

    def start(self) -> None:
        """Starts the first item at once, as part of the request's own turn, and the others in turns."""
        if self._unbegun:
            self._start_next()
        if self._unbegun:
            self.context.starting.add(self)

    async def end_items(self) -> None:
        """Ends all items, even if this wait is cancelled. Items that have not started never do."""
        self._ending = True
        if self._unbegun:
            self.context.starting.remove(self)
        while self._unbegun:
            self._leave(self._unbegun.popleft()[1])
        if self._running:
            self.context.running.add(self)
        if self._left:
            self._over = asyncio.get_running_loop().create_future()
            await self._over
        else:
            self._dissolve()

    def proceed(self) -> None:
        """Starts or cancels the next item."""
        if not self._ending:
            self._start_next()
            if self._unbegun:
                self.context.starting.add_later(self)
        elif self._running:
            permit = next(iter(self._running))
            task = self._running.pop(permit)
            # Its end never waits, but only queues commands.
            task.cancel()
            if self._running:
                self.context.running.add_later(self)

    def _start_next(self) -> None:
        requested, permit = self._unbegun.popleft()
        kind = ItemRun if self.context.trace is None else TracedItemRun
        ended = partial(self._ended, permit)
        item = kind(self.context, requested, permit, ended)
        self.items.append(item)
        if requested.batch_index in self._stopped:
            item.stop()
        context = self._log_context.copy()
        task = asyncio.get_running_loop().create_task(item.run(), context=context)
        self._running[permit] = task
        # Also of the task, because a task cancelled before the first step runs no code.
        task.add_done_callback(ended)

    def _ended(self, permit: Permit, *_: object) -> None:
        if not permit.valid:
            return
        self._running.pop(permit, None)
        self._leave(permit)
        if self._ending and not self._left:
            self._dissolve()
            if self._over is not None and not self._over.done():
                self._over.set_result(None)

    def _leave(self, permit: Permit) -> None:
        """The end of the last item closes the client's stream."""
        permit.give_back()
        self._account.item_ended()
        self._left -= 1
        if not self._left:
            self.client.close()

    def _dissolve(self) -> None:
        """Breaks the request's reference cycles after the end, so that memory is freed at once."""
        self.client.watcher = None
        for item in self.items:
            item.dissolve()
        self.items = []
        self.ended = self._handler = None

    def _on_pace(self) -> None:
        if self.pace.paused:
            self._paused.add(self)
        else:
            self._paused.discard(self)
        for item in self.items:
            item.on_pace()
