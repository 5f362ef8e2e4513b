"""The live requests of a router: opened by an RPC, found by name, ended with their RPC."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from time import monotonic
from typing import TypeAlias

from trtmesh.chassis.errors import (
    AlreadyExists,
    Draining,
    ModelNotFound,
    NoWorker,
    TrtmeshError,
    Unavailable,
)
from trtmesh.chassis.fair.limits import Budget
from trtmesh.chassis.quoting import quoted
from trtmesh.router.callers.identity import Identity
from trtmesh.router.metrics import ModelMetrics
from trtmesh.router.requests.context import Mesh
from trtmesh.router.requests.live_request import Admitted, LiveRequest
from trtmesh.router.streams import client_stream
from trtmesh.router.streams.client_stream import ClientLimits
from trtmesh.router.tracing import CallTrace
from trtmesh.router.values.request import GenerationRequest, ItemRequest
from trtmesh.router.values.resumption import NOTHING, Received

RETRY_MS = 1000
"""Time after which a balancer hardly sends a client here again."""

STALL_SECONDS = 1.0
"""Time without a token after which a sequence counts as stalled."""

RequestKey: TypeAlias = tuple[str, str]
"""Name of the owner, and id. Another caller's request is not found, as if it did not exist."""

Admission: TypeAlias = Callable[[GenerationRequest, Received, Identity], Awaitable[Admitted]]
"""Admits the rest of an owner's request. Raises the refusal."""


class RunningRequest(AbstractAsyncContextManager[LiveRequest]):
    """The block in which a request lives. A class, because an asynchronous generator costs a start a tenth more."""

    def __init__(
        self,
        requests: Requests,
        request: GenerationRequest,
        received: Received,
        remaining_seconds: float | None,
        owner: Identity,
        origin: str,
        admission: Admission,
    ) -> None:
        self._requests, self._request, self._received = requests, request, received
        self._remaining_seconds, self._owner, self._origin = remaining_seconds, owner, origin
        self._admission = admission
        self._trace: CallTrace | None = None

    def traced(self, trace: CallTrace) -> None:
        """Has the request tell its history. Call before the block."""
        self._trace = trace
        trace.opens(self._request)

    async def __aenter__(self) -> LiveRequest:
        """Starts the items. Raises the refusal."""
        requests, request, received = self._requests, self._request, self._received
        admitted = await self._admission(request, received, self._owner)
        self._live = live = requests.begin(
            request,
            admitted,
            received,
            self._remaining_seconds,
            self._origin,
            self._trace,
        )
        live.start()
        return live

    async def __aexit__(self, *_: object) -> None:
        """Ends the items that run."""
        # Before any await, since a cancellation by the client could interrupt the await.
        self._requests.ended(self._live)
        self._live.pace.close()
        await self._live.end_items()


