"""Conditional disaggregation: whether one worker computes an item, or two share it, by predicted cost.

A cost is the time to the first decode step, plus the time lost by other sequences, plus the decode phase. Of a whole
item on worker w:

    wait_w + adapter_w + C_w * (1 + decoding_w) + decode_w          C = uncached tokens * prefill

The computation of a prompt delays each decoding sequence of the worker, since the steps have chunks of the prompt
(Sarathi-Serve, Agrawal et al., 2024). With the prefill on worker p and the decode phase on worker d:

    start = wait_p + adapter_p
    ready = start + C_p
    tail  = handoff_seconds + max(max(start, R_d) + T - ready, LAST_PART * T)      T = tokens that d lacks * transfer
                                                                                   R = tokens that d awaits * transfer
    delayed = decoding_p + FOLLOWERS * waiting_p
    ready + delayed * C_p + pressure_p + tail + max(0, wait_d - ready - tail) + decode_d

A prompt in the queue of a prefill worker delays all later prompts. Without this cost, every prompt would wait there for
as long as the prompt would delay all chats of a decode worker.

The transfer overlaps the computation except for the last part (layer-wise transfer as in Splitwise, Patel et al., 2024,
and Mooncake, Qin et al., 2024), transfers to a worker share the link, and d works off the queue meanwhile. Choosing the
pair together, by load and prefix on both sides, is Mooncake's; NVIDIA Dynamo's conditional disaggregation compares the
uncached length and the prefill queue with thresholds, where this compares times. Prefill, step, transfer and
handoff times are learned (`rates.py`).

The cost is linear in the number of workers: each side is narrowed down first, by the policy and then to LEGS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest

from trtmesh.router.placement.adapters import adapter_seconds
from trtmesh.router.placement.filters import legs, lift_cold
from trtmesh.router.placement.policies import POLICIES, Policy, predicted_seconds
from trtmesh.router.placement.settings import HandoffSettings
from trtmesh.router.placement.snapshot import (
    Phase,
    PlacementQuery,
    Role,
    WorkerSnapshot,
)

LEGS = 4
"""Workers of each side whose pairs are compared."""

LAST_PART = 1 / 32
"""Part of a transfer that cannot overlap the computation: the last layers of the last chunk."""

FOLLOWERS = 2.0
"""Later prompts on a prefill worker, for each prompt waiting there already. During the wait of a prompt as many arrive
as wait now (Little, 1961), and all arrivals until the queue is empty wait longer: twice as many on a half busy
worker."""

MIN_PROMPT_TOKENS = 16
"""Fewest prompt tokens to compute for `auto` to compare two workers with one: a handoff takes longer than so few.
Reused tokens do not count."""

FASTER = "two workers are predicted to be faster"
SLOWER = "one worker is predicted to be faster"
ALWAYS = "router.handoff.enabled is always"
NEVER = "router.handoff.enabled is never"
BOUND = "the rest of the item stays on one worker"
NO_PREFILL = "no worker takes prompts of items that decode elsewhere"
NO_DECODE = "no worker takes items whose prompt another computes"
INCOMPATIBLE = "no two workers have compatible KV and a common transport"


@dataclass(frozen=True, slots=True)
class Pair:
    """The workers of a split item."""

    prefill: WorkerSnapshot
    decode: WorkerSnapshot


@dataclass(frozen=True, slots=True)
class Split:
    """Whether an item is split, and why."""

    reason: str
    whole_seconds: float
    """Predicted cost on one worker."""
    split_seconds: float = 0.0
    """Predicted cost on the best pair; 0 if none was possible or looked for."""
    pair: Pair | None = None
    """The chosen pair; None for a single worker."""


def split_of(
    policy: str,
    fleet: Sequence[WorkerSnapshot],
    query: PlacementQuery,
    whole: WorkerSnapshot,
    rules: HandoffSettings,
) -> Split:
    """Decides between the worker `whole` and the best pair."""
    whole_cost = whole_seconds(whole, query)
    if why := _ruled_out(whole, query, rules):
        return Split(why, whole_cost)
    pair = best_pair(policy, fleet, query)
    if isinstance(pair, str):
        return Split(pair, whole_cost)
    pair = _as_reported(pair, fleet)
    split_cost = pair_seconds(pair, query)
    if rules.enabled == "always":
        return Split(ALWAYS, whole_cost, split_cost, pair)
    if split_cost < whole_cost:
        return Split(FASTER, whole_cost, split_cost, pair)
    return Split(SLOWER, whole_cost, split_cost)


def _as_reported(pair: Pair, fleet: Sequence[WorkerSnapshot]) -> Pair:
    """The pair without the raised load of a slow start: that spreads items, but `whole` has none either."""
    if pair.prefill.warmth >= 1.0 <= pair.decode.warmth:
        return pair
    reported = {worker.address: worker for worker in fleet}
    return Pair(reported[pair.prefill.address], reported[pair.decode.address])


def _ruled_out(whole: WorkerSnapshot, query: PlacementQuery, rules: HandoffSettings) -> str:
    """Why no pair is looked for, or ''."""
    if not query.may_split:
        return BOUND
    if rules.enabled == "never":
        return NEVER
    tokens = _uncached(whole, query)
    if rules.enabled == "auto" and tokens < MIN_PROMPT_TOKENS:
        return f"{tokens} prompt tokens to compute are fewer than {MIN_PROMPT_TOKENS}"
    return ""


def whole_seconds(worker: WorkerSnapshot, query: PlacementQuery) -> float:
    """Predicted cost of the item on one worker."""
    (cost,) = predicted_seconds([worker], query)
    return cost + _stall(worker, query)


def pair_seconds(pair: Pair, query: PlacementQuery) -> float:
    """Predicted cost of the item on a pair."""
    p, d, need = pair.prefill, pair.decode, query.adapter
    computing = _uncached(p, query) * p.prefill_seconds
    start = p.wait_seconds + (adapter_seconds(p, need) if need else 0.0)
    ready = start + computing
    transfer = _uncached(d, query) * d.transfer_seconds
    begin = max(start, d.receiving_tokens * d.transfer_seconds)
    tail = query.handoff_seconds + max(begin + transfer - ready, LAST_PART * transfer)
    # Everything but the prompt; wait and adapter of d pass while p computes.
    decode = predicted_seconds([d], query)[0] - _uncached(d, query) * d.prefill_seconds
    hidden = d.wait_seconds + (adapter_seconds(d, need) if need else 0.0)
    shown = max(0.0, hidden - ready - tail)
    waiting = p.sequences - p.decoding_sequences
    stall = _stall(p, query) + FOLLOWERS * waiting * computing
    return ready + stall + p.pressure_seconds + tail + shown + decode - hidden


def _uncached(worker: WorkerSnapshot, query: PlacementQuery) -> int:
    return query.prompt_tokens - query.cached_tokens.get(worker.address, 0)


def _stall(worker: WorkerSnapshot, query: PlacementQuery) -> float:
    """Time lost by all sequences of the worker together during the computation of the prompt."""
    return worker.decoding_sequences * _uncached(worker, query) * worker.prefill_seconds


def best_pair(policy: str, fleet: Sequence[WorkerSnapshot], query: PlacementQuery) -> Pair | str:
    """The pair for an item, or why there is none.

    Policies by predicted cost compare pairs; the others choose each worker by their own rule.
    """
    of_prefill = query._replace(phase=Phase.PREFILL)
    # Siblings share prefixes where prompts are computed; the decode phase continues tokens of another worker.
    of_decode = query._replace(
        phase=Phase.DECODE,
        exclude={**query.exclude, **query.refused_by},
        prefer="",
        avoid=frozenset(),
        wants_exact=True,
    )
    sides = _sides(fleet, of_prefill, of_decode)
    if isinstance(sides, str):
        return sides
    prefills, decodes = sides
    rules_of = POLICIES[policy]
    first = _shortlist(rules_of, fleet, prefills, of_prefill)
    kinds = {worker.kv.kind for worker in first if worker.kv}
    decodes = [index for index in decodes if (kv := fleet[index].kv) and kv.kind in kinds]
    second = _shortlist(rules_of, fleet, decodes, of_decode)
    if not any(_compatible(p, d) for p in first for d in second):
        return INCOMPATIBLE
    if rules_of.costs is predicted_seconds:
        return _cheapest(rules_of, first, second, query)
    return _each_by_rule(rules_of, first, second, query)


def _sides(
    fleet: Sequence[WorkerSnapshot], of_prefill: PlacementQuery, of_decode: PlacementQuery
) -> tuple[list[int], list[int]] | str:
    """Returns the eligible workers of both legs, or the reason for none.

    A mixed worker computes prompts for others only without a prefill worker, and then for decode workers: the mixed
    worker's sequences would lose as much as the others gain.
    """
    prefills, decodes = legs(fleet, of_prefill), legs(fleet, of_decode)
    meant = [index for index in prefills if fleet[index].role is Role.PREFILL]
    if not meant:
        decodes = [index for index in decodes if fleet[index].role is Role.DECODE]
    prefills = meant or prefills
    if not prefills:
        return NO_PREFILL
    if not decodes:
        return NO_DECODE
    kinds = {kv.kind for index in decodes if (kv := fleet[index].kv)}
    prefills = [index for index in prefills if (kv := fleet[index].kv) and kv.kind in kinds]
    return (prefills, decodes) if prefills else INCOMPATIBLE


def _shortlist(
    rules: Policy, fleet: Sequence[WorkerSnapshot], eligible: list[int], query: PlacementQuery
) -> list[WorkerSnapshot]:
    """At most LEGS workers of a side, as the policy sees them."""
    seen = lift_cold(fleet, eligible)
    chosen = [seen[index] for index in dict.fromkeys(rules.shortlist(eligible, seen, query))]
    if len(chosen) <= LEGS:
        return chosen
    costs = zip(rules.costs(chosen, query), (w.last_turn for w in chosen), chosen, strict=True)
    return [worker for _, _, worker in nsmallest(LEGS, costs, key=lambda each: each[:2])]


def _compatible(prefill: WorkerSnapshot, decode: WorkerSnapshot) -> bool:
    ours, theirs = prefill.kv, decode.kv
    if ours is None or theirs is None or prefill.address == decode.address:
        return False
    return ours.fits(theirs)


def _cheapest(
    rules_of: Policy,
    first: Sequence[WorkerSnapshot],
    second: Sequence[WorkerSnapshot],
    query: PlacementQuery,
) -> Pair:
    """The pair of the lowest predicted cost; the policy breaks ties."""
    costs = {
        (m, n): pair_seconds(Pair(p, d), query)
        for m, p in enumerate(first)
        for n, d in enumerate(second)
        if _compatible(p, d)
    }
    never = float("inf")
    by_prefill = [
        min((costs.get((m, n), never) for n in range(len(second))), default=never)
        for m in range(len(first))
    ]
    m = rules_of.pick(first, by_prefill, query)
    n = rules_of.pick(second, [costs.get((m, n), never) for n in range(len(second))], query)
    return Pair(first[m], second[n])


def _each_by_rule(
    rules_of: Policy,
    first: Sequence[WorkerSnapshot],
    second: Sequence[WorkerSnapshot],
    query: PlacementQuery,
) -> Pair:
    """Returns the pick among the prefill workers, and the pick among the decode workers that fit the first pick."""
    able = [p for p in first if any(_compatible(p, d) for d in second)]
    prefill = able[rules_of.pick(able, rules_of.costs(able, query), query)]
    fitting = [d for d in second if _compatible(prefill, d)]
    return Pair(prefill, fitting[rules_of.pick(fitting, rules_of.costs(fitting, query), query)])
