"""Where an item runs: a single leg for all phases, or a leg for the prefill and one for the decode."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Self

from trtmesh.router.fleet.worker import Worker
from trtmesh.router.placement import Decision, Phase
from trtmesh.router.placement.load_guard import Booking


@dataclass(frozen=True, slots=True)
class Leg:
    """A worker, the booking there, and the phases computed there."""

    worker: Worker
    booking: Booking
    phases: frozenset[Phase]
    decision: Decision


@dataclass(slots=True)
class Plan:
    """The legs of an item in the order of the phases.

    A context manager: an error releases the bookings of all legs. Otherwise each booking belongs to the sequences on
    its worker, and before their dispatch to the handoff between the legs.
    """

    legs: list[Leg] = field(default_factory=list)

    @property
    def first(self) -> Leg:
        """The leg of the prompt."""
        return self.legs[0]

    @property
    def last(self) -> Leg:
        """The leg of the last token."""
        return self.legs[-1]

    @property
    def is_split(self) -> bool:
        """Whether prefill and decode run on two workers."""
        return len(self.legs) > 1

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
