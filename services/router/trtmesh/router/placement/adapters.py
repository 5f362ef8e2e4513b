"""Placement of items with an adapter: at the adapter's homes, or elsewhere in a spill, and the cost of loads and
ranks."""

from __future__ import annotations

from collections.abc import Sequence

from trtmesh.router.placement.homes import BOUND, Takers, order_of
from trtmesh.router.placement.residency import AdapterNeed, Place
from trtmesh.router.placement.snapshot import PlacementQuery, WorkerSnapshot

SPILL_RATIO, SPILL_SEQUENCES = BOUND, 8
"""An adapter spills from a worker above both mean * ratio and mean + number of sequences: in small batches a few
sequences more cost less than a load."""


def adapter_seconds(worker: WorkerSnapshot, need: AdapterNeed) -> float:
    """Predicted time until an adapter is ready to run on a worker."""
    adapters, outlook = worker.adapters, need.outlook
    place = adapters.place(need)
    if place is Place.DEVICE:
        return 0.0
    if place is Place.HOST:
        return outlook.copy_seconds
    if need.key in adapters.in_use:
        return outlook.delivery_seconds / 2
    return outlook.delivery_seconds * (1 + adapters.deliveries)


def rank_seconds(worker: WorkerSnapshot, need: AdapterNeed, new_tokens: int) -> float:
    """Predicted extra time of the item and of the worker's sequences if the item raises the batch's largest rank."""
    more = max(0, need.rank - worker.adapters.rank)
    return more * need.outlook.rank_step_seconds * new_tokens * (1 + worker.sequences)


def takers_of(fleet: Sequence[WorkerSnapshot], model: str) -> Takers:
    """The model's workers that take adapters, as address and slots."""
    return tuple(
        (w.address, w.adapters.slots) for w in fleet if w.adapters.slots and w.model == model
    )


def candidates(
    eligible: Sequence[int], fleet: Sequence[WorkerSnapshot], query: PlacementQuery
) -> list[int]:
    """The adapter's homes, with holders elsewhere while no home is ready; above the bound, where it spills."""
    need = query.adapter
    assert need is not None
    order = _ordered(eligible, fleet, need, takers_of(fleet, query.model))
    most = bound([fleet[index].sequences for index in eligible], query.sequences)
    within = [index for index in order if fleet[index].sequences + query.sequences <= most]
    homes = {*order[: need.outlook.replicas]}
    near = [index for index in within if index in homes]
    ready = [index for index in within if _has(fleet[index], need)]
    if any(index in homes for index in ready):
        return near
    if near:
        return [*near, *ready]
    return ready[:1] or within[:1]


def _ordered(
    eligible: Sequence[int], fleet: Sequence[WorkerSnapshot], need: AdapterNeed, takers: Takers
) -> list[int]:
    """Returns the eligible workers: homes first, then the adapter's order, and last the workers without reported
    slots."""
    by_address = {fleet[index].address: index for index in eligible}
    order = order_of(takers, need.adapter.id, need.outlook.stretch)
    # A dict keeps the first place of each.
    return [
        by_address[address]
        for address in dict.fromkeys((*need.outlook.homes, *order, *by_address))
        if address in by_address
    ]


def bound(loads: Sequence[int], sequences: int) -> float:
    """Most sequences of a worker, with an item of `sequences`: at least one worker stays within."""
    mean = (sum(loads) + sequences) / len(loads)
    return max(mean * SPILL_RATIO, mean + SPILL_SEQUENCES, min(loads) + sequences)


def _has(worker: WorkerSnapshot, need: AdapterNeed) -> bool:
    """Whether an adapter is in a worker's memory or on its way."""
    return need.key in worker.adapters.held or need.key in worker.adapters.in_use