class Requests:
    """All live requests."""

    def __init__(self, mesh: Mesh, client_limits: ClientLimits) -> None:
        self._mesh = mesh
        self.tracer = mesh.tracer
        self._waiting = Budget(client_limits.total_bytes)
        self.draining = False
        """Whether new requests are refused because the process ends."""
        self._empty = asyncio.Event()
        """Set when none is live, for `drain`."""
        self.live: dict[RequestKey, LiveRequest] = {}
        self.paused: set[LiveRequest] = set()
        """The requests waiting for their clients to read."""
        self._none_unread_until = 0.0

    def open(
        self,
        request: GenerationRequest,
        remaining_seconds: float | None,
        owner: Identity,
        origin: str,
        received: Received = NOTHING,
    ) -> RunningRequest:
        """Runs a request's items, or what is left after `received`, inside the block and stops the rest on exit. They
        share the turns of `origin`, the client's address."""
        return RunningRequest(
            self, request, received, remaining_seconds, owner, origin, self._admit_new
        )

    def resume(
        self,
        request: GenerationRequest,
        received: Received,
        remaining_seconds: float | None,
        owner: Identity,
        origin: str,
    ) -> RunningRequest:
        """Runs the rest of a request as `open` does. Admission ends the owner's live call of that id, if any."""
        return RunningRequest(
            self, request, received, remaining_seconds, owner, origin, self._admit_again
        )

    async def _admit_new(
        self, request: GenerationRequest, received: Received, owner: Identity
    ) -> Admitted:
        """Admits a request of a new id. Raises the refusal."""
        if self.find(owner, request.request_id) is not None:
            raise AlreadyExists(
                f"{request.request_id!r} is live; choose another", field="request_id"
            )
        return self._admit(request, received, owner)

    async def _admit_again(
        self, request: GenerationRequest, received: Received, owner: Identity
    ) -> Admitted:
        """Admits a request in the place of the owner's live call of its id, which ends. Raises the refusal."""
        former = self.find(owner, request.request_id)
        admitted = self._admit(request, received, owner, former)
        try:
            await self._end_former_calls(request.request_id, owner)
        except BaseException:
            # The client may be gone by now.
            for permit in admitted.permits:
                permit.give_back()
                admitted.account.item_ended()
            raise
        return admitted

    def begin(
        self,
        request: GenerationRequest,
        admitted: Admitted,
        received: Received,
        remaining_seconds: float | None,
        origin: str,
        trace: CallTrace | None,
    ) -> LiveRequest:
        """Makes an admitted request live; `ended` follows."""
        live = LiveRequest(
            self._mesh,
            request,
            admitted,
            received,
            remaining_seconds,
            origin,
            self._waiting,
            self.paused,
            trace,
        )
        self.live[admitted.owner.name, request.request_id] = live
        return live

    def ended(self, live: LiveRequest) -> None:
        del self.live[live.owner.name, live.context.request_id]
        self.paused.discard(live)
        if live.gone is not None:
            live.gone.set()
        if self.draining and not self.live:
            self._empty.set()

    def find(self, owner: Identity, request_id: str) -> LiveRequest | None:
        return self.live.get((owner.name, request_id))

    def find_all(self, request_id: str) -> list[LiveRequest]:
        """The live requests of this id, of every owner: for admins."""
        return [live for (_, name), live in self.live.items() if name == request_id]

    def stop(self, owner: Identity, request_id: str, batch_indexes: Collection[int]) -> int:
        """Stops items of the owner's request; returns the number of stopped items."""
        live = self.find(owner, request_id)
        return live.stop(batch_indexes) if live else 0

    def served_model(self, name: str) -> str:
        """Resolves a model's name; '' means the first of `router.models`, else the only model. A model of
        `router.models` needs no worker yet. Raises NoWorker or ModelNotFound."""
        if known := self._known_model(name):
            return known
        if not (models := self._mesh.fleet.models()):
            raise NoWorker(self._mesh.fleet.why_no_models(), retry_after_ms=1000)
        known = ", ".join(sorted(models))
        if name:
            raise ModelNotFound(
                f"{quoted(name)} is not served here; models are: {known}",
                field="model",
                value=quoted(name),
                limit=f"one of {known}",
            )
        raise ModelNotFound(
            f"is empty but several are served: {known}; the router's setting models chooses a default",
            field="model",
            limit=f"one of {known}",
        )

    def metrics_of(self, name: str) -> ModelMetrics:
        """Returns the metrics of a model by the name in a request. Unserved names count together."""
        return self._mesh.metrics.models[self._known_model(name)]

    def _known_model(self, name: str) -> str:
        """The model that a request means by a name, or ''."""
        models, configured = self._mesh.fleet.models(), self._mesh.fleet.configured
        name = name or next(iter(configured or (models if len(models) == 1 else ())), "")
        return name if name in models or name in configured else ""

    def unplaced(self) -> Iterator[tuple[str, ItemRequest, int]]:
        """The items that wait for a worker: the model, the item, its waiting sequences. Called on the thread of the
        metrics endpoint."""
        for live in [*self.live.values()]:
            for item, sequences in live.unplaced():
                yield live.context.model, item, sequences

    async def drain(self) -> None:
        """Refuses new requests and waits until none is live."""
        self.draining = True
        while self.live:
            # A call may end in favour of another call of the same request.
            self._empty.clear()
            await self._empty.wait()

    def end_slow_clients(self) -> None:
        """Ends requests of clients past their limits. Looks only at requests waiting for clients, or at all requests
        once a message may be unread for too long."""
        now = asyncio.get_running_loop().time()
        looked_at: Collection[LiveRequest] = self.paused
        if now > self._none_unread_until:
            looked_at = self.live.values()
            longest = max((each.client.unread_seconds(now) for each in looked_at), default=0.0)
            self._none_unread_until = now + client_stream.UNREAD_SECONDS - longest
        for live in looked_at:
            live.pace.judge(now)

    def stalled_sequences(self) -> int:
        """Sequences whose last token came long ago, without those whose client does not read. Called on any thread."""
        since = monotonic() - STALL_SECONDS
        return sum(
            0.0 < run.times.last_token < since and not run.over
            for live in [*self.live.values()]
            if not live.pace.paused
            for item in [*live.items]
            for run in item.sequences
        )

    def send_away(self) -> None:
        """Ends the calls of all live requests; their clients may resume on another router."""
        for live in self.live.values():
            live.end(Draining("this router stops; resume the request on another"))

    async def _end_former_calls(self, request_id: str, owner: Identity) -> None:
        while (former := self.find(owner, request_id)) is not None:
            former.end(Unavailable(f"request {request_id!r} continues in another call"))
            former.gone = former.gone or asyncio.Event()
            await former.gone.wait()

    def check_rates(self, request: GenerationRequest, owner: Identity) -> None:
        """Raises RateLimited where `open` would, before anything is done for the request."""
        now = asyncio.get_running_loop().time()
        try:
            self._mesh.rate_limiter.account_of(owner, now).check_rates(request.size, now)
        except TrtmeshError as error:
            self._note_refused(request, request.model, owner, error)
            raise

    def _note_refused(
        self, request: GenerationRequest, model: str, owner: Identity, error: TrtmeshError
    ) -> None:
        self._mesh.metrics.note_refusal(error.reason, owner.name)
        if self._mesh.recorder is not None:
            self._mesh.recorder.note_refused(request, model, error)

    def _admit(
        self,
        request: GenerationRequest,
        received: Received,
        owner: Identity,
        former: LiveRequest | None = None,
    ) -> Admitted:
        """Admits a request, in the place of a running `former` call if any. Raises the refusal."""
        model = self.served_model(request.model)
        if self.draining:
            raise Draining(
                "this router is draining; send the request to another", retry_after_ms=RETRY_MS
            )
        if former is not None and former.ended is not None:
            # A third call took the place.
            former = None
        now = asyncio.get_running_loop().time()
        account = self._mesh.rate_limiter.account_of(owner, now)
        leaving = former.permits if former else ()
        try:
            finished = received.finished_items
            rest: Sequence[ItemRequest] = request.items
            if finished:
                rest = [item for item in rest if item.batch_index not in finished]
            items = len(rest)
            if account.is_limited:
                if former is None and not (received.sequences or finished):
                    account.check_rates(items, now)
                else:
                    # Who lost a router continues everything at once, in debt if need be.
                    account.check_item_debt(now)
                    if former is None:
                        account.check_token_debt(now)
                account.check_priority(max((i.config.priority for i in request.items), default=0))
                account.check_live(items, freed=sum(permit.valid for permit in leaving))
            permits = self._mesh.admission.admit(model, items, leaving)
        except TrtmeshError as error:
            self._note_refused(request, model, owner, error)
            raise
        account.open(items, now)
        return Admitted(model, rest, permits, owner, account)
