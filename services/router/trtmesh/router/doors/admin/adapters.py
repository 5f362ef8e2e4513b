"""Adapters as messages of the admin API."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import NamedTuple

from trtmesh.chassis.adapter_content import AdapterContent
from trtmesh.chassis.error_wire import to_proto
from trtmesh.chassis.errors import InvalidField, InvalidRequest
from trtmesh.router.adapters.adapters import Adapters
from trtmesh.router.adapters.assembly import Assembly
from trtmesh.router.adapters.registry import Entry, Registration, Version, VersionKey
from trtmesh.router.fleet.worker import Worker
from trtmesh.router.placement import Place, WorkerAdapters
from trtmesh.v1 import engine_pb2, generation_pb2
from trtmesh.v1 import router_admin_pb2 as pb

PLACES: Mapping[Place, engine_pb2.AdapterPlace.ValueType] = {
    Place.HOST: engine_pb2.ADAPTER_PLACE_HOST,
    Place.DEVICE: engine_pb2.ADAPTER_PLACE_DEVICE,
}

PART_BYTES = 2**18


def registration_of(request: pb.AddAdapterRequest) -> Registration:
    return Registration(
        name=request.name,
        id=request.id,
        model=request.model,
        canary_share=request.canary_share if request.HasField("canary_share") else None,
        pinned=request.pinned,
        version=request.version,
    )


async def read_upload(
    requests: AsyncIterator[pb.UploadAdapterRequest],
    accept: Callable[[], Awaitable[object]],
) -> tuple[Registration, AdapterContent]:
    """The adapter and the content of an upload; `accept` asks for the content. Raises InvalidRequest."""
    first = await anext(requests, None)
    if first is None or not first.HasField("adapter"):
        raise InvalidField("is missing; the first message describes it", field="adapter")
    if first.adapter.source:
        raise InvalidField("is set, but an upload brings its content", field="adapter.source")
    registration = registration_of(first.adapter)
    registration.check()
    assembly = Assembly.of(first)
    await accept()
    assembly.add(first.data)
    async for part in requests:
        if part.HasField("adapter") or part.format or part.config_bytes or part.weights_bytes:
            raise InvalidRequest("only the first message describes the adapter and its content")
        assembly.add(part.data)
    return registration, await asyncio.to_thread(assembly.content)


def parts_of(content: AdapterContent) -> Iterator[pb.FetchAdapterResponse]:
    """A content as messages."""
    first = pb.FetchAdapterResponse(
        format=generation_pb2.AdapterFormat.ValueType(content.format),
        config_bytes=len(content.config),
        weights_bytes=len(content.weights),
        data=content.config,
    )
    yield first
    for offset in range(0, len(content.weights), PART_BYTES):
        yield pb.FetchAdapterResponse(data=content.weights[offset : offset + PART_BYTES])


WORKERS_PER_ITEM = 64
"""Workers that are asked for an adapter as fast as an item of a request is described."""


def items_of_adapter(entry: Entry, workers: int) -> int:
    """Items of requests that are described as fast as an adapter."""
    return len(entry.versions) * (1 + workers // WORKERS_PER_ITEM)


class Holder(NamedTuple):
    """A worker with all adapters and loads at one moment, for all adapters of a list."""

    name: str
    model: str
    adapters: WorkerAdapters

    @classmethod
    def each_of(cls, workers: Iterable[Worker]) -> list[Holder]:
        return [cls(worker.name, worker.description.model, worker.adapters) for worker in workers]


def describe_adapter(entry: Entry, adapters: Adapters, workers: Sequence[Holder]) -> pb.Adapter:
    versions = [_describe_version(entry, version, adapters, workers) for version in entry.versions]
    refusal = adapters.refusals.get(entry.key)
    return pb.Adapter(
        id=entry.id,
        name=entry.name,
        version=entry.current.digest,
        source=entry.current.source,
        pinned=entry.pinned,
        workers=[residency.worker for residency in versions[0].residencies],
        versions=versions,
        model=entry.model,
        brought=entry.brought,
        refused_version=refusal.version if refusal else "",
        refusal=to_proto(refusal.error) if refusal else None,
    )


def _describe_version(
    entry: Entry, version: Version, adapters: Adapters, workers: Sequence[Holder]
) -> pb.AdapterVersion:
    key = (entry.id, version.digest)
    usage = adapters.usages.of_key(key)
    return pb.AdapterVersion(
        version=version.digest,
        source=version.source,
        format=generation_pb2.AdapterFormat.ValueType(version.format),
        size_bytes=version.size_bytes,
        rank=usage.rank or version.rank,
        share=entry.share_of(version),
        residencies=_describe_residencies(key, entry.model, workers),
        items=usage.items,
        hits=usage.hits,
        loads=usage.loads,
        evictions=usage.evictions,
        error=to_proto(usage.error) if usage.error else None,
    )


def _describe_residencies(
    key: VersionKey, model: str, workers: Sequence[Holder]
) -> Iterator[pb.AdapterResidency]:
    for worker in workers:
        residency = worker.adapters.held.get(key)
        if residency is not None and model in ("", worker.model):
            use = worker.adapters.in_use.get(key)
            yield pb.AdapterResidency(
                worker=worker.name,
                place=PLACES[residency.place],
                pinned=residency.pinned,
                sequences=use.sequences if use else 0,
            )
