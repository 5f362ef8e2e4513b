"""Rates of a fleet and of streams between two samples of a router."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
    grown = [_growth(loads.get(worker.address), worker.load) for worker in after.fleet.workers]
    tokens = {each.request_id: _tokens(each) for each in before.requests.requests} if before else {}
    return Rates(
        workers=tuple(
            _worker_rates(worker, growth, seconds)
            for worker, growth in zip(after.fleet.workers, grown, strict=True)
        ),
        requests=tuple(
            RequestRate(
                request.request_id, _request_rate(tokens.get(request.request_id), request, seconds)
            )
            for request in after.requests.requests
        ),
        generated_tokens_per_second=_per_second(
            sum(growth.generated_tokens for growth in grown if growth), seconds
        ),
        hit_rate=_hit_rate([worker.load for worker in after.fleet.workers]),
        recent_hit_rate=_hit_rate([growth for growth in grown if growth]),
    )


def _growth(before: Load | None, after: Load) -> Load | None:
    """Returns the growth of a worker's counters; None for a new, lost or restarted worker."""
    if before is None or not before.step_count or after.step_count < before.step_count:
        return None
    return Load(
        computed_prompt_tokens=after.computed_prompt_tokens - before.computed_prompt_tokens,
        reused_prompt_tokens=after.reused_prompt_tokens - before.reused_prompt_tokens,
        generated_tokens=after.generated_tokens - before.generated_tokens,
    )


def _worker_rates(worker: pb.Worker, growth: Load | None, seconds: float) -> WorkerRates:
    return WorkerRates(
        worker=worker.worker,
        address=worker.address,
        prompt_tokens_per_second=(
            _per_second(growth.computed_prompt_tokens, seconds) if growth else None
        ),
        generated_tokens_per_second=(
            _per_second(growth.generated_tokens, seconds) if growth else None
        ),
        hit_rate=_hit_rate([worker.load]),
        recent_hit_rate=_hit_rate([growth] if growth else []),
    )


def _request_rate(before: int | None, request: pb.LiveRequest, seconds: float) -> float | None:
    if before is None:
        return None
    # A rewritten beam may be shorter.
    return _per_second(max(0, _tokens(request) - before), seconds)


def _tokens(request: pb.LiveRequest) -> int:
    return sum(item.generated_tokens for item in request.items)


def _per_second(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None


def _hit_rate(loads: Iterable[Load]) -> float | None:
    loads = list(loads)
    reused = sum(load.reused_prompt_tokens for load in loads)
    prompts = reused + sum(load.computed_prompt_tokens for load in loads)
    return reused / prompts if prompts else None
