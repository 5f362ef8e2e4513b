"""A placement: filter, score, pick. The decision keeps all inputs, for a later explanation to operators."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trtmesh.chassis.errors import (
    AdapterNotFound,
    InvalidField,
    NoWorker,
    PromptTooLong,
    TrtmeshError,
    UnsupportedField,
)
from trtmesh.chassis.frozen import frozen
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.router.placement.adapters import adapter_seconds, takers_of
from trtmesh.router.placement.filters import (
    ADAPTER_ABSENT,
    exclusions,
    lift_cold,
    too_many,
    unfit,
)
from trtmesh.router.placement.homes import order_of
from trtmesh.router.placement.policies import POLICIES
from trtmesh.router.placement.residency import Place
from trtmesh.router.placement.settings import HandoffSettings
from trtmesh.router.placement.snapshot import PlacementQuery, WorkerSnapshot
from trtmesh.router.placement.split import Split, split_of


@dataclass(frozen=True, slots=True)
class CandidateAdapter:
    """The item's adapter on a worker."""

    place: Place | None
    seconds: float
    """Predicted time until the adapter is ready to run; part of the score."""
    order: int
    """Position in the adapter's order of workers, from 1; 0 before the worker reported slots."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker in a placement, with the reason of the exclusion or ''."""

    worker: WorkerSnapshot
    score: float
    cached_tokens: int
    excluded_by: str
    adapter: CandidateAdapter | None = None


@frozen
class Decision:
    """A placement with all inputs."""

    policy: str
    chosen: WorkerSnapshot
    """The worker that decodes."""
    query: PlacementQuery
    fleet: Sequence[WorkerSnapshot]
    split: Split | None = None
    """Whether another worker computes the prompt; None in a fleet without roles."""

    @property
    def prefill(self) -> WorkerSnapshot:
        """The worker that computes the prompt."""
        return self.split.pair.prefill if self.split and self.split.pair else self.chosen

    @property
    def excluded_by(self) -> list[str]:
        """Reason of each worker's exclusion, or ''."""
        return exclusions(self.fleet, self.query)

    @property
    def scores(self) -> list[float]:
        """Score of each worker, even if excluded or not sampled."""
        eligible = [index for index, why in enumerate(self.excluded_by) if not why]
        return POLICIES[self.policy].costs(lift_cold(self.fleet, eligible), self.query)

    @property
    def candidates(self) -> list[Candidate]:
        """Every worker of the fleet."""
        cached = self.query.cached_tokens
        return [
            Candidate(worker, score, cached.get(worker.address, 0), why, self._adapter_on(worker))
            for worker, score, why in zip(self.fleet, self.scores, self.excluded_by, strict=True)
        ]

    def _adapter_on(self, worker: WorkerSnapshot) -> CandidateAdapter | None:
        need = self.query.adapter
        if need is None:
            return None
        takers = takers_of(self.fleet, self.query.model)
        order = order_of(takers, need.adapter.id, need.outlook.stretch)
        position = order.index(worker.address) + 1 if worker.address in order else 0
        return CandidateAdapter(
            worker.adapters.place(need), adapter_seconds(worker, need), position
        )

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens with reusable KV on the worker that computes the prompt."""
        return self.query.cached_tokens.get(self.prefill.address, 0)

    @property
    def regret_tokens(self) -> int:
        """Further prompt tokens reusable on another worker."""
        return max(self.query.cached_tokens.values(), default=0) - self.cached_tokens


@frozen
class DecisionRecord:
    """A decision with the item. `cause` is first, retry or migration."""

    owner: str
    request_id: str
    batch_index: int
    cause: str
    decision: Decision


class DecisionLog:
    """A ring of records. Simultaneous decisions share snapshots, so a record costs a few bytes per worker."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._records: deque[DecisionRecord] = deque(maxlen=most)

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: DecisionRecord) -> None:
        self._records.append(record)

    def of_request(self, request_id: str) -> list[DecisionRecord]:
        """Decisions for the items of a request, in order; empty once forgotten."""
        return [record for record in self._records if record.request_id == request_id]


def place(policy: str, fleet: Sequence[WorkerSnapshot], query: PlacementQuery) -> Decision:
    """Chooses the worker for an item. Raises NoWorker, AdapterNotFound, PromptTooLong or UnsupportedField."""
    excluded = exclusions(fleet, query)
    eligible = [index for index, why in enumerate(excluded) if not why]
    if not eligible:
        raise _refusal(fleet, excluded, query)
    if len(eligible) == 1:
        # Nothing to weigh up, as for every item of a model with one worker.
        return Decision(policy, fleet[eligible[0]], query, fleet)
    rules = POLICIES[policy]
    seen = lift_cold(fleet, eligible)
    shortlist = rules.shortlist(eligible, seen, query)
    candidates = [seen[index] for index in shortlist]
    position = rules.pick(candidates, rules.costs(candidates, query), query)
    return Decision(policy, fleet[shortlist[position]], query, fleet)


