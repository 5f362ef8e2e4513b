"""Encodes the backend's dataclasses as messages of engine.proto."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from hashlib import blake2b

from trtmesh.chassis.error_wire import to_proto
from trtmesh.chassis.revisions import SCHEMA_REVISION
from trtmesh.engine.backend import (
    BackendInfo,
    BackendStats,
    BlocksRemoved,
    BlocksStored,
    HeldAdapter,
    KvEvent,
)
from trtmesh.engine.handoff.descriptor import shape_of
from trtmesh.engine.handoff.own_kv import OwnKv, OwnStates
from trtmesh.engine.settings import EngineSettings
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import kv_transfer_pb2 as transfer

_STATS_FIELDS = [
    field.name for field in fields(BackendStats) if field.name in epb.Load.DESCRIPTOR.fields_by_name
]
_INFO_FIELDS = [
    field.name
    for field in fields(BackendInfo)
    if field.name in epb.GetEngineResponse.DESCRIPTOR.fields_by_name
]


def role_of(settings: EngineSettings, info: BackendInfo) -> epb.WorkerRole.ValueType:
    if info.started_role is not None and "role" not in settings.model_fields_set:
        return info.started_role
    return epb.WorkerRole.Value(f"WORKER_ROLE_{settings.role.upper()}")


def describe(
    info: BackendInfo, worker: str, settings: EngineSettings, own: OwnKv | OwnStates | None
) -> epb.GetEngineResponse:
    """Describes the worker; `own` is None without handoffs."""
    same = {name: getattr(info, name) for name in _INFO_FIELDS}
    same["supported_fields"] = sorted(info.supported_fields)
    same["computation"] = _computation(info, settings)
    engine = epb.GetEngineResponse(
        worker=worker,
        role=role_of(settings, info),
        schema_revision=SCHEMA_REVISION,
        instance=secrets.token_hex(8),
        load_interval_ms=max(1, round(settings.load_interval_seconds * 1000)),
        **same,
        **asdict(info.capabilities),
    )
    if own is not None:
        _describe_handoffs(engine, own)
    return engine


def _computation(info: BackendInfo, settings: EngineSettings) -> Mapping[str, str]:
    told = info.computation
    if told is None:
        content = getattr(settings, settings.backend).model_dump_json()
        told = {"settings": blake2b(content.encode(), digest_size=16).hexdigest()}
    data_type = pb.DataType.DESCRIPTOR.values_by_number[info.data_type].name
    return {"backend": info.backend, "data_type": data_type, **told}


def _describe_handoffs(engine: epb.GetEngineResponse, own: OwnKv | OwnStates) -> None:
    engine.kv_compatibility_hash = own.hash(None)
    engine.max_lease_ms = int(own.limits.max_lease_seconds * 1000)
    if isinstance(own, OwnKv):
        engine.kv_shapes.extend(map(shape_of, own.memory.shards))
        engine.kv_transports.extend(own.transports)
        engine.max_quarantined_blocks = own.max_quarantined_blocks
    else:
        engine.handoff_kind = own.kind.kind
        engine.kv_transports.append(transfer.KV_TRANSPORT_BACKEND)


def load_message(stats: BackendStats, *, draining: bool) -> epb.Load:
    return epb.Load(draining=draining, **{name: getattr(stats, name) for name in _STATS_FIELDS})


def kv_event_message(event: KvEvent) -> epb.KvEvent:
    if isinstance(event, BlocksStored):
        stored = epb.KvBlocksStored(
            parent_hash=event.parent_hash,
            block_hashes=event.block_hashes,
            token_ids=event.token_ids,
            adapter_id=event.adapter.id if event.adapter else 0,
            adapter_version=event.adapter.version if event.adapter else "",
        )
        return epb.KvEvent(stored=stored)
    if isinstance(event, BlocksRemoved):
        return epb.KvEvent(removed=epb.KvBlocksRemoved(block_hashes=event.block_hashes))
    return epb.KvEvent(cleared=epb.KvBlocksCleared())


def adapter_states(held: Iterable[HeldAdapter]) -> epb.AdapterStates:
    return epb.AdapterStates(adapters=map(_adapter_state, held))


def _adapter_state(held: HeldAdapter) -> epb.AdapterState:
    return epb.AdapterState(
        **asdict(held.adapter),
        place=held.place,
        rank=held.rank,
        size_bytes=held.size_bytes,
        pinned=held.pinned,
        error=to_proto(held.error) if held.error else None,
    )
