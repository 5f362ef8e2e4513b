"""Where an item runs: a single leg for all phases, or a leg for the prefill and one for the decode."""

from __future__ import annotations

import asyncio

from trtmesh.chassis.frozen import frozen
from trtmesh.router.fleet.worker import Worker
from trtmesh.router.placement import Decision
from trtmesh.router.placement.load_guard import Booking


@frozen
class Leg:
    """A worker and the booking there."""

    worker: Worker
    booking: Booking
    decision: Decision


@frozen
class Plan:
    """The leg of an item's prompt and the leg of the last token; a single leg unless the plan is split.

    Each booking belongs to the sequences on the worker, and before their dispatch to the handoff between the legs.
    """

    first: Leg
    last: Leg

    @property
    def legs(self) -> tuple[Leg, ...]:
        """The legs in the order of the phases."""
        return (self.first,) if self.first is self.last else (self.first, self.last)

    def release(self) -> None:
        """Gives the bookings of all legs back."""
        now = asyncio.get_running_loop().time()
        for leg in self.legs:
            leg.booking.release(now)
