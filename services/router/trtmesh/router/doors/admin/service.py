"""RouterAdminService: the router's state, and an admin's changes to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from trtmesh.chassis.adapter_content import UPLOAD_ACCEPTED
from trtmesh.chassis.errors import AdapterNotFound, InvalidField, NotFound
from trtmesh.chassis.logs import rebind_request_id
from trtmesh.chassis.process_facts import unix_ms
from trtmesh.chassis.rpc import RpcContext, ServedContext
from trtmesh.chassis.service import Runtime
from trtmesh.router.adapters.adapters import Adapters
from trtmesh.router.adapters.registry import Entry, Registration
from trtmesh.router.doors.admin.adapters import (
    Holder,
    describe_adapter,
    items_of_adapter,
    parts_of,
    read_upload,
    registration_of,
)
from trtmesh.router.doors.admin.descriptions import (
    describe_decision,
    describe_each,
    describe_handoffs,
    describe_hedge,
    describe_hedging,
    describe_move,
    describe_requests,
    describe_tokenizer,
    describe_worker,
    describe_workers,
)
from trtmesh.router.fleet.discovery import Discovery
from trtmesh.router.fleet.fleet import Fleet
from trtmesh.router.fleet.membership import Membership
from trtmesh.router.fleet.pins import check_pins
from trtmesh.router.handoffs.table import HandoffTable
from trtmesh.router.hedging.hedger import Hedger
from trtmesh.router.movement.movement import Movement
from trtmesh.router.placement import POLICIES
from trtmesh.router.requests.live_request import LiveRequest
from trtmesh.router.requests.requests import Requests
from trtmesh.router.tokenizers.pool import TokenizerPool
from trtmesh.router.values.request import parse_stopped
from trtmesh.v1 import router_admin_pb2 as pb
from trtmesh.v1 import router_admin_pb2_grpc

WATCH_SECONDS = 0.25
"""Interval between two looks at watched workers."""

ANSWER_SECONDS = 5.0
"""Wait for a new worker, unless the admin names another."""


class RouterAdminService(router_admin_pb2_grpc.RouterAdminServiceServicer):
    def __init__(
        self,
        fleet: Fleet,
        handoffs: HandoffTable,
        adapters: Adapters,
        members: Membership,
        tokenizers: TokenizerPool,
        requests: Requests,
        hedger: Hedger,
        movement: Movement,
        discoveries: Sequence[Discovery],
        runtime: Runtime,
    ) -> None:
        self._fleet = fleet
        self._handoffs = handoffs
        self._adapters = adapters
        self._members = members
        self._tokenizers = tokenizers
        self._requests = requests
        self._hedger = hedger
        self._movement = movement
        self._discoveries = discoveries
        self._runtime = runtime

    async def ListWorkers(
        self, request: pb.ListWorkersRequest, context: RpcContext
    ) -> pb.ListWorkersResponse:
        return pb.ListWorkersResponse(
            workers=await describe_workers(self._fleet.workers.values()),
            tokenizers=self._describe_tokenizers(),
            policy=self._fleet.policy,
            live_requests=len(self._requests.live),
            draining=self._requests.draining,
            hedging=describe_hedging(self._hedger),
            process=self._runtime.process,
            unix_ms=unix_ms(),
            discovery_problems=[
                problem for each in self._discoveries for problem in each.problems.values()
            ],
        )

    async def ListRequests(
        self, request: pb.ListRequestsRequest, context: RpcContext
    ) -> pb.ListRequestsResponse:
        live = self._requests.live
        named = self._requests.find_all(request.request_id) if request.request_id else live.values()
        chosen = list(islice(named, request.limit or None))
        return pb.ListRequestsResponse(
            requests=await describe_requests(chosen, self._worker_name), live_requests=len(live)
        )

    async def StopRequest(
        self, request: pb.StopRequestRequest, context: RpcContext
    ) -> pb.StopRequestResponse:
        rebind_request_id(request.stop.request_id)
        stop = request.stop
        items = parse_stopped(stop)
        live = self._only_live(stop.request_id, request.owner)
        stopped = live.stop(items) if live else 0
        return pb.StopRequestResponse(stopped_items=stopped)

    async def MoveRequest(
        self, request: pb.MoveRequestRequest, context: RpcContext
    ) -> pb.MoveRequestResponse:
        rebind_request_id(request.request_id)
        live = self._only_live(request.request_id, request.owner)
        moved, left = await live.move() if live else (0, 0)
        return pb.MoveRequestResponse(moved_sequences=moved, left_sequences=left)

    async def GetPolicy(
        self, request: pb.GetPolicyRequest, context: RpcContext
    ) -> pb.GetPolicyResponse:
        return pb.GetPolicyResponse(policy=self._fleet.policy, available=sorted(POLICIES))

    async def SetPolicy(
        self, request: pb.SetPolicyRequest, context: RpcContext
    ) -> pb.SetPolicyResponse:
        return pb.SetPolicyResponse(previous=self._fleet.set_policy(request.policy))

    async def Explain(self, request: pb.ExplainRequest, context: RpcContext) -> pb.ExplainResponse:
        wanted = request.request_id
        records = self._fleet.decisions.of_request(wanted)
        named = self._requests.find_all(wanted)
        owner = _only_owner(
            wanted,
            request.owner,
            {record.owner for record in records} | {each.owner.name for each in named},
        )
        records = [record for record in records if record.owner == owner]
        live = next((each for each in named if each.owner.name == owner), None)
        if not records and live is None:
            raise NotFound(
                f"request {wanted!r} has no recorded decision; the router keeps the last"
                f" {self._fleet.decisions.most}"
            )
        items = live.items if live else ()
        return pb.ExplainResponse(
            placements=map(describe_decision, records),
            usages=[item.usage() for item in items],
            usage_batch_indexes=[item.batch_index for item in items],
            hedges=map(describe_hedge, self._hedger.of_request(wanted, owner)),
        )

    def _only_live(self, request_id: str, owner: str) -> LiveRequest | None:
        """The live request of the name and owner. Raises InvalidField if there are several."""
        named = {live.owner.name: live for live in self._requests.find_all(request_id)}
        return named.get(_only_owner(request_id, owner, named.keys()))

    def _worker_name(self, address: str) -> str:
        worker = self._fleet.workers.get(address)
        return worker.name if worker else address

    def _describe_tokenizers(self) -> list[pb.TokenizerReplica]:
        pool = self._tokenizers
        return [describe_tokenizer(t, pool.problem(t)) for t in pool.tokenizers.values()]

    # mypy-protobuf types generators only; grpc.aio also accepts a coroutine with writes.
    async def WatchWorkers(self, request: pb.WatchWorkersRequest, context: RpcContext) -> None:  # type: ignore[override]
        written = None
        while True:
            now = pb.WatchWorkersResponse(
                workers=await describe_workers(self._fleet.workers.values()),
                tokenizers=self._describe_tokenizers(),
            )
            if now != written:
                await context.write(now)
                written = now
            await asyncio.sleep(WATCH_SECONDS)

    async def AddWorker(
        self, request: pb.AddWorkerRequest, context: RpcContext
    ) -> pb.AddWorkerResponse:
        wait = request.wait_ms / 1000 if request.HasField("wait_ms") else ANSWER_SECONDS
        worker = await self._members.add(request.address, wait)
        return pb.AddWorkerResponse(worker=describe_worker(worker))

    async def DrainWorker(
        self, request: pb.DrainWorkerRequest, context: RpcContext
    ) -> pb.DrainWorkerResponse:
        finish = request.finish_ms / 1000 if request.HasField("finish_ms") else None
        if request.HasField("by_ms"):
            if finish is not None:
                raise InvalidField("exclude each other", fields=("finish_ms", "by_ms"))
            drained = await self._movement.drain_by(request.worker, request.by_ms / 1000)
        else:
            drained = await self._members.drain(request.worker, finish)
        return pb.DrainWorkerResponse(
            worker=describe_worker(drained.worker),
            finished_sequences=drained.finished,
            moved_sequences=drained.moved,
            left_sequences=drained.left,
            only_here=drained.only_here,
        )

    async def ResumeWorker(
        self, request: pb.ResumeWorkerRequest, context: RpcContext
    ) -> pb.ResumeWorkerResponse:
        worker = await self._members.resume(request.worker)
        return pb.ResumeWorkerResponse(worker=describe_worker(worker))

    async def RemoveWorker(
        self, request: pb.RemoveWorkerRequest, context: RpcContext
    ) -> pb.RemoveWorkerResponse:
        moved = await self._members.remove(request.worker)
        return pb.RemoveWorkerResponse(moved_sequences=moved)

    async def ListAdapters(
        self, request: pb.ListAdaptersRequest, context: RpcContext
    ) -> pb.ListAdaptersResponse:
        adapters = self._adapters
        holders = Holder.each_of(self._fleet.workers.values())
        described = await describe_each(
            [*adapters.entries()],
            partial(describe_adapter, adapters=adapters, workers=holders),
            partial(items_of_adapter, workers=len(holders)),
        )
        return pb.ListAdaptersResponse(
            adapters=sorted(described, key=lambda adapter: (adapter.name, adapter.id)),
            revision=adapters.registry.revision,
        )

    async def AddAdapter(
        self, request: pb.AddAdapterRequest, context: RpcContext
    ) -> pb.AddAdapterResponse:
        asked = registration_of(request)
        asked = self._completed(asked)
        entry = await self._adapters.add(asked, request.source, self._fleet.try_adapter)
        return pb.AddAdapterResponse(adapter=self._describe_adapter(entry))

    # The stubs have the synchronous context of grpc.
    async def UploadAdapter(  # type: ignore[override]
        self, requests: AsyncIterator[pb.UploadAdapterRequest], context: ServedContext
    ) -> pb.UploadAdapterResponse:
        self._adapters.check_owner()
        asked, content = await read_upload(
            requests,
            partial(context.send_initial_metadata, (UPLOAD_ACCEPTED,)),
        )
        asked = self._completed(asked)
        entry = await self._adapters.upload(asked, content, self._fleet.try_adapter)
        return pb.UploadAdapterResponse(adapter=self._describe_adapter(entry))

    # As WatchWorkers.
    async def FetchAdapter(self, request: pb.FetchAdapterRequest, context: RpcContext) -> None:  # type: ignore[override]
        known = self._adapters.version_of(request.id, request.version)
        if known is None:
            raise AdapterNotFound(
                f"is {request.id}, of which this router has no version {request.version!r}",
                field="id",
                value=str(request.id),
            )
        entry, version = known
        content = await self._adapters.load(entry.identity(version), version)
        for part in parts_of(content):
            await context.write(part)

    async def RemoveAdapter(
        self, request: pb.RemoveAdapterRequest, context: RpcContext
    ) -> pb.RemoveAdapterResponse:
        await self._adapters.remove(request.id, request.version)
        return pb.RemoveAdapterResponse()

    async def PinAdapter(
        self, request: pb.PinAdapterRequest, context: RpcContext
    ) -> pb.PinAdapterResponse:
        if request.pinned:
            for each in self._adapters.registry.of_number(request.id):
                check_pins(self._fleet, self._adapters, each.key, len(each.versions))
        entry = await self._adapters.pin(request.id, pinned=request.pinned)
        return pb.PinAdapterResponse(adapter=self._describe_adapter(entry))

    async def SetWorkerRole(
        self, request: pb.SetWorkerRoleRequest, context: RpcContext
    ) -> pb.SetWorkerRoleResponse:
        worker, moved = await self._members.set_role(request.worker, request.role)
        return pb.SetWorkerRoleResponse(worker=describe_worker(worker), moved_sequences=moved)

    async def RebalanceWorkers(
        self, request: pb.RebalanceWorkersRequest, context: RpcContext
    ) -> pb.RebalanceWorkersResponse:
        moves = await self._movement.rebalance(request.room_tokens, dry_run=request.dry_run)
        described = partial(describe_move, name_of=self._worker_name)
        return pb.RebalanceWorkersResponse(moves=map(described, moves))

    async def ListHandoffs(
        self, request: pb.ListHandoffsRequest, context: RpcContext
    ) -> pb.ListHandoffsResponse:
        live, given = self._handoffs.live.values(), self._handoffs.given.values()
        found = await describe_handoffs(live, given)
        return pb.ListHandoffsResponse(handoffs=found)

    def _describe_adapter(self, entry: Entry) -> pb.Adapter:
        holders = Holder.each_of(self._fleet.workers.values())
        return describe_adapter(entry, self._adapters, holders)

    def _completed(self, asked: Registration) -> Registration:
        """The registration with the model of an adapter that has the name already. Raises InvalidField if a model must
        be named, as in a fleet of several; AdaptersFull for a pin too many."""
        known = self._adapters.registry.of_name(asked.name)
        named = {entry.model for entry in known if not entry.brought}
        if not asked.model and len(named) == 1:
            asked = replace(asked, model=named.pop())
        models = self._fleet.models()
        if not asked.model and len(models) > 1:
            raise InvalidField.of("model", asked.model, f"one of {', '.join(sorted(models))}")
        entry = self._adapters.registry.entries.get((asked.model, asked.number))
        if asked.pinned or (entry and entry.pinned):
            stay = len(entry.versions) if entry and asked.canary_share is not None else 0
            check_pins(self._fleet, self._adapters, (asked.model, asked.number), stay + 1)
        return asked


def _only_owner(request_id: str, owner: str, owners: Collection[str]) -> str:
    """Returns the given or the only owner. Raises InvalidField if an owner must be given."""
    if not owner and len(owners) > 1:
        known = ", ".join(sorted(owners))
        raise InvalidField(
            f"is unset, but {request_id!r} names requests of several owners: {known}",
            field="owner",
            limit=f"one of {known}",
        )
    return owner or next(iter(owners), "")
