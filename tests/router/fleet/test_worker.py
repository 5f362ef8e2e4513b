"""A worker before its first connection."""

from __future__ import annotations

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


async def test_a_role_without_handoff_is_refused() -> None:
    prefill = link()
    prefill.facts = Facts.of(pb.GetEngineResponse(role=pb.WORKER_ROLE_PREFILL))
    assert prefill.mismatch == "lacks decode"
