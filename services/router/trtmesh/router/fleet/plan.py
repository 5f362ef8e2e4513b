"""Where an item runs: a single leg for all phases, or a leg per phase."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Self

from trtmesh.router.fleet.worker import Worker
from trtmesh.router.placement import Capability, Decision
from trtmesh.router.placement.load_guard import Booking


@dataclass(frozen=True, slots=True)
class Leg:
    """A worker, the booking there, and the phases computed there."""

    worker: Worker
    booking: Booking
    phases: frozenset[Capability]
    decision: Decision


@dataclass(slots=True)
class Plan:
    """The legs of an item in the order of the phases.

    A context manager: an error releases the bookings of all legs; otherwise each booking belongs to the dispatched
    sequences.
    """

    legs: list[Leg] = field(default_factory=list)

    @property
    def first(self) -> Leg:
        """The leg of the prompt."""
        return self.legs[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.release()

    def release(self) -> None:
        """Gives the bookings of all legs back."""
        now = asyncio.get_running_loop().time()
        for leg in self.legs:
            leg.booking.release(now)
