"""The placement policies, each of three pure functions.

`shortlist` narrows the eligible workers down, `costs` scores them (lower is better), and `pick` takes the lowest score.
Ties go to a worker whose drafts hold, then to the least recently chosen one or, for a prefix without a holder, to
rendezvous hashing. Predicted cost of
an item on a worker in seconds, with rates learned online (`rates.py`):

    wait + uncached prompt tokens * prefill + new tokens * step + pressure + adapter's load + higher rank

Mooncake's TTFT estimate and the expected wait of SMG's power of two are similar. Costing the remaining computation,
instead of the matched prefix, sends a miss to the least busy worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trtmesh.router.placement.adapters import adapter_seconds, candidates, rank_seconds
from trtmesh.router.placement.rendezvous import highest
from trtmesh.router.placement.snapshot import PlacementQuery, WorkerSnapshot

Fleet = Sequence[WorkerSnapshot]
Indexes = list[int]
"""Positions in the fleet."""

SPILL_RATIO, SPILL_SEQUENCES = 1.5, 8
"""`prefix_aware` leaves the holder of a prefix above both mean * ratio and mean + number of sequences, so that a hot
prefix spreads."""

HOLDERS = 2
SAMPLES = 2
"""`auto` considers the two workers with the longest prefix and two more at random, so that routers with equal
reports do not all choose the same worker."""


DRAFTS_HOLD = 1.2
"""Tokens in a step from which a worker's drafts make it faster than another, whatever the noise of the measurement."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Chooses among the eligible workers."""

    costs: Callable[[Fleet, PlacementQuery], list[float]]
    shortlist: Callable[[Indexes, Fleet, PlacementQuery], Indexes]
    pick: Callable[[Fleet, list[float], PlacementQuery], int]
    looks_at_prefixes: bool = False


def _equal(fleet: Fleet, query: PlacementQuery) -> list[float]:
    return [0.0] * len(fleet)


def _sequences(fleet: Fleet, query: PlacementQuery) -> list[float]:
    return [float(worker.sequences) for worker in fleet]


def predicted_seconds(fleet: Fleet, query: PlacementQuery) -> list[float]:
    """The predicted cost of the item on each worker, in seconds."""
    prompt, new, cached = query.prompt_tokens, query.new_tokens, query.cached_tokens
    costs = [
        w.wait_seconds
        + (prompt - cached.get(w.address, 0)) * w.prefill_seconds
        + new * w.step_seconds
        + w.pressure_seconds
        for w in fleet
    ]
    if need := query.adapter:
        for n, w in enumerate(fleet):
            costs[n] += adapter_seconds(w, need) + rank_seconds(w, need, new)
    return costs


def _all(eligible: Indexes, fleet: Fleet, query: PlacementQuery) -> Indexes:
    return eligible


def _sample(eligible: Indexes, draw: int) -> Indexes:
    """Two different workers, or all of fewer."""
    count = len(eligible)
    if count <= SAMPLES:
        return eligible
    first, second = draw % count, (draw >> 16) % (count - 1)
    return [eligible[first], eligible[second + (second >= first)]]


def _longest_prefix(eligible: Indexes, fleet: Fleet, query: PlacementQuery) -> Indexes:
    cached = query.cached_tokens
    if not cached:
        return eligible
    mean = sum(fleet[index].sequences for index in eligible) / len(eligible)
    most = max(mean * SPILL_RATIO, mean + SPILL_SEQUENCES)
    holders = [i for i in eligible if fleet[i].address in cached and fleet[i].sequences <= most]
    longest = max((cached[fleet[i].address] for i in holders), default=0)
    return [i for i in holders if cached[fleet[i].address] == longest] or eligible


def _holders_and_sample(eligible: Indexes, fleet: Fleet, query: PlacementQuery) -> Indexes:
    cached, sample = query.cached_tokens, _homes_or_sample(eligible, fleet, query)
    if not cached:
        return sample
    holders = [index for index in eligible if fleet[index].address in cached]
    holders.sort(key=lambda index: -cached[fleet[index].address])
    return [*holders[:HOLDERS], *sample]


def _homes_or_sample(eligible: Indexes, fleet: Fleet, query: PlacementQuery) -> Indexes:
    if query.adapter:
        return candidates(eligible, fleet, query)
    return _sample(eligible, query.draw)


def _in_turn(fleet: Fleet, costs: list[float], query: PlacementQuery) -> int:
    return min(range(len(fleet)), key=lambda index: fleet[index].last_turn)


def _lowest(fleet: Fleet, costs: list[float], query: PlacementQuery) -> int:
    # Full ties go to the first: after a draw a random worker.
    ties = [(worker.tokens_per_step < DRAFTS_HOLD, worker.last_turn) for worker in fleet]
    return min(zip(costs, ties, range(len(fleet)), strict=True))[2]


def _lowest_or_rendezvous(fleet: Fleet, costs: list[float], query: PlacementQuery) -> int:
    index = _lowest(fleet, costs, query)
    if query.prefix is None or fleet[index].address in query.cached_tokens:
        return index
    # Routers unaware of each other's recent placements then compute a new prefix once in total.
    equals = {fleet[n].address: n for n, cost in enumerate(costs) if cost == costs[index]}
    return equals[highest(equals, query.prefix)]


POLICIES: dict[str, Policy] = {
    "round_robin": Policy(_equal, _all, _in_turn),
    "least_loaded": Policy(_sequences, _all, _lowest),
    "power_of_two": Policy(
        predicted_seconds, lambda eligible, _, query: _sample(eligible, query.draw), _lowest
    ),
    "prefix_aware": Policy(
        predicted_seconds, _longest_prefix, _lowest_or_rendezvous, looks_at_prefixes=True
    ),
    "lora_aware": Policy(predicted_seconds, _homes_or_sample, _lowest),
    "auto": Policy(predicted_seconds, _holders_and_sample, _lowest, looks_at_prefixes=True),
}
