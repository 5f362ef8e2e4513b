"""Plans of one leg and of several, booked on a fleet."""

from __future__ import annotations

from typing import Any

import pytest
from router.fleet.test_worker import link
from trtmesh.chassis.errors import NoWorker
from trtmesh.chassis.revisions import SCHEMA_REVISION
from trtmesh.router.fleet.fleet import Fleet
from trtmesh.router.fleet.worker import Worker
from trtmesh.router.kv_index import PromptBlocks
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.placement import PlacementQuery
from trtmesh.router.placement.rates import Typical
from trtmesh.router.placement.settings import HandoffSettings, PlacementSettings
from trtmesh.v1 import engine_pb2 as pb
from trtmesh.v1 import generation_pb2 as gen_pb
from trtmesh.v1 import kv_transfer_pb2 as kv_pb

BLOCKS = PromptBlocks(None, ())
QUERY = PlacementQuery("m", prompt_tokens=100, sequences=2)


def engine(role: pb.WorkerRole.ValueType, **changes: Any) -> pb.GetEngineResponse:
    """A worker that hands KV over."""
    shape = kv_pb.KvBlockShape(
        data_type=gen_pb.DATA_TYPE_FP32, layers=2, kv_heads=2, head_dim=4, tokens_per_block=4
    )
    values: dict[str, Any] = {
        "model": "m",
        "schema_revision": SCHEMA_REVISION,
        "role": role,
        "tokens_per_block": 4,
        "kv_shapes": [shape],
        "kv_compatibility_hash": b"kv",
        "kv_transports": [kv_pb.KV_TRANSPORT_GRPC],
    }
    return pb.GetEngineResponse(**values | changes)


def fleet_of(*roles: pb.WorkerRole.ValueType) -> tuple[Fleet, list[Worker]]:
    """A fleet of ready workers, one of each role, that splits every item."""
    rules = HandoffSettings(enabled="always")
    fleet = Fleet(PlacementSettings(policy="least_loaded"), RouterMetrics(), rules)
    workers = [link(f"127.0.0.1:{port}") for port in range(1, len(roles) + 1)]
    for worker, role in zip(workers, roles, strict=True):
        worker._on_welcome(engine(role))
        fleet.join(worker)
    return fleet, workers


def report(fleet: Fleet, worker: Worker, **load: Any) -> None:
    worker._on_load(pb.Load(**load))
    fleet.touched.add(worker.address)


def booked(worker: Worker) -> tuple[int, int, int]:
    guard = worker.guard
    return guard.bookings, guard.booked_sequences, guard.booked_prompt_tokens


async def test_one_leg_computes_everything() -> None:
    fleet, (worker,) = fleet_of(pb.WORKER_ROLE_MIXED)
    plan = fleet.place(QUERY, BLOCKS)
    assert [leg.worker for leg in plan.legs] == [worker]
    assert booked(worker) == (1, 2, 100)


async def test_two_legs_are_booked_and_released_together() -> None:
    fleet, (prefill, decode) = fleet_of(pb.WORKER_ROLE_PREFILL, pb.WORKER_ROLE_DECODE)
    plan = fleet.place(QUERY, BLOCKS)
    assert [leg.worker for leg in plan.legs] == [prefill, decode]
    assert len(plan.legs) == 2
    assert (plan.first.worker, plan.last.worker) == (prefill, decode)
    assert (booked(prefill), booked(decode)) == ((1, 2, 100), (1, 2, 0))
    plan.release()
    assert (booked(prefill), booked(decode)) == ((0, 0, 0), (0, 0, 0))


async def test_last_role_left_takes_whole_items() -> None:
    fleet, (prefill,) = fleet_of(pb.WORKER_ROLE_PREFILL)
    plan = fleet.place(QUERY, BLOCKS)
    assert [leg.worker for leg in plan.legs] == [prefill]


async def test_item_that_must_not_split_stays_whole() -> None:
    fleet, (_, decode, mixed) = fleet_of(
        pb.WORKER_ROLE_PREFILL, pb.WORKER_ROLE_DECODE, pb.WORKER_ROLE_MIXED
    )
    for _ in range(4):
        plan = fleet.place(QUERY._replace(may_split=False), BLOCKS)
        assert len(plan.legs) == 1
        assert plan.last.worker in (decode, mixed)


async def test_fleet_of_mixed_workers_never_splits() -> None:
    fleet, _ = fleet_of(pb.WORKER_ROLE_MIXED, pb.WORKER_ROLE_MIXED)
    plan = fleet.place(QUERY, BLOCKS)
    assert plan.last.decision.split is None
    assert len(plan.legs) == 1


async def test_placement_follows_a_changed_role() -> None:
    fleet, (one, two) = fleet_of(pb.WORKER_ROLE_PREFILL, pb.WORKER_ROLE_DECODE)
    for worker, role in ((one, pb.WORKER_ROLE_DECODE), (two, pb.WORKER_ROLE_PREFILL)):
        report(fleet, worker, role=role)
    plan = fleet.place(QUERY, BLOCKS)
    assert (plan.first.worker, plan.last.worker) == (two, one)
    for worker in (one, two):
        report(fleet, worker, role=pb.WORKER_ROLE_MIXED)
    plan = fleet.place(QUERY, BLOCKS)
    assert len(plan.legs) == 1
    assert plan.last.decision.split is None


def pressure(worker: Worker) -> float:
    """As placement sees it."""
    return worker.snapshot(Typical()).pressure_seconds


async def test_reservation_counts_as_pressure_until_the_first_token() -> None:
    fleet, (_, decode) = fleet_of(pb.WORKER_ROLE_PREFILL, pb.WORKER_ROLE_DECODE)
    report(fleet, decode, total_blocks=100, used_blocks=10)
    before = pressure(decode)
    plan = fleet.place(QUERY, BLOCKS)
    promised = pressure(decode)
    assert promised > before
    # The report has the reservation: it counts once.
    used = 10 + plan.last.booking.reservation.blocks
    report(fleet, decode, total_blocks=100, used_blocks=used)
    assert pressure(decode) == pytest.approx(promised)
    plan.last.booking.started(1.0)
    report(fleet, decode, total_blocks=100, used_blocks=used)
    assert pressure(decode) == pytest.approx(promised)


async def test_receiver_fits_the_sender() -> None:
    fleet, (sender, other, fitting) = fleet_of(*[pb.WORKER_ROLE_DECODE] * 3)
    other._on_welcome(engine(pb.WORKER_ROLE_DECODE, kv_compatibility_hash=b"another"))
    assert sender.capabilities.kv is not None
    query = QUERY._replace(exclude={sender.address: "it is left"})
    leg = fleet.place_receiver(query, BLOCKS, sender.capabilities.kv)
    assert leg.worker is fitting
    assert (booked(fitting), booked(other)) == ((1, 2, 0), (0, 0, 0))
    report(fleet, fitting, total_blocks=100, quarantined_blocks=26)
    with pytest.raises(NoWorker):
        fleet.place_receiver(query, BLOCKS, sender.capabilities.kv)


async def test_round_robin_covers_both_roles_evenly() -> None:
    fleet, workers = fleet_of(*[pb.WORKER_ROLE_PREFILL] * 2, *[pb.WORKER_ROLE_DECODE] * 3)
    fleet.set_policy("round_robin")
    for _ in range(30):
        plan = fleet.place(QUERY, BLOCKS)
        assert len(plan.legs) == 2
        for leg in plan.legs:
            fleet.touched.add(leg.worker.address)
    assert [worker.guard.bookings for worker in workers] == [15, 15, 10, 10, 10]
