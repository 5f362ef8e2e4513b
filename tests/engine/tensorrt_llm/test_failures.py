"""A library that is missing, dies, freezes or fails an item: nothing hangs, and every sequence ends."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

import pytest
from engine.backend_lab import SECONDS, Lab, config_of
from engine.tensorrt_llm.conftest import forget
from engine.tensorrt_llm.harness import PROMPT, backend, executor
from trtmesh.chassis.errors import (
    BackendFailed,
    InvalidRequest,
    ModelUnusable,
    SettingsError,
    WorkerLost,
)
from trtmesh.engine.backends.tensorrt_llm.backend import TensorRtLlmBackend
from trtmesh.v1 import generation_pb2 as pb

ENDLESS = {"ignore_end_id": True}


class Failing(Lab):
    """A lab that keeps the failure of the backend."""

    def __init__(self, backend: TensorRtLlmBackend) -> None:
        super().__init__(backend)
        self.failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def fail(self, error: BaseException) -> None:
        assert not self.failure.done(), "reported twice"
        self.failure.set_result(error)


STUCK = "trtmesh.engine.backends.tensorrt_llm.backend.STUCK_SECONDS"


async def started() -> Failing:
    lab = Failing(backend())
    await lab.backend.start(lab.deliver, lab.fail)
    return lab


async def test_without_the_library_the_error_says_what_to_install() -> None:
    forget()
    lab = Failing(backend())
    with pytest.raises(SettingsError, match="cannot be imported"):
        await lab.backend.start(lab.deliver, lab.fail)
    await lab.backend.close()


async def test_a_dead_library_ends_every_sequence_as_lost(release: str) -> None:
    """Release 1.2 says nothing of it but that it is shut down."""
    lab = await started()
    keys = [key for _ in range(3) for key in lab.submit(PROMPT, config_of(ENDLESS))]
    await lab._until(lambda: all(lab.outcomes[key].token_ids for key in keys))
    await asyncio.to_thread(executor().die)
    for outcome in await lab.ended(keys):
        assert outcome.end is not None
        assert outcome.end.reason == pb.FINISH_REASON_ERROR
        assert isinstance(outcome.end.error, WorkerLost)
    assert isinstance(await asyncio.wait_for(lab.failure, 60), BackendFailed)
    with pytest.raises(WorkerLost):
        lab.submit(PROMPT, config_of(ENDLESS))
    await lab.backend.close()


async def test_an_idle_worker_notices_that_the_library_died(release: str) -> None:
    lab = await started()
    await asyncio.to_thread(executor().die)
    assert isinstance(await asyncio.wait_for(lab.failure, 60), BackendFailed)
    await lab.backend.close()


async def test_a_frozen_library_is_given_up(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_STAND_IN_FREEZE_AFTER", "12")
    lab = await started()
    monkeypatch.setattr(STUCK, 1.0)
    keys = lab.submit(PROMPT, config_of(ENDLESS))
    (outcome,) = await lab.ended(keys)
    assert outcome.end is not None
    assert isinstance(outcome.end.error, WorkerLost)
    assert "made no step for" in str(await asyncio.wait_for(lab.failure, 60))
    await lab.backend.close()


async def test_a_library_that_computes_no_first_item_is_given_up(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRTLLM_STAND_IN_FREEZE_AFTER", "0")
    monkeypatch.setattr(STUCK, 1.0)
    lab = Failing(backend())
    async with asyncio.timeout(SECONDS):
        with pytest.raises(ModelUnusable, match="did not end within 1 s"):
            await lab.backend.start(lab.deliver, lab.fail)
    await lab.backend.close()


@pytest.mark.parametrize("pause", [0.0, 0.3], ids=["overlapping", "one after the other"])
async def test_a_frozen_library_is_given_up_while_clients_give_up(
    target: str, monkeypatch: pytest.MonkeyPatch, pause: float
) -> None:
    """What the worker does itself is no step of the library."""
    monkeypatch.setenv("TRTLLM_STAND_IN_FREEZE_AFTER", "12")
    lab = await started()
    monkeypatch.setattr(STUCK, 2.0)
    async with asyncio.timeout(SECONDS):
        keys: list[int] = []
        while not lab.failure.done():
            before, keys = keys, lab.submit(PROMPT, config_of(ENDLESS))
            if pause:
                await asyncio.wait([lab.failure], timeout=pause)
                before = keys
            lab.backend.stop(before, pb.FINISH_REASON_STOPPED)
            await asyncio.wait([lab.failure], timeout=pause or 0.02)
    assert "made no step for" in str(lab.failure.result())
    await lab.backend.close()


async def test_a_failed_item_ends_alone(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_STAND_IN_FAIL_ITEM", "1")
    lab = await started()
    keys = [key for _ in range(2) for key in lab.submit(PROMPT, config_of({"max_tokens": 4}))]
    failed, whole = await lab.ended(keys)
    assert failed.end is not None
    assert isinstance(failed.end.error, InvalidRequest)
    assert "FAIL_ITEM" in failed.end.error.message
    assert whole.end is not None
    assert whole.end.error is None
    assert not lab.failure.done()
    await lab.backend.close()


async def test_an_error_beside_an_end_counts(newer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = await started()
    results = importlib.import_module("tensorrt_llm._stand_in.results")
    apply = results.RequestOutput._apply

    def apply_and_fail(self: Any, response: Any) -> None:
        apply(self, response)
        self.error = "the request was lost" if response.is_final else None

    monkeypatch.setattr(results.RequestOutput, "_apply", apply_and_fail)
    (outcome,) = await lab.ended(lab.submit(PROMPT, config_of({"max_tokens": 4})))
    assert outcome.end is not None
    assert isinstance(outcome.end.error, InvalidRequest)
    assert "the request was lost" in outcome.end.error.message
    await lab.backend.close()


async def test_closing_ends_live_items(release: str) -> None:
    lab = await started()
    keys = lab.submit(PROMPT, config_of(ENDLESS))
    await lab._until(lambda: bool(lab.outcomes[keys[0]].token_ids))
    await lab.backend.close()
    (outcome,) = await lab.ended(keys)
    assert outcome.end is not None
    assert outcome.end.reason == pb.FINISH_REASON_CANCELLED
    assert executor().is_shutdown()
