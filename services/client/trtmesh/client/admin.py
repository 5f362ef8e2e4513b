"""The async client of a router's admin service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from trtmesh.chassis.adapter_content import UPLOAD_ACCEPTED, AdapterContent
from trtmesh.chassis.addresses import DEFAULT_ADMIN_ADDRESS
from trtmesh.chassis.bearer import AdminToken
from trtmesh.chassis.errors import DeadlineExceeded, InvalidField
from trtmesh.chassis.tls.client import ClientTls
from trtmesh.client.channel import ServerChannel, typed_errors
from trtmesh.v1 import router_admin_pb2 as pb
from trtmesh.v1 import router_admin_pb2_grpc, router_pb2
from trtmesh.v1.engine_pb2 import WorkerRole
from trtmesh.v1.generation_pb2 import AdapterFormat

PART_BYTES = 1 << 18
"""Bytes of a message of an upload."""

ROLES = ("mixed", "prefill", "decode")

T = TypeVar("T")


class AdminClient(ServerChannel):
    """A client of a router's admin address, for a single event loop.

        async with AdminClient("127.0.0.1:8003") as admin:
            for worker in (await admin.list_workers()).workers:
                ...

    `token` is a text or the result of `AdminToken.read`; a malformed token raises SettingsError, and so does an address
    not of the form host:port. `tls` is as in `Client`. Failed calls raise an error of `trtmesh.chassis.errors`:
    DeadlineExceeded after `timeout_seconds` without a sign of the router.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADMIN_ADDRESS,
        *,
        token: AdminToken | str | None = None,
        timeout_seconds: float = 10.0,
        max_message_bytes: int = 64 * 2**20,
        tls: ClientTls | None = None,
    ) -> None:
        # The call's own deadline bounds the wait for a busy router.
        super().__init__(
            address,
            max_message_bytes=max_message_bytes,
            connect_seconds=2 * timeout_seconds,
            tls=tls,
            secret=AdminToken.of(token) if isinstance(token, str) else token,
        )
        self._timeout_seconds = timeout_seconds

    async def list_workers(self) -> pb.ListWorkersResponse:
        """Workers and tokenizers of the router."""
        return await self._short(self._stub.ListWorkers, pb.ListWorkersRequest())

    async def watch_workers(self) -> AsyncGenerator[pb.WatchWorkersResponse, None]:
        """Workers and tokenizers, now and after each change. Closing (`contextlib.aclosing`) ends the call."""
        call = self._stub.WatchWorkers(pb.WatchWorkersRequest(), metadata=self.metadata)
        try:
            while True:
                response = await self._long(call.read())
                if response is grpc.aio.EOF:
                    return
                yield response
        finally:
            call.cancel()

    async def add_worker(
        self, address: str, *, wait_seconds: float | None = None
    ) -> pb.AddWorkerResponse:
        """Makes the router connect to a worker.

        Raises WorkerLost, and removes the worker again, without an answer within `wait_seconds` (None means 5). 0 does
        not wait.
        """
        wait_ms = None if wait_seconds is None else round(wait_seconds * 1000)
        request = pb.AddWorkerRequest(address=address, wait_ms=wait_ms)
        return await self._long(self._stub.AddWorker(request, metadata=self.metadata))

    async def drain_worker(
        self,
        worker: str,
        *,
        finish_seconds: float | None = None,
        by_seconds: float | None = None,
    ) -> pb.DrainWorkerResponse:
        """Drains a worker, by name or address, and returns once all sequences have finished or moved.

        They may finish there for `finish_seconds`; None sets no limit. Or the worker will be gone in `by_seconds`, and
        its sequences move before.
        """
        finish_ms = None if finish_seconds is None else round(finish_seconds * 1000)
        by_ms = None if by_seconds is None else round(by_seconds * 1000)
        request = pb.DrainWorkerRequest(worker=worker, finish_ms=finish_ms, by_ms=by_ms)
        call = self._stub.DrainWorker(request, metadata=self.metadata)
        return await self._long(call)

    async def resume_worker(self, worker: str) -> pb.ResumeWorkerResponse:
        """Ends the drain of a worker. Raises NotFound for a removed worker; see `add_worker`."""
        return await self._short(self._stub.ResumeWorker, pb.ResumeWorkerRequest(worker=worker))

    async def remove_worker(self, worker: str) -> pb.RemoveWorkerResponse:
        """Removes a worker from the router; the sequences move."""
        return await self._short(self._stub.RemoveWorker, pb.RemoveWorkerRequest(worker=worker))

    async def rebalance_workers(
        self, *, room_tokens: int = 0, dry_run: bool = False
    ) -> pb.RebalanceWorkersResponse:
        """Moves streams with their KV where that pays: for room for a prompt of `room_tokens`, or to even out load and
        KV. Returns once all moves began."""
        request = pb.RebalanceWorkersRequest(dry_run=dry_run, room_tokens=room_tokens)
        return await self._long(self._stub.RebalanceWorkers(request, metadata=self.metadata))

    async def set_worker_role(self, worker: str, role: str) -> pb.SetWorkerRoleResponse:
        """Makes a worker, by name or address, `mixed`, `prefill` or `decode`, and returns once sequences of another
        phase have moved.
        """
        if role not in ROLES:
            raise InvalidField.of("role", role, f"one of {', '.join(ROLES)}")
        value = WorkerRole.Value(f"WORKER_ROLE_{role.upper()}")
        request = pb.SetWorkerRoleRequest(worker=worker, role=value)
        return await self._long(self._stub.SetWorkerRole(request, metadata=self.metadata))

    async def list_handoffs(self) -> pb.ListHandoffsResponse:
        """Live handoffs of the router, oldest first."""
        return await self._short(self._stub.ListHandoffs, pb.ListHandoffsRequest())

    async def list_requests(
        self, request_id: str = "", *, limit: int = 0
    ) -> pb.ListRequestsResponse:
        """Returns live requests, oldest first, at most `limit`; or only requests with `request_id`, of any owner."""
        request = pb.ListRequestsRequest(request_id=request_id, limit=limit)
        return await self._short(self._stub.ListRequests, request)

    async def stop_request(
        self, request_id: str, batch_indexes: Sequence[int] = (), *, owner: str = ""
    ) -> int:
        """Stops a request, or some of the items; returns the number of live items.

        Raises InvalidField if requests of several owners have the id and `owner` is not given.
        """
        stop = router_pb2.StopRequest(request_id=request_id, batch_indexes=batch_indexes)
        request = pb.StopRequestRequest(stop=stop, owner=owner)
        answer: pb.StopRequestResponse = await self._short(self._stub.StopRequest, request)
        return answer.stopped_items

    async def move_request(self, request_id: str, *, owner: str = "") -> pb.MoveRequestResponse:
        """Moves the sequences of a request to other workers with room; `owner` as in `stop_request`."""
        request = pb.MoveRequestRequest(request_id=request_id, owner=owner)
        return await self._short(self._stub.MoveRequest, request)

    async def list_adapters(self) -> pb.ListAdaptersResponse:
        """Returns the adapters of the registry and their versions, each with its workers."""
        return await self._short(self._stub.ListAdapters, pb.ListAdaptersRequest())

    async def add_adapter(self, adapter: pb.AddAdapterRequest) -> pb.Adapter:
        """Registers the adapter in a directory of the router (`source`), or a new version."""
        call = self._stub.AddAdapter(adapter, metadata=self.metadata)
        response: pb.AddAdapterResponse = await self._long(call)
        return response.adapter

    async def upload_adapter(
        self,
        adapter: pb.AddAdapterRequest,
        content: AdapterContent,
        *,
        on_sent: Callable[[int], object] = lambda _: None,
    ) -> pb.Adapter:
        """Registers an adapter with its content (`AdapterContent.read(directory, most_bytes)`), or a new version.

        The router refuses content with another digest. A cancelled upload leaves nothing. `on_sent` gets
        the size of each part.
        """

        async def parts() -> AsyncGenerator[pb.UploadAdapterRequest, None]:
            yield _description(adapter, content)
            name, value = UPLOAD_ACCEPTED
            if (await call.initial_metadata()).get(name) == value:
                for part in _parts(content):
                    yield part
                    on_sent(len(part.data))

        call = self._stub.UploadAdapter(parts(), metadata=self.metadata)
        response: pb.UploadAdapterResponse = await self._long(call)
        return response.adapter

    async def remove_adapter(self, adapter_id: int, version: str = "") -> None:
        """Forgets and unloads an adapter, or a single version; running items finish on the old content."""
        request = pb.RemoveAdapterRequest(id=adapter_id, version=version)
        await self._short(self._stub.RemoveAdapter, request)

    async def pin_adapter(self, adapter_id: int, *, pinned: bool = True) -> pb.Adapter:
        """Keeps an adapter loaded, or allows eviction again."""
        request = pb.PinAdapterRequest(id=adapter_id, pinned=pinned)
        response: pb.PinAdapterResponse = await self._short(self._stub.PinAdapter, request)
        return response.adapter

    async def get_policy(self) -> pb.GetPolicyResponse:
        """Returns the current placement policy, and all available policies."""
        return await self._short(self._stub.GetPolicy, pb.GetPolicyRequest())

    async def set_policy(self, policy: str) -> pb.SetPolicyResponse:
        """Changes the placement policy, for placements from now on."""
        return await self._short(self._stub.SetPolicy, pb.SetPolicyRequest(policy=policy))

    async def explain(self, request_id: str, *, owner: str = "") -> pb.ExplainResponse:
        """Placements of the items of a request, live or over; `owner` as in `stop_request`."""
        request = pb.ExplainRequest(request_id=request_id, owner=owner)
        return await self._short(self._stub.Explain, request)

    @property
    def _stub(self) -> Any:
        return router_admin_pb2_grpc.RouterAdminServiceStub(self.channel)

    async def _short(self, method: Callable[..., Awaitable[T]], request: Message) -> T:
        """The response of a fast call."""
        try:
            with typed_errors(self.address):
                return await method(request, timeout=self._timeout_seconds, metadata=self.metadata)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                f"the router at {self.address} gave no answer for {self._timeout_seconds:g} s: it is frozen, overloaded"
                " or cut off"
            ) from error

    async def _long(self, answer: Awaitable[T]) -> T:
        """The response of a slow call; short calls meanwhile check for a live router."""
        coming = asyncio.ensure_future(answer)
        try:
            while not (await asyncio.wait((coming,), timeout=self._timeout_seconds / 2))[0]:
                await self.get_policy()
            with typed_errors(self.address):
                return coming.result()
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)


def _description(adapter: pb.AddAdapterRequest, content: AdapterContent) -> pb.UploadAdapterRequest:
    """The first message of an upload, with the digest to expect."""
    described = pb.AddAdapterRequest(version=content.version)
    described.MergeFrom(adapter)
    return pb.UploadAdapterRequest(
        adapter=described,
        format=AdapterFormat.ValueType(content.format),
        config_bytes=len(content.config),
        weights_bytes=len(content.weights),
    )


def _parts(content: AdapterContent) -> Iterator[pb.UploadAdapterRequest]:
    """The other messages of an upload."""
    for data in (content.config, content.weights):
        for start in range(0, len(data), PART_BYTES):
            yield pb.UploadAdapterRequest(data=data[start : start + PART_BYTES])
