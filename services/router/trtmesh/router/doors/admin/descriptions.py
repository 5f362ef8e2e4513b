"""Workers, tokenizers, live requests and placements as messages of the admin API."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from trtmesh.router.fleet.worker import Worker
from trtmesh.router.handoffs.live_handoff import LiveHandoff
from trtmesh.router.handoffs.table import GivenKv
from trtmesh.router.hedging.hedger import Hedger
from trtmesh.router.hedging.race import HedgeRecord
from trtmesh.router.links.replica import Replica, ReplicaState
from trtmesh.router.movement.movement import StreamMove
from trtmesh.router.placement import AdapterNeed
from trtmesh.router.placement.place import Candidate, CandidateAdapter, Decision, DecisionRecord
from trtmesh.router.requests.item import ItemRun
from trtmesh.router.requests.live_request import LiveRequest
from trtmesh.router.streams.sequence import SequenceRun
from trtmesh.router.tokenizers.tokenizer import Tokenizer
from trtmesh.v1 import engine_pb2, generation_pb2
from trtmesh.v1 import router_admin_pb2 as pb

NameOf = Callable[[str], str]
"""Name of the worker at an address."""

ITEMS_AT_ONCE = 64
"""Items described between two passes of the event loop, or as much other work: about a millisecond."""

WORKER_ITEMS = 2
"""Items that take as long as a worker."""

RUNS_PER_ITEM = 256
"""Running sequences that are counted as fast as an item is described."""

T = TypeVar("T")
D = TypeVar("D")


async def describe_each(
    each: Sequence[T], describe: Callable[[T], D], items_of: Callable[[T], int]
) -> list[D]:
    """Descriptions in order; a long list yields to the event loop, so states may differ in age. `items_of` says how
    many items take as long."""
    described: list[D] = []
    items = 0
    for one in each:
        described.append(describe(one))
        items += items_of(one)
        if items >= ITEMS_AT_ONCE:
            items = 0
            await asyncio.sleep(0)
    return described


async def describe_workers(workers: Iterable[Worker]) -> list[pb.Worker]:
    """Workers by name; `engine-10` follows `engine-9`."""
    described = await describe_each([*workers], describe_worker, _items_of_worker)
    return sorted(described, key=lambda w: (_numbered(w.worker), _numbered(w.address)))


def _items_of_worker(worker: Worker) -> int:
    return WORKER_ITEMS + len(worker.sequences) // RUNS_PER_ITEM


def describe_worker(worker: Worker) -> pb.Worker:
    refused = worker.mismatch if worker.ready else ""
    breaker = worker.guard.breaker
    state = breaker.state(asyncio.get_running_loop().time())
    return pb.Worker(
        worker=worker.description.worker,
        address=worker.address,
        state=_state_of(worker, refused=bool(refused)),
        problem=refused or worker.unusable or breaker.problem,
        engine=worker.description,
        load=worker.load,
        items=len({run.owner for run in worker.sequences.values()}),
        breaker=pb.BreakerState.Value(f"BREAKER_STATE_{state.upper()}"),
        faults=breaker.faults,
        clock_ahead_ms=worker.clock_ahead_ms,
    )


def describe_move(move: StreamMove, name_of: NameOf) -> pb.StreamMove:
    run, plan = move.run, move.plan
    return pb.StreamMove(
        request_id=run.request_id,
        batch_index=move.batch_index,
        sequence_index=run.sequence_index,
        sender=name_of(plan.sender),
        receiver=name_of(plan.receiver),
        tokens=move.tokens,
        cost_seconds=plan.cost_seconds,
        gain_seconds=plan.gain_seconds,
        reason=plan.why,
        began=move.began,
    )


async def describe_handoffs(
    live: Iterable[LiveHandoff], given: Iterable[GivenKv]
) -> list[pb.Handoff]:
    """Live handoffs, and KV that clients have, by age."""
    kept = [*given]
    described = await describe_each([*live], _describe_live, lambda _: 1)
    described += await describe_each(kept, _describe_given, lambda _: 1)
    return sorted(described, key=lambda each: each.age_ms, reverse=True)


def _describe_live(handoff: LiveHandoff) -> pb.Handoff:
    now = asyncio.get_running_loop().time()
    item = handoff.item
    return pb.Handoff(
        lease_id=handoff.lease_id,
        request_id=item.request_id,
        batch_index=item.batch_index,
        sequence_index=item.sequence_index,
        sender=handoff.sender.name if handoff.sender else "",
        receiver=handoff.receiver.name if handoff.receiver else "",
        stage=handoff.stage,
        cause=handoff.cause,
        tokens=handoff.tokens,
        present_tokens=handoff.present_tokens,
        age_ms=int((now - handoff.opened_at) * 1000),
        expires_in_ms=max(0, int((handoff.renewed_at + handoff.life_seconds - now) * 1000)),
        transport="backend" if handoff.state.by_state else "",
    )


def _describe_given(given: GivenKv) -> pb.Handoff:
    now = asyncio.get_running_loop().time()
    return pb.Handoff(
        lease_id=given.lease_id,
        request_id=given.request_id,
        batch_index=given.batch_index,
        sender=given.sender,
        stage="given",
        cause="context_only",
        tokens=given.tokens,
        age_ms=int((now - given.opened_at) * 1000),
        expires_in_ms=max(0, int((given.ends_at - now) * 1000)),
    )


def describe_tokenizer(tokenizer: Tokenizer, problem: str) -> pb.TokenizerReplica:
    """A tokenizer, and the pool's `problem` with it."""
    return pb.TokenizerReplica(
        address=tokenizer.address,
        state=_state_of(tokenizer, refused=tokenizer.ready and bool(problem)),
        problem=problem,
        fingerprint=tokenizer.description.fingerprint,
        model=tokenizer.description.model,
        sequences=tokenizer.decodes,
        process=tokenizer.description.process
        if tokenizer.description.HasField("process")
        else None,
        clock_ahead_ms=tokenizer.clock_ahead_ms,
    )


