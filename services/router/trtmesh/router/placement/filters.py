"""The filter of a placement: which workers can take an item, and how those that can are seen."""

from __future__ import annotations

from collections.abc import Sequence

from trtmesh.router.placement.snapshot import PlacementQuery, WorkerSnapshot

BREAKER_OPEN = "its breaker is open"
ENOUGH_SIBLINGS = "it has enough siblings of the item"
SIBLINGS_ELSEWHERE = "the prefix is computed for a sibling elsewhere"


def exclusions(fleet: Sequence[WorkerSnapshot], query: PlacementQuery) -> list[str]:
    """Why each worker is not considered; '' for those that are.

    A worker that should rather not take the item (its breaker is open, it has enough of the item's siblings) is passed
    over while there is another, and considered when there is none.
    """
    model, tokens, fields, out = query.model, query.prompt_tokens, query.fields, query.exclude
    excluded = [
        # In place, because nearly every worker of nearly every placement is fit, and a call costs twice as much.
        ""
        if not w.problem
        and w.model == model
        and tokens < w.max_sequence_tokens
        and fields <= w.supported_fields
        and w.address not in out
        else _excluded_by(w, query)
        for w in fleet
    ]
    if query.avoid or query.prefer or True in [worker.breaker_open for worker in fleet]:
        _pass_over(fleet, query, excluded)
    return excluded


def _excluded_by(worker: WorkerSnapshot, query: PlacementQuery) -> str:
    """What is wrong with a worker that is not fit."""
    if worker.problem:
        return worker.problem
    if worker.address in query.exclude:
        return query.exclude[worker.address]
    if worker.model != query.model:
        return f"serves model {worker.model}"
    if query.prompt_tokens >= worker.max_sequence_tokens:
        return f"takes prompts of fewer than {worker.max_sequence_tokens} tokens"
    return f"does not support {', '.join(sorted(query.fields - worker.supported_fields))}"


def _pass_over(fleet: Sequence[WorkerSnapshot], query: PlacementQuery, excluded: list[str]) -> None:
    """Leaves the best of the eligible by what speaks against them; notes it in `excluded` for the others."""
    eligible = [index for index, why in enumerate(excluded) if not why]
    against = [_against(fleet[index], query) for index in eligible]
    least = min(against, default=_NOTHING)[0]
    for index, (weight, why) in zip(eligible, against, strict=True):
        if weight > least:
            excluded[index] = why


_NOTHING = (0, "")


def _against(worker: WorkerSnapshot, query: PlacementQuery) -> tuple[int, str]:
    """How much speaks against a worker that can take the item, and what."""
    if worker.breaker_open:
        return 3, BREAKER_OPEN
    if worker.address in query.avoid:
        return 2, ENOUGH_SIBLINGS
    if query.prefer and worker.address != query.prefer:
        return 1, SIBLINGS_ELSEWHERE
    return _NOTHING


def lift_cold(fleet: Sequence[WorkerSnapshot], eligible: Sequence[int]) -> Sequence[WorkerSnapshot]:
    """The fleet with the load of workers in their slow start lifted towards the mean of the others, so that one that
    has just joined gets its share of what comes and not all of it."""
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
