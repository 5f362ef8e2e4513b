"""A worker's description and reports, as values of this router."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Self

from trtmesh.chassis.fingerprint import tokenizer_fits
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.router.placement import WHOLE, Capability, Place, Residency
from trtmesh.router.placement.rates import Report
from trtmesh.router.placement.residency import AdapterKey
from trtmesh.router.values.request import with_texts
from trtmesh.v1 import engine_pb2 as pb

PHASES_OF_ROLE: dict[int, set[Capability]] = {
    pb.WORKER_ROLE_PREFILL: {Capability.PREFILL},
    pb.WORKER_ROLE_DECODE: {Capability.DECODE},
}
"""Phases of roles that compute part of an item."""

PLACES: dict[int, Place] = {
    pb.ADAPTER_PLACE_HOST: Place.HOST,
    pb.ADAPTER_PLACE_DEVICE: Place.DEVICE,
}


@dataclass(frozen=True, slots=True)
class Identity:
    """Fingerprints shared by workers able to continue each other's items; '' equals only ''."""

    model_fingerprint: str = ""
    tokenizer_fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """A worker as GetEngineResponse describes it."""

    identity: Identity = Identity()
    capabilities: frozenset[Capability] = WHOLE
    supported_fields: frozenset[str] = frozenset()
    max_sequence_tokens: int = sys.maxsize
    max_sequences: int = sys.maxsize
    """Most sequences of an item."""
    max_beams: int = sys.maxsize
    """Most beams of an item: they are computed in one batch."""
    tokens_per_block: int = 0

    @classmethod
    def of(cls, engine: pb.GetEngineResponse) -> Self:
        max_sequences = engine.max_sequences_per_item or sys.maxsize
        return cls(
            Identity(engine.model_fingerprint, engine.tokenizer_fingerprint),
            capabilities_of(engine),
            with_texts(engine.supported_fields),
            engine.max_sequence_tokens or sys.maxsize,
            max_sequences,
            min(max_sequences, engine.max_batch_size or sys.maxsize),
            engine.tokens_per_block,
        )


def capabilities_of(engine: pb.GetEngineResponse) -> frozenset[Capability]:
    return _capabilities(engine.role, engine.resumes_exactly, engine.stops_single_sequences)


@cache
def _capabilities(role: int, resumes_exactly: bool, single_stops: bool) -> frozenset[Capability]:  # noqa: FBT001 - a key
    """Equal capabilities as one object, which placements compare by identity."""
    own = {Capability.EXACT_RESUMPTION: resumes_exactly, Capability.SINGLE_STOPS: single_stops}
    phases = PHASES_OF_ROLE.get(role, WHOLE)
    return frozenset(phases | {capability for capability, there in own.items() if there})


def held_adapters(
    before: Mapping[AdapterKey, Residency], states: Iterable[pb.AdapterState]
) -> Mapping[AdapterKey, Residency]:
    """The adapters in a worker's memory after changed states."""
    held = dict(before)
    for state in states:
        key = state.id, state.version
        if place := PLACES.get(state.place):
            adapter = Adapter(state.id, state.name, state.version)
            held[key] = Residency(adapter, place, state.rank, state.pinned)
        else:
            held.pop(key, None)
    return held


def tokenizer_mismatch(engine: pb.GetEngineResponse, fingerprint: str) -> str:
    """Why a worker's tokenizer does not fit the mesh's with `fingerprint`, or ''."""
    theirs = engine.tokenizer_fingerprint
    if tokenizer_fits(theirs, fingerprint):
        return ""
    if not theirs:
        return (
            f"it reports no tokenizer, so whether the mesh's, {fingerprint}, is that of its model is unknown; put the"
            " model's tokenizer files beside its weights"
        )
    return (
        f"its tokenizer has the fingerprint {theirs} but the mesh encodes with {fingerprint}; serve the same"
        " tokenizer files to both"
    )


def report_of(load: pb.Load, now: float) -> Report:
    """A load report received at `now`."""
    return Report(
        at=now,
        busy_seconds=load.busy_seconds,
        step_count=load.step_count,
        running_sequences=load.running_sequences,
        waiting_sequences=load.waiting_sequences,
        pending_prompt_tokens=load.pending_prompt_tokens,
        computed_prompt_tokens=load.computed_prompt_tokens,
        used_blocks=load.used_blocks,
        total_blocks=load.total_blocks,
        adapter_slots=(load.adapter_slots, load.free_adapter_slots, load.evictable_adapter_slots),
    )
