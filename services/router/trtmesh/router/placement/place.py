"""One placement: filter, score, pick."""

from __future__ import annotations

from collections.abc import Sequence

from trtmesh.chassis.errors import NoWorker, PromptTooLong, TrtmeshError, UnsupportedField
from trtmesh.router.placement.decision import Decision
from trtmesh.router.placement.filters import exclusions, lift_cold
from trtmesh.router.placement.policies import POLICIES
from trtmesh.router.placement.snapshot import PlacementQuery, WorkerSnapshot


def place(policy: str, fleet: Sequence[WorkerSnapshot], query: PlacementQuery) -> Decision:
    """The worker for an item. Raises NoWorker, PromptTooLong or UnsupportedField when none can."""
    excluded = exclusions(fleet, query)
    eligible = [index for index, why in enumerate(excluded) if not why]
    if not eligible:
        raise _refusal(fleet, excluded, query)
    rules = POLICIES[policy]
    seen = lift_cold(fleet, eligible)
    shortlist = rules.shortlist(eligible, seen, query)
    candidates = [seen[index] for index in shortlist]
    position = rules.pick(candidates, rules.costs(candidates, query), query)
    return Decision(policy, fleet[shortlist[position]], query, fleet)


def check_fields(fleet: Sequence[WorkerSnapshot], query: PlacementQuery) -> None:
    """Raises UnsupportedField where workers of the model are there and none acts on the query's fields."""
    model, fields = query.model, query.fields
    able = []
    for worker in fleet:
        if not worker.problem and worker.model == model:
            if fields <= worker.supported_fields:
                return
            able.append(worker)
    if able:
        raise _unsupported(able, query)


def _unsupported(able: Sequence[WorkerSnapshot], query: PlacementQuery) -> UnsupportedField:
    return UnsupportedField(
        f"not supported by any worker of model {query.model}; leave it out",
        fields=tuple(sorted(query.fields - able[0].supported_fields)),
    )


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
        most = max(worker.max_sequence_tokens for worker in able)
        return PromptTooLong(
            f"has {query.prompt_tokens} tokens, but with at least one new token a sequence of model {query.model} has"
            f" at most {most}; shorten it",
            field="prompt",
            value=str(query.prompt_tokens),
            limit=f"below {most}",
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