def _state_of(replica: Replica, *, refused: bool) -> pb.WorkerState.ValueType:
    if refused:
        return pb.WORKER_STATE_REFUSED
    if (replica.leaving or replica.drained) and replica.state is ReplicaState.READY:
        return pb.WORKER_STATE_DRAINING
    return pb.WorkerState.Value(f"WORKER_STATE_{replica.state.name}")


def _numbered(name: str) -> list[int | str]:
    """Sort key for names with numbers: text at even places, numbers at odd."""
    return [
        int(part) if place % 2 else part for place, part in enumerate(re.split(r"(\d{1,18})", name))
    ]


async def describe_requests(live: Sequence[LiveRequest], name_of: NameOf) -> list[pb.LiveRequest]:
    describe = partial(_describe_request, name_of)
    return await describe_each(live, describe, lambda each: len(each.items))


def _describe_request(name_of: NameOf, live: LiveRequest) -> pb.LiveRequest:
    client, now = live.client, asyncio.get_running_loop().time()
    return pb.LiveRequest(
        request_id=live.context.request_id,
        model=live.context.model,
        age_ms=int(live.context.age_seconds() * 1000),
        items=[_describe_item(item, name_of) for item in live.items],
        waiting_tokens=client.waiting_tokens,
        unread_ms=int(client.unread_seconds(now) * 1000),
        remaining_ms=live.context.remaining_ms(),
        owner=live.context.owner,
    )


def _describe_item(item: ItemRun, name_of: NameOf) -> pb.LiveItem:
    return pb.LiveItem(
        batch_index=item.batch_index,
        stage=item.stage,
        worker=item.worker,
        prompt_tokens=item.prompt_tokens,
        generated_tokens=item.generated_tokens,
        sequences=[_describe_sequence(run, name_of) for run in item.sequences],
    )


