"""A worker that reports its load and makes no step is stuck; one that has nothing to do is not."""

from __future__ import annotations

import asyncio

import pytest
from trtmesh.chassis.errors import WorkerLost
from trtmesh.router import worker
from trtmesh.router.metrics import RouterMetrics
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
        on_change=lambda: None,
    )


async def test_a_worker_without_progress_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "STALL_SECONDS", 0.0)
    stuck = link()
    stuck._on_load(pb.Load(step_count=5, running_sequences=1))
    await asyncio.sleep(0.001)
    with pytest.raises(WorkerLost, match="no step for 0 s after number 5"):
        stuck._on_load(pb.Load(step_count=5, running_sequences=1))


async def test_steps_or_idleness_are_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "STALL_SECONDS", 0.0)
    busy = link()
    for step_count in (1, 2, 3):
        busy._on_load(pb.Load(step_count=step_count, running_sequences=1))
        await asyncio.sleep(0.001)
    for _ in range(3):
        busy._on_load(pb.Load(step_count=3))
        await asyncio.sleep(0.001)


async def test_a_role_without_handoff_is_refused() -> None:
    prefill = link()
    prefill.engine = pb.GetEngineResponse(role=pb.WORKER_ROLE_PREFILL)
    assert "its role is prefill" in prefill.mismatch
