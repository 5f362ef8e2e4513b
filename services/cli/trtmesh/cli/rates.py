"""Rates of a fleet and of streams between two samples of a router."""

from __future__ import annotations

from dataclasses import dataclass

from trtmesh.cli.tables import generated_tokens
from trtmesh.v1 import router_admin_pb2 as pb
from trtmesh.v1.engine_pb2 import Load


@dataclass(frozen=True, slots=True)
class Sample:
    """A router's answers at `time`, in seconds of a monotonic clock."""

    time: float
    fleet: pb.ListWorkersResponse
    requests: pb.ListRequestsResponse


@dataclass(frozen=True, slots=True)
class WorkerRates:
    """Token rates of a worker between two samples, and the share of reused prompt tokens.

    `hit_rate` is reused / (reused + computed) prompt tokens since the worker started, `recent_hit_rate` the same
    between the samples; None where there were none.
    """

    worker: str
    address: str
    prompt_tokens_per_second: float | None
    generated_tokens_per_second: float | None
    hit_rate: float | None
    recent_hit_rate: float | None


@dataclass(frozen=True, slots=True)
class RequestRate:
    """Token rate of a request between two samples, over all sequences."""

    request_id: str
    tokens_per_second: float | None


@dataclass(frozen=True, slots=True)
class Rates:
    """All rates between two samples, parallel to the workers and requests of the later sample.

    `generated_tokens_per_second` and the hit rates cover the whole fleet, with the work of other routers.
    """

    workers: tuple[WorkerRates, ...]
    requests: tuple[RequestRate, ...]
    generated_tokens_per_second: float | None
    hit_rate: float | None
    recent_hit_rate: float | None


def measure(before: Sample | None, after: Sample) -> Rates:
    """Computes the rates between two samples; a first sample has only the totals since the workers started."""
    seconds = after.time - before.time if before else 0.0
    loads = {worker.address: worker.load for worker in before.fleet.workers} if before else {}
    told = before.requests.requests if before else ()
    tokens = {each.request_id: generated_tokens(each) for each in told}
    workers = after.fleet.workers
    grown = [_growth(loads.get(worker.address, Load()), worker.load) for worker in workers]
    return Rates(
        workers=tuple(
            WorkerRates(
                worker.worker,
                worker.address,
                _per_second(growth and growth.computed_prompt_tokens, seconds),
                _per_second(growth and growth.generated_tokens, seconds),
                _hit_rate(worker.load),
                _hit_rate(growth),
            )
            for worker, growth in zip(workers, grown, strict=True)
        ),
        requests=tuple(
            RequestRate(
                each.request_id,
                _per_second(_new_tokens(each, tokens.get(each.request_id)), seconds),
            )
            for each in after.requests.requests
        ),
        generated_tokens_per_second=_per_second(
            sum(growth.generated_tokens for growth in grown if growth), seconds
        ),
        hit_rate=_hit_rate(*(worker.load for worker in workers)),
        recent_hit_rate=_hit_rate(*grown),
    )


def _growth(before: Load, after: Load) -> Load | None:
    """Returns the growth of a worker's counters; None for a new, lost or restarted worker."""
    if not before.step_count or after.step_count < before.step_count:
        return None
    return Load(
        computed_prompt_tokens=after.computed_prompt_tokens - before.computed_prompt_tokens,
        reused_prompt_tokens=after.reused_prompt_tokens - before.reused_prompt_tokens,
        generated_tokens=after.generated_tokens - before.generated_tokens,
    )


def _new_tokens(request: pb.LiveRequest, before: int | None) -> int | None:
    # A rewritten beam may be shorter.
    return None if before is None else max(0, generated_tokens(request) - before)


def _per_second(count: int | None, seconds: float) -> float | None:
    return None if count is None or seconds <= 0 else count / seconds


def _hit_rate(*loads: Load | None) -> float | None:
    known = [load for load in loads if load]
    reused = sum(load.reused_prompt_tokens for load in known)
    prompts = reused + sum(load.computed_prompt_tokens for load in known)
    return reused / prompts if prompts else None