def _describe_sequence(run: SequenceRun, name_of: NameOf) -> pb.LiveSequence:
    return pb.LiveSequence(
        sequence_index=run.sequence_index,
        worker=name_of(run.assignment.address) if run.assignment else "",
        generated_tokens=len(run.token_ids),
        next_token_offset=run.decoded,
        moved=run.moved,
        queued=run.queued,
        reason=run.reason if run.over else generation_pb2.FINISH_REASON_UNSPECIFIED,
    )


def describe_decision(record: DecisionRecord) -> pb.Placement:
    """A placement, best candidate first."""
    decision = record.decision
    ranked = sorted(decision.candidates, key=lambda c: (bool(c.excluded_by), c.score))
    return pb.Placement(
        batch_index=record.batch_index,
        policy=decision.policy,
        worker=decision.chosen.worker,
        candidates=map(_describe_candidate, ranked),
        cause=record.cause,
        prompt_tokens=decision.query.prompt_tokens,
        regret_tokens=decision.regret_tokens,
        **_describe_split(decision),
        **_describe_adapter(decision.query.adapter),
    )


def describe_hedge(record: HedgeRecord) -> pb.Hedge:
    """A second copy of a late sequence, or why there was none."""
    return pb.Hedge(
        batch_index=record.batch_index,
        sequence_index=record.sequence_index,
        token_offset=record.token_offset,
        cause=record.cause.value,
        worker=record.worker,
        second_worker=record.second,
        outcome=record.outcome,
        detail=record.detail,
        wasted_tokens=record.wasted_tokens,
        saved_seconds=record.saved_seconds,
        differs=record.differs,
    )


def describe_hedging(hedger: Hedger) -> pb.HedgeTotals | None:
    """What second copies cost and saved; None without any."""
    if not hedger.enabled:
        return None
    metrics = hedger.metrics
    outcomes: Counter[str] = Counter()
    for (_, outcome), count in metrics.hedges.items():
        outcomes[outcome] += count
    return pb.HedgeTotals(
        started=outcomes["started"],
        won=outcomes["won"],
        refused=metrics.hedges_refused.total(),
        wasted_tokens=metrics.hedge_wasted_tokens,
        saved_seconds=metrics.hedge_saved_seconds,
        differences=metrics.hedge_differences,
    )


def _describe_split(decision: Decision) -> dict[str, Any]:
    """The fields of a placement in a fleet with roles."""
    split = decision.split
    if split is None:
        return {}
    kv = split.pair.prefill.kv if split.pair else None
    return {
        "prefill_worker": split.pair.prefill.worker if split.pair else "",
        "handoff_kind": kv.state_kind if kv else "",
        "split_reason": split.reason,
        "split_seconds": split.split_seconds,
        "whole_seconds": split.whole_seconds,
    }


def _describe_adapter(need: AdapterNeed | None) -> dict[str, Any]:
    """The fields of a placement that concern the item's adapter."""
    if need is None:
        return {}
    return {
        "adapter": need.adapter.name or str(need.adapter.id),
        "adapter_version": need.adapter.version,
        "adapter_rank": need.rank,
        "adapter_replicas": need.outlook.replicas,
    }


def _describe_candidate(candidate: Candidate) -> pb.PlacementCandidate:
    worker = candidate.worker
    return pb.PlacementCandidate(
        worker=worker.worker or worker.address,
        score=candidate.score,
        excluded_by=candidate.excluded_by,
        cached_tokens=candidate.cached_tokens,
        sequences=worker.sequences,
        wait_seconds=worker.wait_seconds,
        prefill_seconds=worker.prefill_seconds,
        step_seconds=worker.step_seconds,
        tokens_per_step=worker.tokens_per_step,
        **_describe_candidate_adapter(candidate.adapter),
    )


def _describe_candidate_adapter(adapter: CandidateAdapter | None) -> dict[str, Any]:
    """The fields of a candidate that concern the item's adapter."""
    if adapter is None:
        return {}
    place = adapter.place.name if adapter.place else "ABSENT"
    return {
        "adapter_place": engine_pb2.AdapterPlace.Value(f"ADAPTER_PLACE_{place}"),
        "adapter_seconds": adapter.seconds,
        "adapter_order": adapter.order,
    }
