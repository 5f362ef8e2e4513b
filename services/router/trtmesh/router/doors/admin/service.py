"""RouterAdminService: the router's state, and an admin's changes to it. Adapters are UNIMPLEMENTED in this release."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import islice
from typing import Any, NoReturn

import grpc
from trtmesh.chassis.errors import NotFound, UnsupportedCall
from trtmesh.chassis.rpc import answering
from trtmesh.router.doors.admin.descriptions import (
    describe_decision,
    describe_requests,
    describe_tokenizer,
    describe_worker,
    describe_workers,
)
from trtmesh.router.fleet.fleet import Fleet
from trtmesh.router.fleet.membership import Membership
from trtmesh.router.placement import POLICIES
from trtmesh.router.requests.requests import Requests
from trtmesh.router.tokenizers.pool import TokenizerPool
from trtmesh.v1 import router_admin_pb2 as pb
from trtmesh.v1 import router_admin_pb2_grpc

WATCH_SECONDS = 0.25
"""Interval between two looks at watched workers."""

_Context = grpc.aio.ServicerContext[Any, Any]


class RouterAdminService(router_admin_pb2_grpc.RouterAdminServiceServicer):
    def __init__(
        self, fleet: Fleet, members: Membership, tokenizers: TokenizerPool, requests: Requests
    ) -> None:
        self._fleet = fleet
        self._members = members
        self._tokenizers = tokenizers
        self._requests = requests

    async def ListWorkers(
        self, request: pb.ListWorkersRequest, context: _Context
    ) -> pb.ListWorkersResponse:
        async with answering(context):
            return pb.ListWorkersResponse(
                workers=describe_workers(self._fleet.workers.values()),
                tokenizers=self._describe_tokenizers(),
                policy=self._fleet.policy,
                live_requests=len(self._requests.live),
            )

    async def ListRequests(
        self, request: pb.ListRequestsRequest, context: _Context
    ) -> pb.ListRequestsResponse:
        async with answering(context):
            live = self._requests.live
            if request.request_id:
                chosen = [live[request.request_id]] if request.request_id in live else []
            else:
                chosen = list(islice(live.values(), request.limit or None))
            return pb.ListRequestsResponse(
                requests=await describe_requests(chosen, self._worker_name), live_requests=len(live)
            )

    async def StopRequest(
        self, request: pb.StopRequestRequest, context: _Context
    ) -> pb.StopRequestResponse:
        async with answering(context, request.stop.request_id):
            stop = request.stop
            stopped = self._requests.stop(stop.request_id, frozenset(stop.batch_indexes))
            return pb.StopRequestResponse(stopped_items=stopped)

    async def GetPolicy(
        self, request: pb.GetPolicyRequest, context: _Context
    ) -> pb.GetPolicyResponse:
        async with answering(context):
            return pb.GetPolicyResponse(policy=self._fleet.policy, available=sorted(POLICIES))

    async def SetPolicy(
        self, request: pb.SetPolicyRequest, context: _Context
    ) -> pb.SetPolicyResponse:
        async with answering(context):
            return pb.SetPolicyResponse(previous=self._fleet.set_policy(request.policy))

    async def Explain(self, request: pb.ExplainRequest, context: _Context) -> pb.ExplainResponse:
        async with answering(context):
            wanted = request.request_id
            records = self._fleet.decisions.of_request(wanted)
            live = self._requests.live.get(wanted)
            if not records and live is None:
                raise NotFound(
                    f"request {wanted!r} has no recorded decision; the router keeps the last"
                    f" {self._fleet.decisions.most} (placement.explained_decisions)"
                )
            items = live.items if live else ()
            return pb.ExplainResponse(
                placements=map(describe_decision, records),
                usages=[item.usage() for item in items],
                usage_batch_indexes=[item.batch_index for item in items],
            )

    def _worker_name(self, address: str) -> str:
        worker = self._fleet.workers.get(address)
        return worker.name if worker else address

    def _describe_tokenizers(self) -> list[pb.TokenizerReplica]:
        pool = self._tokenizers
        return [describe_tokenizer(t, pool.problem(t)) for t in pool.tokenizers.values()]

    # mypy-protobuf types generators only; grpc.aio also accepts a coroutine with writes.
    async def WatchWorkers(self, request: pb.WatchWorkersRequest, context: _Context) -> None:  # type: ignore[override]
        async with answering(context):
            written = None
            while True:
                now = pb.WatchWorkersResponse(
                    workers=describe_workers(self._fleet.workers.values()),
                    tokenizers=self._describe_tokenizers(),
                )
                if now != written:
                    await context.write(now)
                    written = now
                await asyncio.sleep(WATCH_SECONDS)

    async def AddWorker(
        self, request: pb.AddWorkerRequest, context: _Context
    ) -> pb.AddWorkerResponse:
        async with answering(context):
            worker = self._members.add(request.address)
            return pb.AddWorkerResponse(worker=describe_worker(worker))

    async def DrainWorker(
        self, request: pb.DrainWorkerRequest, context: _Context
    ) -> pb.DrainWorkerResponse:
        async with answering(context):
            finish = request.finish_ms / 1000 if request.HasField("finish_ms") else None
            drained = await self._members.drain(request.worker, finish)
            return pb.DrainWorkerResponse(
                worker=describe_worker(drained.worker),
                finished_sequences=drained.finished,
                moved_sequences=drained.moved,
                left_sequences=drained.left,
            )

    async def ResumeWorker(
        self, request: pb.ResumeWorkerRequest, context: _Context
    ) -> pb.ResumeWorkerResponse:
        async with answering(context):
            worker = self._members.resume(request.worker)
            return pb.ResumeWorkerResponse(worker=describe_worker(worker))

    async def RemoveWorker(
        self, request: pb.RemoveWorkerRequest, context: _Context
    ) -> pb.RemoveWorkerResponse:
        async with answering(context):
            moved = self._members.remove(request.worker)
            return pb.RemoveWorkerResponse(moved_sequences=moved)

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: _Context) -> NoReturn:
        await _refuse("ListAdapters", context)

    async def AddAdapter(self, request: pb.AddAdapterRequest, context: _Context) -> NoReturn:
        await _refuse("AddAdapter", context)

    async def UploadAdapter(
        self, requests: AsyncIterator[pb.UploadAdapterRequest], context: _Context
    ) -> NoReturn:
        await _refuse("UploadAdapter", context)

    # As WatchWorkers.
    async def FetchAdapter(self, request: pb.FetchAdapterRequest, context: _Context) -> NoReturn:  # type: ignore[override]
        await _refuse("FetchAdapter", context)

    async def RemoveAdapter(self, request: pb.RemoveAdapterRequest, context: _Context) -> NoReturn:
        await _refuse("RemoveAdapter", context)

    async def PinAdapter(self, request: pb.PinAdapterRequest, context: _Context) -> NoReturn:
        await _refuse("PinAdapter", context)


async def _refuse(call: str, context: _Context) -> NoReturn:
    async with answering(context):
        raise UnsupportedCall(f"{call} is not served by this release")
    raise RuntimeError("unreachable: answering re-raises")
