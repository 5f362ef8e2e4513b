"""The filter of a placement: the eligible workers, and their load as the policies see it."""

from __future__ import annotations

from collections.abc import Sequence

from trtmesh.router.placement.residency import AdapterNeed
from trtmesh.router.placement.snapshot import (
    KvFacts,
    Phase,
    PlacementQuery,
    Role,
    WorkerSnapshot,
)

BREAKER_OPEN = "its breaker is open"
INEXACT = "lacks exact resumption"
SHORTER = "it would end the item earlier than the worker that it leaves"
MAY_RESTART = "it is older than others, and may be restarted next"
ENOUGH_SIBLINGS = "it has enough siblings of the item"
ADAPTER_ABSENT = "it lacks the adapter, whose content is not known here"
SLOTS_TAKEN = "all its slots hold adapters that are pinned or in use"
SIBLINGS_ELSEWHERE = "the prefix is computed for a sibling elsewhere"
FULL = "it is full"
NO_HANDOFFS = "it hands over no KV"
OTHER_KV = "its KV is of another kind, or has no common transport"
QUARANTINED = "too many of its blocks wait for reads of ended handoffs"

UNSUITED = {Phase.WHOLE: Role.PREFILL, Phase.PREFILL: Role.DECODE, Phase.DECODE: Role.PREFILL}
"""The role that is not meant for a phase."""

OF_ROLE = {role: f"its role is {role.value}" for role in Role}


def exclusions(fleet: Sequence[WorkerSnapshot], query: PlacementQuery) -> list[str]:
    """Why each worker is excluded, or '' for a candidate.

    An open breaker, another role, a lack of slots for the adapter, a shorter limit, a missing wanted capability or
    enough siblings of the item exclude a worker only while another can take the item.
    """
    model, tokens, fields, out = query.model, query.prompt_tokens, query.fields, query.exclude
    excluded = [
        # Inline, because a call would double the cost and nearly every worker is fit.
        ""
        if not w.problem
        and w.model == model
        and tokens < w.max_sequence_tokens
        and fields <= w.supported_fields
        and w.address not in out
        and not w.breaker_open
        else _excluded_by(w, query)
        for w in fleet
    ]
    if query.item_sequences > 1 or query.beams > 1:
        _leave_out_small(fleet, query, excluded)
    if query.adapter and not query.adapter.deliverable:
        _leave_out_without(fleet, query.adapter, excluded)
    if (
        query.wants_exact
        or query.adapter
        or query.avoid
        or query.elders
        or query.shorter
        or query.prefer
        or query.has_roles
        or BREAKER_OPEN in excluded
    ):
        _pass_over(fleet, query, excluded)
    return excluded


def has_room(worker: WorkerSnapshot, query: PlacementQuery) -> bool:
    """Whether a worker can take the sequences without refusing any, as far as its reports and the bookings tell."""
    sequences = max(query.sequences, query.beams)
    return worker.sequences + sequences <= worker.most_sequences and not (
        query.adapter and worker.adapters.is_full(query.adapter)
    )


def legs(fleet: Sequence[WorkerSnapshot], query: PlacementQuery) -> list[int]:
    """Positions of the workers that can take a leg of a split item.

    Only healthy workers of a suited role take legs: for all others there is the choice of a single worker.
    """
    unsuited, model = UNSUITED[query.phase], query.model
    receives = query.phase is Phase.DECODE
    single = query.sequences == query.beams == 1
    # First what leaves out most workers.
    suited = [
        index
        for index, w in enumerate(fleet)
        if w.role is not unsuited
        and w.model == model
        and not w.problem
        and not w.breaker_open
        and w.kv
        and (single or not w.kv.state_kind)
        and not (receives and w.refuses_handoffs)
    ]
    excluded = exclusions([fleet[index] for index in suited], query._replace(has_roles=False))
    return [index for index, why in zip(suited, excluded, strict=True) if not why]


def receiver_exclusions(
    fleet: Sequence[WorkerSnapshot], query: PlacementQuery, kv: KvFacts
) -> dict[str, str]:
    """The query's exclusions, and the workers that cannot continue from `kv` now, by address."""
    exclude = dict(query.exclude)
    for worker in fleet:
        if worker.kv is None:
            exclude[worker.address] = NO_HANDOFFS
        elif not worker.kv.fits(kv):
            exclude[worker.address] = OTHER_KV
        elif worker.refuses_handoffs:
            exclude[worker.address] = QUARANTINED
        elif not has_room(worker, query):
            # It would refuse what its former worker has stopped.
            exclude[worker.address] = FULL
    return exclude


