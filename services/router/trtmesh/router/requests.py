"""The live requests of a router: opened by an RPC, found by name, ended with their RPC."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from trtmesh.chassis.errors import (
    AlreadyExists,
    Draining,
    ModelNotFound,
    NoWorker,
    TrtmeshError,
    Unavailable,
)
from trtmesh.router.admission import Admission, Permit, RateLimiter
from trtmesh.router.admission.rate_limit import ANONYMOUS
from trtmesh.router.client_stream import ClientStream
from trtmesh.router.fleet import Fleet
from trtmesh.router.item import ItemRun
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.pace import Pace, PaceRules
from trtmesh.router.replay import Recorder
from trtmesh.router.request import GenerationRequest
from trtmesh.router.resumption import NOTHING, Received
from trtmesh.router.siblings import SiblingRules, Siblings
from trtmesh.router.tokenizer_pool import TokenizerPool
from trtmesh.router.turns import Turns
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


class LiveRequest:
    """One request while its RPC runs."""

    def __init__(
        self,
        mesh: Mesh,
        request: GenerationRequest,
        model: str,
        remaining_seconds: float | None,
        permits: Sequence[Permit],
        api_key: str,
        received: Received,
        pace: PaceRules,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.mesh = mesh
        self.request_id = request.request_id
        self.model = model
        self.api_key = api_key
        self.drawn_seed = secrets.randbits(64)
        accepted = router_pb.RequestAccepted(
            request_id=request.request_id, model=model, seed=self.drawn_seed
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
            for item, permit in zip(received.rest_of(request), permits, strict=True)
        ]
        self._items_over = 0
        if not self.items:
            self.client.close()

    def age_seconds(self) -> float:
        return asyncio.get_running_loop().time() - self.arrival_time

    def spend(self, tokens: int) -> None:
        """Takes tokens from those that the caller's API key may use."""
        now = asyncio.get_running_loop().time()
        self.mesh.rate_limiter.spend(self.api_key, tokens, now)

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


class Requests:
    """All live requests."""

    def __init__(self, mesh: Mesh, pace: PaceRules) -> None:
        self._mesh = mesh
        self._pace = pace
        self._draining = False
        self._empty = asyncio.Event()
        self._empty.set()
        self.live: dict[str, LiveRequest] = {}

    @asynccontextmanager
    async def open(
        self,
        request: GenerationRequest,
        remaining_seconds: float | None,
        api_key: str = ANONYMOUS,
        received: Received = NOTHING,
    ) -> AsyncIterator[LiveRequest]:
        """Runs what was not received of a request's items while inside; leaving stops those that are not over.
        `api_key` is the name of the caller's API key, never the key."""
        model = self.served_model(request.model)
        permits = self._admit(request, len(received.rest_of(request)), model, api_key)
        live = LiveRequest(
            self._mesh, request, model, remaining_seconds, permits, api_key, received, self._pace
        )
        self.live[request.request_id] = live
        self._empty.clear()
        tasks = [asyncio.create_task(item.live()) for item in live.items]
        for task, permit in zip(tasks, permits, strict=True):
            # A callback, because a task that is cancelled before its first step runs nothing of its own.
            task.add_done_callback(partial(_give_back, permit))
        try:
            yield live
        finally:
            for task in tasks:
                task.cancel()
            # Before anything is awaited: a client may cancel at this very moment too, and would cut off what follows.
            del self.live[request.request_id]
            live.gone.set()
            live.pace.close()
            if not self.live:
                self._empty.set()
            # An item's end never waits: it only queues stop commands.
            await asyncio.gather(*tasks, return_exceptions=True)
            live.dissolve()

    def stop(self, request_id: str, batch_indexes: Collection[int]) -> int:
        """Stops items of a request; 0 when it is unknown or over."""
        live = self.live.get(request_id)
        return live.stop(batch_indexes) if live else 0

    def served_model(self, name: str) -> str:
        """The model of that name, or the only one for ''. Raises NoWorker where none is known, and ModelNotFound."""
        models = self._mesh.fleet.models()
        if name in models:
            return name
        if not models:
            raise NoWorker(self._mesh.fleet.why_no_models(), retry_after_ms=1000)
        known = ", ".join(sorted(models))
        if name:
            raise ModelNotFound(f"model {name!r} is not served here; models are: {known}")
        if len(models) == 1:
            return next(iter(models))
        raise ModelNotFound(f"the request names no model but several are served: {known}")

    async def drain(self) -> None:
        """Refuses new requests and waits until none is live."""
        self._draining = True
        await self._empty.wait()

    def end_slow_clients(self) -> None:
        """Ends requests whose clients let too much wait, or wait too long."""
        now = asyncio.get_running_loop().time()
        for live in self.live.values():
            live.pace.judge(now)

    async def take_over(self, request_id: str) -> None:
        """Ends the call of a live request whose client comes back with another one."""
        if (live := self.live.get(request_id)) is not None:
            live.end(Unavailable(f"request {request_id!r} goes on in another call"))
            await live.gone.wait()

    def send_away(self) -> None:
        """Ends the calls of all live requests; their clients may go on elsewhere."""
        for live in self.live.values():
            live.end(Draining("this router stops; resume the request on another"))

    def _admit(
        self, request: GenerationRequest, items: int, model: str, api_key: str
    ) -> list[Permit]:
        if self._draining:
            raise Draining("this router is draining; send the request to another", retry_after_ms=0)
        if request.request_id in self.live:
            raise AlreadyExists(
                f"request {request.request_id!r} is live; choose another request_id"
            )
        try:
            self._mesh.rate_limiter.check(api_key, asyncio.get_running_loop().time())
            return self._mesh.admission.take(model, items)
        except TrtmeshError as error:
            self._mesh.metrics.note_refusal(error.reason, api_key)
            if self._mesh.recorder is not None:
                self._mesh.recorder.note_refused(request, model, error)
            raise


def _give_back(permit: Permit, task: asyncio.Task[None]) -> None:
    del task
    permit.give_back()
