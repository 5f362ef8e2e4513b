"""A worker before its first connection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

from trtmesh.chassis.vocabulary import Adapter
from trtmesh.router.fleet import worker
from trtmesh.router.fleet.facts import Facts
from trtmesh.router.kv_index import KvIndex
from trtmesh.router.links.deadlines import Deadlines
from trtmesh.router.metrics import RouterMetrics
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


async def test_role_without_handoff_is_refused() -> None:
    prefill = link()
    prefill.facts = Facts.of(pb.GetEngineResponse(role=pb.WORKER_ROLE_PREFILL))
    assert prefill.mismatch == "lacks decode"


async def test_reported_adapters_are_held_until_the_stream_is_lost() -> None:
    async def responses() -> AsyncIterator[pb.EngineServiceConnectResponse]:
        state = pb.AdapterState(id=3, name="a", version="v1", place=pb.ADAPTER_PLACE_DEVICE)
        event = pb.EngineEvent(adapter_states=pb.AdapterStates(adapters=[state]))
        yield pb.EngineServiceConnectResponse(events=[event])

    worker, call = link(), cast("Any", responses())
    await worker._read(call)
    assert worker.adapters == {Adapter(3, "a", "v1")}
    worker.lost("gone")
    assert not worker.adapters
