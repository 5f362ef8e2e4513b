"""A worker before anything is sent to it: what makes it unusable for this router, and that placements know it."""

from __future__ import annotations

from trtmesh.router.fleet import worker
from trtmesh.router.fleet.facts import Facts
from trtmesh.router.fleet.fleet import Fleet
from trtmesh.router.kv_index import KvIndex
from trtmesh.router.links.deadlines import Deadlines
from trtmesh.router.links.replica import LEAVING
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.placement.settings import PlacementSettings
from trtmesh.v1 import engine_pb2 as pb


def link(address: str = "127.0.0.1:1") -> worker.Worker:
    async def known() -> None:
        return

    return worker.Worker(
        address,
        max_message_bytes=2**20,
        router_name="router",
        tokenizers_known=known,
        fingerprint_of=lambda _: "",
        metrics=RouterMetrics(),
        deadlines=Deadlines(),
        kv_index=KvIndex(100),
        on_change=lambda: None,
        on_touch=lambda _: None,
    )


async def test_a_role_without_handoff_is_refused() -> None:
    prefill = link()
    prefill.facts = Facts.of(pb.GetEngineResponse(role=pb.WORKER_ROLE_PREFILL))
    assert prefill.mismatch == "lacks decode"


async def test_one_that_joins_where_another_left_is_seen() -> None:
    """No placement looks in between, so both are told of at once, in whatever order."""
    fleet = Fleet(PlacementSettings(policy="round_robin"), RouterMetrics())
    addresses = [f"127.0.0.1:{port}" for port in range(1, 33)]
    for address in addresses:
        fleet.join(link(address))
    assert sorted(seen.address for seen in fleet.snapshot()) == sorted(addresses)
    for old in fleet.workers.values():
        old.leaving = True
    assert len(fleet.forget_leavers()) == len(addresses)
    for address in addresses:
        fleet.join(link(address))
    assert sorted(seen.address for seen in fleet.snapshot()) == sorted(addresses)
    assert not any(seen.problem == LEAVING for seen in fleet.snapshot())
