"""One placement: filter, score, pick."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from trtmesh.chassis.errors import NoWorker, PromptTooLong, TrtmeshError, UnsupportedField
from trtmesh.router.placement.decision import Decision
from trtmesh.router.placement.policies import POLICIES
from trtmesh.router.placement.snapshot import PlacementQuery, WorkerSnapshot

BREAKER_OPEN = "its breaker is open"
ENOUGH_SIBLINGS = "it has enough siblings of the item"
SIBLINGS_ELSEWHERE = "the prefix is computed for a sibling elsewhere"


def place(policy: str, fleet: Sequence[WorkerSnapshot], query: PlacementQuery) -> Decision:
    """The worker for an item. Raises NoWorker, PromptTooLong or UnsupportedField when none can.

    A worker that should rather not take it (its breaker is open, it has enough of the item's siblings) is passed over
    while there is another, and taken when there is none.
    """
    excluded = [_excluded_by(worker, query) for worker in fleet]
    eligible = [index for index, why in enumerate(excluded) if not why]
    if not eligible:
        raise _refusal(fleet, excluded, query)
    eligible = _pass_over(eligible, fleet, query, excluded)
    rules = POLICIES[policy]
    seen = _lift_cold(fleet, eligible)
    scores = rules.score(seen, query)
    shortlist = rules.shortlist(eligible, seen, query)
    chosen = min(shortlist, key=lambda index: (scores[index], fleet[index].last_turn))
    return Decision(policy, fleet[chosen], query, fleet, array("d", scores), excluded)


def check_fields(fleet: Sequence[WorkerSnapshot], query: PlacementQuery) -> None:
    """Raises UnsupportedField where workers of the model are there and none acts on the query's fields."""
    able = [worker for worker in fleet if not worker.problem and worker.model == query.model]
    if able and not any(query.fields <= worker.supported_fields for worker in able):
        raise _unsupported(able, query)


def _unsupported(able: Sequence[WorkerSnapshot], query: PlacementQuery) -> UnsupportedField:
    fields = ", ".join(sorted(query.fields - able[0].supported_fields))
    return UnsupportedField(
        f"{fields} not supported by any worker of model {query.model}; leave the field unset"
    )


def _excluded_by(worker: WorkerSnapshot, query: PlacementQuery) -> str:
    if worker.problem:
        return worker.problem
    if worker.address in query.exclude:
        return query.exclude[worker.address]
    if worker.model != query.model:
        return f"serves model {worker.model}"
    if query.prompt_tokens >= worker.max_sequence_tokens:
        return f"takes prompts of fewer than {worker.max_sequence_tokens} tokens"
    if query.fields <= worker.supported_fields:
        return ""
    return f"does not support {', '.join(sorted(query.fields - worker.supported_fields))}"


def _pass_over(
    eligible: list[int],
    fleet: Sequence[WorkerSnapshot],
    query: PlacementQuery,
    excluded: list[str],
) -> list[int]:
    """The best of the eligible by what speaks against them; notes it in `excluded` for the others."""
    if not (query.avoid or query.prefer or any(worker.breaker_open for worker in fleet)):
        return eligible
    against = [_against(fleet[index], query) for index in eligible]
    least = min(against)[0]
    for index, (weight, why) in zip(eligible, against, strict=True):
        if weight > least:
            excluded[index] = why
    return [index for index in eligible if not excluded[index]]


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


def _lift_cold(
    fleet: Sequence[WorkerSnapshot], eligible: Sequence[int]
) -> Sequence[WorkerSnapshot]:
    """The fleet with the load of workers in their slow start lifted towards the mean of the others, so that one that
    has just joined gets its share of what comes and not all of it."""
    warm = [fleet[index] for index in eligible if fleet[index].warmth >= 1.0]
    if not warm or len(warm) == len(eligible):
        return fleet
    sequences = sum(worker.sequences for worker in warm) / len(warm)
    wait = sum(worker.wait_seconds for worker in warm) / len(warm)
    step = sum(worker.step_seconds for worker in warm) / len(warm)

    def lift(worker: WorkerSnapshot) -> WorkerSnapshot:
        cold = 1.0 - worker.warmth
        return replace(
            worker,
            sequences=worker.sequences + round(cold * max(0.0, sequences - worker.sequences)),
            wait_seconds=worker.wait_seconds + cold * max(0.0, wait - worker.wait_seconds),
            step_seconds=worker.step_seconds + cold * max(0.0, step - worker.step_seconds),
        )

    return [worker if worker.warmth >= 1.0 else lift(worker) for worker in fleet]


def _refusal(
    fleet: Sequence[WorkerSnapshot], excluded: Sequence[str], query: PlacementQuery
) -> TrtmeshError:
    able = [
        worker
        for worker in fleet
        if not worker.problem
        and worker.model == query.model
        and worker.address not in query.exclude
    ]
    long_enough = [w for w in able if query.prompt_tokens < w.max_sequence_tokens]
    if able and not long_enough:
        return PromptTooLong(
            f"the prompt has {query.prompt_tokens} tokens, but with at least one new token a sequence of model"
            f" {query.model} has at most {max(w.max_sequence_tokens for w in able)}; shorten the prompt"
        )
    if long_enough:
        return _unsupported(long_enough, query)
    reasons = "; ".join(
        f"{worker.worker or worker.address}: {why}"
        for worker, why in zip(fleet, excluded, strict=True)
    )
    return NoWorker(
        f"no worker of model {query.model} is ready ({reasons or 'none is known'}); try again later",
        retry_after_ms=1000,
    )
