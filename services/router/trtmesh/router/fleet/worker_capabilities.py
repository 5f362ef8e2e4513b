"""A worker's description and reports: their contract, and what they mean to this router."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass, field
from itertools import chain
from typing import Self

from trtmesh.chassis.fingerprint import tokenizer_fits
from trtmesh.chassis.parsing import ELEMENT_BYTES
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.router.links.contract import ContractBroken, check_names, check_numbers
from trtmesh.router.placement import KvFacts, Place, Residency, Role
from trtmesh.router.placement.rates import Report
from trtmesh.router.placement.residency import AdapterKey
from trtmesh.router.values.request import with_texts
from trtmesh.v1 import engine_pb2 as pb
from trtmesh.v1 import kv_transfer_pb2 as kv_pb

ROLES: dict[int, Role] = {
    pb.WORKER_ROLE_PREFILL: Role.PREFILL,
    pb.WORKER_ROLE_DECODE: Role.DECODE,
}
"""Roles other than mixed."""

PLACES: dict[int, Place] = {
    pb.ADAPTER_PLACE_HOST: Place.HOST,
    pb.ADAPTER_PLACE_DEVICE: Place.DEVICE,
}

MOST_COUNTED = 2**53
"""Largest counter, and bytes: exact as a metric."""

MOST_SEQUENCES, MOST_BLOCKS, MOST_TOKENS = 2**20, 2**31, 2**40

HANDOFF_COUNTS = tuple(
    field.name for field in pb.Load.DESCRIPTOR.fields_by_name["sent_handoffs"].message_type.fields
)

MOST_LISTED = 4096
"""Most names in a description."""

MOST_ADAPTERS = 2**16
"""Most adapters in a worker's memory."""


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """Fingerprints shared by workers able to continue each other's items; '' equals only ''."""

    model_fingerprint: str = ""
    tokenizer_fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class WorkerCapabilities:
    """A worker as GetEngineResponse describes it."""

    identity: Fingerprints = Fingerprints()
    computation: Mapping[str, str] = field(default_factory=dict)
    """What tokens depend on beside model, tokenizer and request, by name."""
    is_exact: bool = False
    """Whether it resumes sequences exactly."""
    supported_fields: frozenset[str] = frozenset()
    max_sequence_tokens: int = sys.maxsize
    longest_sequence: int = sys.maxsize
    """Tokens at which it ends a sequence that is alone there."""
    end_ids: tuple[int, ...] = ()
    """The model's."""
    max_sequences: int = sys.maxsize
    """Most sequences of an item."""
    max_beams: int = sys.maxsize
    """Most beams of an item: they are computed in one batch."""
    most_present: int = sys.maxsize
    """Most sequences, running and waiting, before the worker refuses more."""
    tokens_per_block: int = 0
    kv: KvFacts | None = None
    """None without handoffs."""
    max_lease_seconds: float = math.inf
    """Longest life of a lease without a renewal."""
    max_quarantined_blocks: int = sys.maxsize
    """Most blocks in quarantine with which the worker reserves blocks."""

    @classmethod
    def of(cls, engine: pb.GetEngineResponse) -> Self:
        max_sequences = engine.max_sequences_per_item or sys.maxsize
        return cls(
            Fingerprints(engine.model_fingerprint, engine.tokenizer_fingerprint),
            {**engine.computation},
            engine.resumes_exactly,
            with_texts(engine.supported_fields),
            engine.max_sequence_tokens or sys.maxsize,
            longest_sequence(engine),
            tuple(engine.end_ids),
            max_sequences,
            min(max_sequences, engine.max_batch_size or sys.maxsize),
            most_present(engine),
            engine.tokens_per_block,
            kv_facts(engine),
            engine.max_lease_ms / 1000 or math.inf,
            engine.max_quarantined_blocks,
        )

    @property
    def kind(self) -> Mapping[str, str]:
        """Equal for workers that give equal tokens, if they promise to."""
        own = {"model": self.identity.model_fingerprint}
        return own | {"tokenizer": self.identity.tokenizer_fingerprint} | {**self.computation}

    @property
    def has_leases(self) -> bool:
        """Whether KV of running sequences moves, and waits for clients: under leases of blocks."""
        return self.kv is not None and not self.kv.state_kind

    def refuses_handoffs(self, load: pb.Load) -> bool:
        """Whether the worker reserves no blocks, because too many wait for reads of ended handoffs."""
        return self.kv is not None and load.quarantined_blocks > self.max_quarantined_blocks


