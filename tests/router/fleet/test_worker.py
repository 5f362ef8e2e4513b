"""A worker before its first connection."""

from __future__ import annotations

from trtmesh.chassis.vocabulary import Adapter
from trtmesh.router.adapters.adapters import Adapters
from trtmesh.router.adapters.settings import AdapterSettings
from trtmesh.router.fleet import worker
from trtmesh.router.kv_index import KvIndex
from trtmesh.router.links.deadlines import Deadlines
from trtmesh.router.links.replica import LinkRules
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.placement import Place, Residency
from trtmesh.router.placement.residency import NO_ADAPTERS
from trtmesh.v1 import engine_pb2 as pb


def link(address: str = "127.0.0.1:1") -> worker.Worker:
    async def known() -> None:
        return

    return worker.Worker(
        address,
        LinkRules(Deadlines(), 2**20),
        router_name="router",
        first_tokenizer=known,
        fingerprint_of=lambda _: "",
        metrics=RouterMetrics(),
        kv_index=KvIndex(100),
        adapters=Adapters(AdapterSettings(), RouterMetrics()),
        on_change=lambda: None,
        on_touch=lambda _: None,
        on_load=lambda _: None,
    )


async def test_reported_adapters_are_held_until_the_stream_is_lost() -> None:
    states = [
        pb.AdapterState(
            id=3, name="a", version="v1", place=pb.ADAPTER_PLACE_DEVICE, rank=8, pinned=True
        ),
        pb.AdapterState(id=4, version="v1", place=pb.ADAPTER_PLACE_HOST),
        pb.AdapterState(id=5, version="v1"),
    ]
    load = pb.Load(adapter_slots=4, free_adapter_slots=2, evictable_adapter_slots=1)
    worker = link()
    for event in (
        pb.EngineEvent(adapter_states=pb.AdapterStates(adapters=states)),
        pb.EngineEvent(load=load),
    ):
        worker._receive(pb.EngineServiceConnectResponse(events=[event]))
    assert worker.adapters.held == {
        (3, "v1"): Residency(Adapter(3, "a", "v1"), Place.DEVICE, rank=8, pinned=True),
        (4, "v1"): Residency(Adapter(4, "", "v1"), Place.HOST),
    }
    assert worker.adapters.slots == 4
    assert (worker.adapters.free_slots, worker.adapters.evictable_slots) == (2, 1)
    worker.lost("gone")
    assert worker.adapters == NO_ADAPTERS
