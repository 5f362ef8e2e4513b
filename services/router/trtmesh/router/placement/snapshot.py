"""What a placement is decided from: the fleet at one moment, and what one item needs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class WorkerSnapshot(NamedTuple):
    """A worker at the moment of a placement, with everything that this router dispatched until then. A tuple, because
    one is made for every dispatch, and a frozen dataclass of so many fields takes four times as long.

    `problem` says why it cannot take items; '' when it can.
    """

    address: str
    worker: str
    model: str
    problem: str
    supported_fields: frozenset[str]
    max_sequence_tokens: int = sys.maxsize
    """Most tokens of a sequence, prompt included."""
    tokens_per_block: int = 0
    """Tokens of a KV block whose events it tells; 0 where it tells none."""
    last_turn: int = 0
    """Number of the placement that chose it last; 0 when none did."""
    sequences: int = 0
    """Sequences that it runs or that wait there, those of other routers included."""
    wait_seconds: float = 0.0
    """Predicted time until it would begin with another prompt."""
    prefill_seconds: float = 0.0
    """Predicted time to compute one prompt token."""
    step_seconds: float = 0.0
    """Predicted time from one token to the next with one more sequence on it."""
    pressure_seconds: float = 0.0
    """Penalty for a KV cache that is nearly full."""
    warmth: float = 1.0
    """0 when it has just joined, 1 from the end of its slow start on."""
    breaker_open: bool = False
    """Whether it failed so often that it should rest."""


@dataclass(frozen=True, slots=True)
class PlacementQuery:
    """What an item needs. Everything that a decision depends on beside the fleet is here, chance included, so that a
    decision can be repeated."""

    model: str
    fields: frozenset[str] = frozenset()
    prompt_tokens: int = 0
    new_tokens: int = 0
    """Tokens that it is expected to generate."""
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    """Prompt tokens whose KV a worker has, by address; a worker that is not listed has none."""
    prefix: int | None = None
    """Name of the prompt's first block; None where it has none or nobody reuses its KV."""
    exclude: Mapping[str, str] = field(default_factory=dict)
    """Addresses of workers that must not take it, such as those that just failed it, and why."""
    avoid: frozenset[str] = frozenset()
    """Addresses that have enough of this item's siblings: chosen only when no other worker can take it."""
    prefer: str = ""
    """Address that computes the prefix which this item shares with a sibling; '' when there is none."""
    draw: int = 0
    """Random number in [0, 2**32) for policies that sample."""
