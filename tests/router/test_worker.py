"""What makes a worker unusable for this router before anything is sent to it."""

from __future__ import annotations

from trtmesh.router import worker
from trtmesh.router.kv_index import KvIndex
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.pulse import Deadlines
from trtmesh.router.replica import LinkSettings
from trtmesh.v1 import engine_pb2 as pb


def link() -> worker.Worker:
    async def known() -> None:
        return

    return worker.Worker(
        "127.0.0.1:1",
        settings=LinkSettings(max_message_bytes=2**20, silence_seconds=10.0),
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
    prefill.engine = pb.GetEngineResponse(role=pb.WORKER_ROLE_PREFILL)
    assert "its role is prefill" in prefill.mismatch