def unlike(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """The names of what differs between two kinds, or ''."""
    return ", ".join(name for name in {**one, **other} if one.get(name) != other.get(name))


def cuts_short(most: int, former: int, tokens: int) -> bool:
    """Whether a worker of `most` tokens a sequence ends one of up to `tokens`, its prompt included, before a worker of
    `former` tokens does."""
    return most < min(former, tokens)


def longest_sequence(engine: pb.GetEngineResponse) -> int:
    # The last token's KV is never computed.
    room = engine.total_blocks * engine.tokens_per_block + 1
    return min(engine.max_sequence_tokens or sys.maxsize, room if room > 1 else sys.maxsize)


def most_present(engine: pb.GetEngineResponse) -> int:
    if not (engine.HasField("max_queue_size") and engine.max_batch_size):
        return sys.maxsize
    return engine.max_batch_size + engine.max_queue_size


def kv_facts(engine: pb.GetEngineResponse) -> KvFacts | None:
    """What a transfer of KV needs to know; None for a worker without handoffs."""
    shapes = engine.kv_shapes
    has_kv = shapes or engine.handoff_kind
    if not (has_kv and engine.kv_compatibility_hash and engine.kv_transports):
        return None
    return KvFacts(
        engine.kv_compatibility_hash,
        frozenset(shape.data_type for shape in shapes),
        sum(map(_token_bytes, shapes)),
        frozenset(engine.kv_transports),
        engine.handoff_kind,
    )


def _token_bytes(shape: kv_pb.KvBlockShape) -> int:
    """Bytes of a token's keys and values in one pool."""
    elements = 2 * shape.layers * shape.kv_heads * shape.head_dim
    return elements * ELEMENT_BYTES.get(shape.data_type, 0)


def role_of(engine: pb.GetEngineResponse, load: pb.Load) -> Role:
    """The present role: a load report's, before the first one the configured."""
    return ROLES.get(load.role or engine.role, Role.MIXED)


def changes_of(
    states: Iterable[pb.AdapterState],
) -> Mapping[AdapterKey, Residency | None]:
    """Returns the changed states of adapters, None for an adapter no longer in memory."""
    changes: dict[AdapterKey, Residency | None] = {}
    for state in states:
        place = PLACES.get(state.place)
        adapter = Adapter(state.id, state.name, state.version)
        changes[state.id, state.version] = (
            Residency(adapter, place, state.rank, state.pinned) if place else None
        )
    return changes


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
        generated_tokens=load.generated_tokens,
        accepted_draft_tokens=load.accepted_draft_tokens,
        used_blocks=load.used_blocks,
        total_blocks=load.total_blocks,
        received_bytes=load.received_handoffs.bytes,
        receiving_seconds=load.received_handoffs.transfer_ms / 1000,
        receiving_sequences=load.received_handoffs.held,
        receiving_tokens=load.receiving_tokens,
        adapter_slots=(load.adapter_slots, load.free_adapter_slots, load.evictable_adapter_slots),
    )


def check_engine(engine: pb.GetEngineResponse) -> None:
    """Raises ContractBroken."""
    check_names(
        name=engine.worker,
        backend=engine.backend,
        model=engine.model,
        model_fingerprint=engine.model_fingerprint,
        tokenizer_fingerprint=engine.tokenizer_fingerprint,
        handoff_kind=engine.handoff_kind,
        instance=engine.instance,
    )
    lists: dict[str, Sized] = {
        "supported_fields": engine.supported_fields,
        "end_ids": engine.end_ids,
        "draft_methods": engine.draft_methods,
        "kv_shapes": engine.kv_shapes,
        "kv_transports": engine.kv_transports,
        "computation": engine.computation,
    }
    for name, listed in lists.items():
        if len(listed) > MOST_LISTED:
            raise ContractBroken(f"its {name} has {len(listed)} entries, more than {MOST_LISTED}")
    computation = chain.from_iterable(engine.computation.items())
    for name in (*engine.supported_fields, *engine.draft_methods, *computation):
        check_names(field=name)
    check_numbers(engine, MOST_SEQUENCES, "max_batch_size", "max_sequences_per_item")
    check_numbers(engine, MOST_BLOCKS, "tokens_per_block", "total_blocks")


def check_load(load: pb.Load) -> None:
    """Raises ContractBroken."""
    check_numbers(
        load,
        MOST_SEQUENCES,
        *("running_sequences", "waiting_sequences", "paused_sequences"),
        *("adapter_slots", "free_adapter_slots", "evictable_adapter_slots"),
    )
    check_numbers(
        load,
        MOST_BLOCKS,
        *("total_blocks", "used_blocks", "free_blocks", "host_blocks", "used_host_blocks"),
        "quarantined_blocks",
    )
    check_numbers(load, MOST_TOKENS, "pending_prompt_tokens", "receiving_tokens")
    check_numbers(
        load,
        MOST_COUNTED,
        *("step_count", "computed_prompt_tokens", "reused_prompt_tokens", "generated_tokens"),
        *("received_items", "preemptions", "new_blocks", "reused_blocks", "busy_seconds"),
        *("host_memory_bytes", "device_memory_bytes", "pinned_memory_bytes"),
        *("adapter_host_bytes", "used_adapter_host_bytes"),
        *("adapter_loads", "adapter_evictions", "adapter_hits"),
        *("draft_tokens", "accepted_draft_tokens"),
    )
    for name in ("sent_handoffs", "received_handoffs"):
        if load.HasField(name):
            check_numbers(getattr(load, name), MOST_COUNTED, *HANDOFF_COUNTS)


def check_states(states: pb.AdapterStates) -> None:
    """Raises ContractBroken."""
    if len(states.adapters) > MOST_ADAPTERS:
        raise ContractBroken(
            f"it reports {len(states.adapters)} adapters, more than {MOST_ADAPTERS}"
        )
    for state in states.adapters:
        check_names(adapter=state.name, version=state.version)
