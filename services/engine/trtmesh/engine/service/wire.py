"""Encodes the backend's dataclasses as messages of engine.proto."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields

from trtmesh.chassis.error_wire import to_proto
from trtmesh.chassis.service import SCHEMA_REVISION
from trtmesh.chassis.vocabulary import Tensor
from trtmesh.engine.backend import (
    BackendInfo,
    BackendStats,
    BlocksRemoved,
    BlocksStored,
    HeldAdapter,
    KvEvent,
    PerfMetrics,
    PromptDetails,
    SequenceEnd,
    TokenDetails,
)
from trtmesh.engine.handoff.descriptor import shape_of
from trtmesh.engine.handoff.own_kv import OwnKv, OwnStates
from trtmesh.engine.service.step_part import StepPart
from trtmesh.engine.settings import EngineSettings
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import kv_transfer_pb2 as transfer

_STATS_FIELDS = [
    field.name for field in fields(BackendStats) if field.name in epb.Load.DESCRIPTOR.fields_by_name
]
_PERF_FIELDS = [field.name for field in fields(PerfMetrics)]
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
    engine = epb.GetEngineResponse(
        worker=worker,
        role=role_of(settings, info),
        schema_revision=SCHEMA_REVISION,
        instance=secrets.token_hex(8),
        load_interval_ms=max(1, round(settings.load_interval_seconds * 1000)),
        **same,
        **asdict(info.capabilities),
    )
    if isinstance(own, OwnKv):
        _describe_kv(engine, own)
    elif own is not None:
        _describe_states(engine, own)
    return engine


def _describe_kv(engine: epb.GetEngineResponse, own: OwnKv) -> None:
    engine.kv_shapes.extend(map(shape_of, own.memory.shards))
    engine.kv_compatibility_hash = own.hash(None)
    engine.kv_transports.extend(own.transports)
    engine.max_lease_ms = int(own.limits.max_lease_seconds * 1000)
    engine.max_quarantined_blocks = own.max_quarantined_blocks


def _describe_states(engine: epb.GetEngineResponse, own: OwnStates) -> None:
    engine.handoff_kind = own.kind.kind
    engine.kv_compatibility_hash = own.hash(None)
    engine.kv_transports.append(transfer.KV_TRANSPORT_BACKEND)
    engine.max_lease_ms = int(own.limits.max_lease_seconds * 1000)


def fill_step(step: epb.Step, part: StepPart, ends: Sequence[epb.SequenceEnd]) -> None:
    """Writes `part` and `ends` into the empty message `step`."""
    step.step_count = part.step_count
    step.handles.extend(part.handles)
    step.token_offsets.extend(part.token_offsets)
    step.token_counts.extend(part.token_counts)
    step.token_ids.extend(part.token_ids)
    step.ends.extend(ends)
    for details in part.details:
        _fill_details(step.details.add(handle=details.key).details, details)
    for prompt in part.prompts:
        _fill_prompt(step.prompts.add(handle=prompt.key).details, prompt)
    for start in part.starts:
        _fill_metrics(step.starts.add(handle=start.key).perf_metrics, start.perf_metrics)


def end_message(
    handle: int, end: SequenceEnd, handoff: transfer.HandoffDescriptor | None = None
) -> epb.SequenceEnd:
    """Encodes the end of the sequence with this handle; `handoff` describes the KV of one handed over."""
    message = epb.SequenceEnd(
        handle=handle,
        reason=pb.FinishReason.ValueType(end.reason),
        prompt_tokens=end.prompt_tokens,
        cached_prompt_tokens=end.cached_prompt_tokens,
        generated_tokens=end.generated_tokens,
        stop_token_ids=end.stop_token_ids,
        cumulative_log_prob=end.cumulative_log_prob,
        error=to_proto(end.error) if end.error else None,
        handoff=handoff,
    )
    if end.perf_metrics:
        _fill_metrics(message.perf_metrics, end.perf_metrics)
    return message


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


def _fill_metrics(message: pb.PerfMetrics, metrics: PerfMetrics) -> None:
    for name in _PERF_FIELDS:
        setattr(message, name, getattr(metrics, name))


def _fill_details(message: pb.TokenDetails, details: TokenDetails) -> None:
    message.log_probs.extend(details.log_probs)
    message.model_log_probs.extend(details.model_log_probs)
    if details.cumulative_log_prob is not None:
        message.cumulative_log_prob = details.cumulative_log_prob
    message.top_log_probs.extend(map(_top_log_probs, details.top_log_probs))
    if details.generation_logits:
        message.generation_logits.CopyFrom(_tensor(details.generation_logits))


def _fill_prompt(message: pb.PromptDetails, prompt: PromptDetails) -> None:
    message.token_offset = prompt.token_offset
    message.log_probs.extend(prompt.log_probs)
    message.top_log_probs.extend(map(_top_log_probs, prompt.top_log_probs))
    if prompt.context_logits:
        message.context_logits.CopyFrom(_tensor(prompt.context_logits))


def _top_log_probs(alternatives: Sequence[tuple[int, float]]) -> pb.TopLogProbs:
    return pb.TopLogProbs(
        token_ids=[token for token, _ in alternatives],
        log_probs=[log_prob for _, log_prob in alternatives],
    )


def _tensor(tensor: Tensor) -> pb.Tensor:
    return pb.Tensor(
        data_type=pb.DataType.ValueType(tensor.data_type), shape=tensor.shape, data=tensor.data
    )