def unfit(worker: WorkerSnapshot, query: PlacementQuery) -> str:
    """Why a worker cannot take an item regardless of length and fields, or ''."""
    if worker.problem:
        return worker.problem
    if worker.address in query.exclude:
        return query.exclude[worker.address]
    if worker.model != query.model:
        return f"serves model {worker.model}"
    return ""


def _excluded_by(worker: WorkerSnapshot, query: PlacementQuery) -> str:
    """What is wrong with a worker; BREAKER_OPEN if nothing else is, for `_pass_over` to judge."""
    if why := unfit(worker, query):
        return why
    if query.prompt_tokens >= worker.max_sequence_tokens:
        return f"takes prompts of fewer than {worker.max_sequence_tokens} tokens"
    if lacking := query.fields - worker.supported_fields:
        return f"does not support {', '.join(sorted(lacking))}"
    return BREAKER_OPEN


def too_many(worker: WorkerSnapshot, query: PlacementQuery) -> str:
    """Why a worker cannot take the sequences of an item together, or ''."""
    if query.beams > worker.max_beams:
        return f"takes at most {worker.max_beams} beams"
    if query.item_sequences > worker.max_sequences:
        return f"takes at most {worker.max_sequences} sequences of an item"
    return ""


def _leave_out_small(
    fleet: Sequence[WorkerSnapshot], query: PlacementQuery, excluded: list[str]
) -> None:
    """Apart from the other checks, which every item pays for."""
    for index, worker in enumerate(fleet):
        if excluded[index] in ("", BREAKER_OPEN):
            excluded[index] = too_many(worker, query) or excluded[index]


def _leave_out_without(
    fleet: Sequence[WorkerSnapshot], need: AdapterNeed, excluded: list[str]
) -> None:
    """Excludes workers without an adapter that cannot be delivered."""
    for index, worker in enumerate(fleet):
        if excluded[index] in ("", BREAKER_OPEN) and need.key not in worker.adapters.held:
            excluded[index] = ADAPTER_ABSENT


def _pass_over(fleet: Sequence[WorkerSnapshot], query: PlacementQuery, excluded: list[str]) -> None:
    """Keeps the candidates with the weakest objection; notes the objection in `excluded` for the others."""
    eligible = [index for index, why in enumerate(excluded) if why in ("", BREAKER_OPEN)]
    unsuited = UNSUITED[query.phase] if query.has_roles else None
    against = [_against(fleet[index], query, unsuited) for index in eligible]
    least = min(against, default=_NOTHING)[0]
    for index, (weight, why) in zip(eligible, against, strict=True):
        excluded[index] = why if weight > least else ""


_NOTHING = (0, "")


def _against(
    worker: WorkerSnapshot, query: PlacementQuery, unsuited: Role | None
) -> tuple[int, str]:
    """Weight and text of the objection to a candidate."""
    if worker.breaker_open:
        return 8, BREAKER_OPEN
    if worker.role is unsuited:
        return 7, OF_ROLE[worker.role]
    if worker.address in query.shorter:
        return 6, SHORTER
    if query.adapter and worker.adapters.is_full(query.adapter):
        return 5, SLOTS_TAKEN
    if query.wants_exact and not worker.is_exact:
        return 4, INEXACT
    if worker.address in query.avoid:
        return 3, ENOUGH_SIBLINGS
    if worker.address in query.elders:
        return 2, MAY_RESTART
    if query.prefer and worker.address != query.prefer:
        return 1, SIBLINGS_ELSEWHERE
    return _NOTHING


def lift_cold(fleet: Sequence[WorkerSnapshot], eligible: Sequence[int]) -> Sequence[WorkerSnapshot]:
    """The fleet with the load of workers in slow start raised towards the mean of the others.

    A new worker then gets a share of the items instead of all of them.
    """
    warm = [worker for index in eligible if (worker := fleet[index]).warmth >= 1.0]
    if not warm or len(warm) == len(eligible):
        return fleet
    sequences = sum(worker.sequences for worker in warm) / len(warm)
    wait = sum(worker.wait_seconds for worker in warm) / len(warm)
    step = sum(worker.step_seconds for worker in warm) / len(warm)

    def lift(worker: WorkerSnapshot) -> WorkerSnapshot:
        cold = 1.0 - worker.warmth
        return worker._replace(
            sequences=worker.sequences + round(cold * max(0.0, sequences - worker.sequences)),
            wait_seconds=worker.wait_seconds + cold * max(0.0, wait - worker.wait_seconds),
            step_seconds=worker.step_seconds + cold * max(0.0, step - worker.step_seconds),
        )

    return [worker if worker.warmth >= 1.0 else lift(worker) for worker in fleet]
