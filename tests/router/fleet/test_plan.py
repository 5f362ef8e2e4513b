"""Plans of one leg and of several, booked on a fleet."""

from __future__ import annotations

import pytest
from router.fleet.test_worker import link
from trtmesh.chassis.errors import BackendFailed, NoWorker
from trtmesh.router.fleet.fleet import Fleet
from trtmesh.router.fleet.plan import Plan
from trtmesh.router.fleet.worker import Worker
from trtmesh.router.kv_index import PromptBlocks
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.placement import WHOLE, Capability, PlacementQuery
from trtmesh.router.placement.settings import PlacementSettings
from trtmesh.v1 import engine_pb2 as pb

PREFILL, DECODE = frozenset({Capability.PREFILL}), frozenset({Capability.DECODE})
BLOCKS = PromptBlocks(None, ())
QUERY = PlacementQuery("m", prompt_tokens=100, sequences=2)


def fleet_of(*roles: pb.WorkerRole.ValueType) -> tuple[Fleet, list[Worker]]:
    """A fleet of ready workers, one of each role."""
    fleet = Fleet(PlacementSettings(policy="least_loaded"), RouterMetrics())
    workers = [link(f"127.0.0.1:{port}") for port in range(1, len(roles) + 1)]
    for worker, role in zip(workers, roles, strict=True):
        worker._on_welcome(pb.GetEngineResponse(model="m", role=role))
        fleet.join(worker)
    return fleet, workers


def booked(worker: Worker) -> tuple[int, int, int]:
    guard = worker.guard
    return guard.bookings, guard.booked_sequences, guard.booked_prompt_tokens


def fail_inside(plan: Plan) -> None:
    with plan:
        raise BackendFailed("the dispatch failed")


async def test_one_leg_computes_everything() -> None:
    fleet, (worker,) = fleet_of(pb.WORKER_ROLE_MIXED)
    with fleet.place(QUERY, BLOCKS) as plan:
        assert [(leg.worker, leg.phases) for leg in plan.legs] == [(worker, WHOLE)]
    assert booked(worker) == (1, 2, 100)


async def test_two_legs_are_booked_and_released_together() -> None:
    fleet, (prefill, decode) = fleet_of(pb.WORKER_ROLE_PREFILL, pb.WORKER_ROLE_DECODE)
    plan = fleet.place(QUERY, BLOCKS, (PREFILL, DECODE))
    assert [leg.worker for leg in plan.legs] == [prefill, decode]
    assert plan.first.worker is prefill
    assert (booked(prefill), booked(decode)) == ((1, 2, 100), (1, 2, 0))
    with pytest.raises(BackendFailed):
        fail_inside(plan)
    assert (booked(prefill), booked(decode)) == ((0, 0, 0), (0, 0, 0))


async def test_leg_without_a_worker_releases_the_earlier_legs() -> None:
    fleet, (prefill,) = fleet_of(pb.WORKER_ROLE_PREFILL)
    with pytest.raises(NoWorker):
        fleet.place(QUERY, BLOCKS, (PREFILL, DECODE))
    assert booked(prefill) == (0, 0, 0)


async def test_both_legs_of_a_plan_may_share_a_worker() -> None:
    fleet, (mixed,) = fleet_of(pb.WORKER_ROLE_MIXED)
    with fleet.place(QUERY, BLOCKS, (PREFILL, DECODE)) as plan:
        assert [leg.worker for leg in plan.legs] == [mixed, mixed]
    assert booked(mixed) == (2, 4, 100)
