"""The input of a placement: the workers at this moment, and the needs of the item."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

from trtmesh.router.placement.residency import NO_ADAPTERS, AdapterNeed, WorkerAdapters


class Role(Enum):
    """The intended part of the work of a worker. Every worker can do all parts."""

    MIXED = "mixed"
    PREFILL = "prefill"
    """Prompts of items that decode elsewhere."""
    DECODE = "decode"
    """Whole items, and the decode phase of others."""


class Phase(Enum):
    """What a worker computes of an item."""

    WHOLE = "whole"
    PREFILL = "prefill"
    DECODE = "decode"


class KvFacts(NamedTuple):
    """What decides whether, and how fast, KV moves between two workers."""

    compatibility_hash: bytes
    data_types: frozenset[int]
    token_bytes: int
    """Bytes of a token's KV, of all layers and heads."""
    transports: frozenset[int]
    state_kind: str = ""
    """Kind of the state by which backends move the KV of a single sequence after the prefill; '' with leases."""

    @property
    def kind(self) -> tuple[bytes, frozenset[int]]:
        """Equal for workers that can hand over to each other."""
        return self.compatibility_hash, self.data_types

    def fits(self, other: KvFacts) -> bool:
        """Whether KV moves between the workers."""
        return self.kind == other.kind and not self.transports.isdisjoint(other.transports)


NOTHING: Mapping[str, Any] = MappingProxyType({})


class WorkerSnapshot(NamedTuple):
    """A worker at the moment of a placement, including everything this router dispatched until then.

    A tuple, because every dispatch builds a snapshot, and a frozen dataclass of this size takes four times as long.
    """

    address: str
    worker: str
    model: str
    problem: str
    """Why the worker takes no items, or ''."""
    supported_fields: frozenset[str]
    is_exact: bool = True
    """Whether it continues a sequence with the tokens that a worker of the same kind would have generated."""
    max_sequence_tokens: int = sys.maxsize
    """Most tokens of a sequence, prompt included."""
    max_sequences: int = sys.maxsize
    """Most sequences of an item."""
    max_beams: int = sys.maxsize
    """Most beams of an item."""
    tokens_per_block: int = 0
    """Tokens of a KV block; 0 without KV events."""
    most_sequences: int = sys.maxsize
    """Most sequences, running and waiting, before the worker refuses more."""
    role: Role = Role.MIXED
    kv: KvFacts | None = None
    """None without handoffs."""
    # The load, in the order of `Worker._figures`.
    last_turn: int = 0
    """Number of the last placement; 0 for none."""
    refuses_handoffs: bool = False
    """Whether too many blocks wait for reads of ended handoffs."""
    adapters: WorkerAdapters = NO_ADAPTERS
    sequences: int = 0
    """Running and waiting sequences of all routers."""
    wait_seconds: float = 0.0
    """Predicted time until another prompt starts."""
    prefill_seconds: float = 0.0
    """Predicted time per prompt token."""
    step_seconds: float = 0.0
    """Predicted time per step with one more sequence."""
    tokens_per_step: float = 1.0
    """Tokens of a sequence in a step, above 1 where drafts hold."""
    pressure_seconds: float = 0.0
    """Penalty for a nearly full KV cache."""
    warmth: float = 1.0
    """Progress of the slow start, from 0 to 1."""
    breaker_open: bool = False
    decoding_sequences: int = 0
    """Sequences that a prompt computed here delays at every chunk."""
    transfer_seconds: float = 0.0
    """Predicted time to receive the KV of a token."""
    receiving_tokens: int = 0
    """Tokens whose KV is to come from other workers."""


LOAD_AT = WorkerSnapshot._fields.index("last_turn")
"""Where the load begins. Another load replaces the fields from there on in their order: to name all takes five times as
long."""


class PlacementQuery(NamedTuple):
    """The needs of an item, or of the rest of an item, on a worker. A tuple, as a snapshot is.

    Query and fleet determine the decision, chance included, so that a decision can be repeated. The fleet adds the
    fields from `adapter` on to the item's needs.
    """

    model: str
    fields: frozenset[str] = frozenset()
    phase: Phase = Phase.WHOLE
    wants_exact: bool = False
    """Whether an exact worker is preferred, but not at the price of the item."""
    prompt_tokens: int = 0
    """Tokens before the next new token, including tokens generated elsewhere."""
    sequences: int = 1
    item_sequences: int = 1
    """Sequences submitted as one item: all sequences of a fresh item, but a moved sequence alone."""
    beams: int = 1
    max_tokens: int | None = None
    """Limit on new tokens per sequence."""
    exclude: Mapping[str, str] = NOTHING
    """Addresses of excluded workers, with the reason."""
    refused_by: Mapping[str, str] = NOTHING
    """Addresses of workers that refused to reserve for the decode phase, with the reason."""
    avoid: frozenset[str] = frozenset()
    """Addresses with enough siblings of the item: a last resort."""
    elders: frozenset[str] = frozenset()
    """Addresses of workers that may be restarted after the one that the item leaves."""
    shorter: Collection[str] = ()
    """Addresses of workers that would end the item before the one that it leaves does."""
    prefer: str = ""
    """Address of the worker with the prefix of a sibling, or ''."""
    may_split: bool = True
    """Whether two workers may share the item, one for the prefill and one for the decode."""
    adapter: AdapterNeed | None = None
    has_roles: bool = False
    """Whether workers of the model have roles."""
    handoff_seconds: float = 0.0
    """Predicted time of a handoff beside the transfer."""
    new_tokens: int = 0
    """Expected new tokens of all sequences."""
    cached_tokens: Mapping[str, int] = NOTHING
    """Prompt tokens with reusable KV, by address of the worker."""
    prefix: int | None = None
    """Name of the prompt's first block; None without reusable KV."""
    draw: int = 0
    """Random number in [0, 2**32) for sampling policies."""


COMPLETED_AT = PlacementQuery._fields.index("adapter")
"""Where the fields of the fleet begin. They replace those of the item's query in their order: `_replace` takes three
times as long."""