def place_split(
    policy: str, fleet: Sequence[WorkerSnapshot], query: PlacementQuery, rules: HandoffSettings
) -> Decision:
    """Chooses the worker for an item, or two in a fleet with roles. Raises as `place`."""
    decision = place(policy, fleet, query)
    if not query.has_roles:
        return decision
    split = split_of(policy, decision.fleet, query, decision.chosen, rules)
    chosen = split.pair.decode if split.pair else decision.chosen
    return replace(decision, chosen=chosen, split=split)


def check_fields(fleet: Sequence[WorkerSnapshot], model: str, fields: frozenset[str]) -> None:
    """Raises UnsupportedField if the model has usable workers and none of them supports all fields."""
    lacking = []
    for worker in fleet:
        if not worker.problem and worker.model == model:
            if fields <= worker.supported_fields:
                return
            lacking.append(worker)
    if lacking:
        raise _unsupported(lacking, model, fields)


def check_length(longest: int, model: str, tokens: int, *, or_more: bool = False) -> None:
    """Raises PromptTooLong for so many tokens, `or_more`, where a sequence has at most `longest`; 0 is no limit."""
    if longest and tokens >= longest:
        raise _too_long(model, tokens, longest, " or more" if or_more else "")


def longest_sequence(fleet: Sequence[WorkerSnapshot], model: str) -> int:
    """Most tokens of a sequence on any usable worker of the model; 0 without one."""
    usable = (each for each in fleet if not each.problem and each.model == model)
    return max((worker.max_sequence_tokens for worker in usable), default=0)


def _too_long(model: str, tokens: int, most: int, or_more: str = "") -> PromptTooLong:
    return PromptTooLong(
        f"has {tokens} tokens{or_more}, but with at least one new token a sequence of model {model} has at most {most};"
        " shorten it",
        field="prompt",
        value=str(tokens),
        limit=f"below {most}",
    )


def _unsupported(
    fit: Sequence[WorkerSnapshot], model: str, fields: frozenset[str]
) -> UnsupportedField:
    lacking = tuple(sorted(fields - fit[0].supported_fields))
    has_adapter = any(field.startswith("lora.") for field in lacking)
    remedy = ", or give a worker room for adapters (docs/settings.md)" if has_adapter else ""
    return UnsupportedField(
        f"not supported by any worker of model {model}; leave it out{remedy}", fields=lacking
    )


def _too_many(able: Sequence[WorkerSnapshot], query: PlacementQuery) -> InvalidField:
    beams = max(worker.max_beams for worker in able)
    sequences = max(worker.max_sequences for worker in able)
    field, count, most = (
        ("beam_search.beam_width", query.beams, beams)
        if query.beams > beams
        else ("sampling.num_return_sequences", query.item_sequences, sequences)
    )
    return InvalidField.of(field, count, f"at most {most}, the limit of model {query.model}")


def _is_nowhere(
    fleet: Sequence[WorkerSnapshot], excluded: Sequence[str], query: PlacementQuery
) -> bool:
    """Whether workers could take the item except for the adapter, and no unready worker may bring the adapter."""
    lacks = False
    for worker, why in zip(fleet, excluded, strict=True):
        if why == ADAPTER_ABSENT:
            lacks = True
        elif _may_take_later(worker, query):
            return False
    return lacks


def _nowhere(adapter: Adapter, model: str) -> AdapterNotFound:
    return AdapterNotFound(
        f"is {adapter.id}, an adapter that no worker of model {model} holds any more and that this router does not"
        " have; send it with its weights, or register it with `trtmesh adapters add`",
        field="lora.id",
        value=str(adapter.id),
    )


def _may_take_later(worker: WorkerSnapshot, query: PlacementQuery) -> bool:
    """Whether an unready or left-out worker may take the item one day."""
    if not worker.problem and worker.address not in query.exclude:
        return False
    return not worker.model or (
        worker.model == query.model
        and query.prompt_tokens < worker.max_sequence_tokens
        and query.fields <= worker.supported_fields
        and not too_many(worker, query)
    )


def _refusal(
    fleet: Sequence[WorkerSnapshot], excluded: Sequence[str], query: PlacementQuery
) -> TrtmeshError:
    fit = [worker for worker in fleet if not unfit(worker, query)]
    long_enough = [worker for worker in fit if query.prompt_tokens < worker.max_sequence_tokens]
    able = [worker for worker in long_enough if query.fields <= worker.supported_fields]
    if able and all(too_many(worker, query) for worker in able):
        return _too_many(able, query)
    if long_enough and not able:
        return _unsupported(long_enough, query.model, query.fields)
    if fit and not long_enough:
        most = max(worker.max_sequence_tokens for worker in fit)
        return _too_long(query.model, query.prompt_tokens, most)
    if query.adapter and _is_nowhere(fleet, excluded, query):
        return _nowhere(query.adapter.adapter, query.model)
    reasons = "; ".join(
        f"{worker.worker or worker.address}: {why}"
        for worker, why in zip(fleet, excluded, strict=True)
    )
    return NoWorker(
        f"no worker of model {query.model} is ready ({reasons or 'none is known'}); try again later",
        retry_after_ms=1000,
    )
