"""A rank dies: its worker ends with it, and leaves no process."""

from __future__ import annotations

import asyncio
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e.mesh import DEMO, DEMO_VOCABULARY, eventually
from engine.torch.harness import configure, running
from engine.torch.parallel.followers import followers, gone, started
from engine.torch.parallel.moving import check_killed_rank_moves_items
from oracle import tiny_models
from processes import service_process
from trtmesh.chassis.errors import BackendFailed, StartupError, WorkerLost
from trtmesh.engine.backend import StepOutput
from trtmesh.engine.backends.torch import backend
from trtmesh.engine.backends.torch.parallel import ranks
from trtmesh.engine.backends.torch.parallel.group import RankGroup
from trtmesh.engine.backends.torch.parallel.ranks import Ranks
from trtmesh.engine.backends.torch.settings import TorchSettings
from trtmesh.v1 import generation_pb2 as pb

LONG = configure(max_tokens=400, ignore_end_id=True)
POSITIONS = 16384
"""Tokens of a minute."""


def parallel(model: Path) -> tuple[str, ...]:
    """Flags of a worker with two ranks."""
    device = ("--torch-device", "cpu,cpu", "--torch-threads", "1")
    return ("--model-dir", str(model), *device, "--torch-kv-cache-tokens", "8192")


# The items of a busy one move to another worker below.
@pytest.mark.parametrize(
    "is_busy", [pytest.param(True, marks=pytest.mark.soak), False], ids=["busy", "idle"]
)
async def test_a_killed_rank_ends_the_engine_and_its_sequences_can_move(
    llama: Path, is_busy: bool
) -> None:
    async with running(llama, device="cpu,cpu") as engine:
        (rank,) = followers()
        with engine.gate.held():
            if is_busy:
                (key,) = engine.submit([5, 6, 7], LONG)
                await engine.until(lambda: engine.streams[key].token_ids)
            rank.kill()
        await engine.until(lambda: engine.failures)
        for stream in await engine.ended():
            assert stream.end
            assert stream.end.reason == pb.FINISH_REASON_ERROR
            assert isinstance(stream.end.error, WorkerLost)
        with pytest.raises(WorkerLost):
            engine.submit([5, 6, 7], LONG)
    (failure,) = engine.failures
    assert f"rank 1 on cpu (process {rank.pid}) was killed by SIGKILL" in str(failure)
    assert followers() == []


async def test_a_fault_in_a_step_ends_the_engine(llama: Path) -> None:
    """The other rank waits for a sum that does not come, so no further step is possible."""
    async with running(llama, device="cpu,cpu") as engine:

        def failing(*_: object) -> None:
            raise RuntimeError("the device is gone")

        compute: Any = engine.backend._loaded.engine._compute
        with engine.gate.held():
            (first, _) = engine.submit([5, 6, 7], LONG) + engine.submit([8, 9], LONG)
            await engine.until(lambda: engine.streams[first].token_ids)
            layer = compute._own._model.module.model.layers[1]
            layer.mlp.register_forward_pre_hook(failing)
        await engine.until(lambda: engine.failures)
        for stream in await engine.ended():
            assert stream.end
            assert isinstance(stream.end.error, WorkerLost)
            assert "the device is gone" in str(stream.end.error)
    assert followers() == []


async def test_nothing_read_after_a_loss_is_delivered(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation that waited for a rank on a GPU ends with any result."""
    losses: list[Exception] = []
    monkeypatch.setattr(Ranks, "loss", property(lambda _: losses[0] if losses else None))
    async with running(llama, device="cpu,cpu") as engine:

        def lose(output: StepOutput) -> None:
            """On the engine's thread, which reads nothing meanwhile."""
            if output.token_ids:
                losses.append(BackendFailed("rank 1 has ended"))

        engine.on_output = lose
        engine.submit([5, 6, 7], LONG)
        (stream,) = await engine.ended()
        assert len(stream.token_ids) == len(losses) == 1
        assert stream.end
        assert isinstance(stream.end.error, WorkerLost)


async def test_a_thread_that_waits_for_good_does_not_keep_the_backend_from_closing(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "LOST_SECONDS", 0.2)
    waiting, released = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        waiting.set()
        released.wait()

    async with running(llama, device="cpu,cpu") as engine:
        compute: Any = engine.backend._loaded.engine._compute
        mlp = compute._own._model.module.model.layers[1].mlp
        mlp.register_forward_pre_hook(wait)
        engine.submit([5, 6, 7], LONG)
        await asyncio.to_thread(waiting.wait)
        (rank,) = followers()
        rank.kill()
        await engine.until(lambda: engine.failures)
    thread = engine.backend._thread
    assert thread
    assert thread.is_alive()
    released.set()
    thread.join()


async def test_what_holds_the_group_is_released_after_the_other_ranks(
    llama: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the group ends: NCCL waits for graphs with its operations."""
    # On a busy machine the end of a rank takes its time.
    monkeypatch.setattr("trtmesh.engine.backends.torch.parallel.ranks.END_SECONDS", 60.0)
    living: list[list[psutil.Process]] = []
    async with running(llama, device="cpu,cpu") as engine:
        ranks = engine.backend._loaded.ranks
        assert ranks
        ranks.group.release_first(lambda: living.append(followers()))
        await engine.run([[5, 6, 7]], configure(max_tokens=4))
    assert living == [[]]
    assert not caplog.records, "ranks end by themselves where the first one does"


async def test_a_frozen_rank_is_killed_at_the_end(llama: Path) -> None:
    async with running(llama, device="cpu,cpu"):
        (rank,) = followers()
        rank.suspend()
    assert followers() == []


async def test_a_killed_rank_moves_the_items_of_its_worker(tmp_path: Path) -> None:
    model = tiny_models.build(
        tmp_path, vocab_size=DEMO_VOCABULARY, max_position_embeddings=POSITIONS
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, model)
    given = ("cpu,cpu", "cpu", "--torch-threads", "1")
    await check_killed_rank_moves_items(*given, model=model, positions=POSITIONS)


# Ranks of processes are executed and import PyTorch. Above, those of this process end in order.
@pytest.mark.soak
async def test_a_killed_first_rank_takes_the_others_along(llama: Path) -> None:
    async with service_process("engine", *parallel(llama)) as engine:
        rank = await started(engine)
        engine.signal(signal.SIGKILL)
        await engine.wait()
        await gone(rank)


@pytest.mark.soak
async def test_signals_to_all_processes_stop_the_worker_in_order(llama: Path) -> None:
    """As from a terminal, and from a service manager."""
    async with service_process("engine", *parallel(llama)) as engine:
        rank = await started(engine)
        for number in (signal.SIGINT, signal.SIGTERM):
            rank.send_signal(number)
        engine.signal(signal.SIGTERM)
        assert await engine.wait() == 0
        assert "ended with status" not in engine.stderr
        await gone(rank)


@pytest.mark.soak
async def test_a_killed_rank_ends_the_start(llama: Path) -> None:
    async with service_process("engine", *parallel(llama)) as engine:

        async def has_child() -> bool:
            return bool(followers(engine.pid))

        await eventually(has_child)
        (rank,) = followers(engine.pid)
        rank.kill()
        assert await engine.wait() == 1
        assert "rank 1 on cpu" in engine.stderr
        await gone(rank)


def test_a_rank_killed_before_all_are_there_ends_the_start(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrive = ranks._await

    def arrive_and_die(other: ranks._Other) -> None:
        arrive(other)
        other.process.kill()

    monkeypatch.setattr(ranks, "_await", arrive_and_die)
    with pytest.raises(StartupError, match=r"rank 1 on cpu .* was killed by SIGKILL"):
        Ranks(["cpu", "cpu"], llama, TorchSettings())
    assert not followers()


def test_a_rank_that_ends_before_the_first_joins_leaves_the_process_running(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the folder is gone, PyTorch waits for it: not with the lock that every thread of the process needs."""
    is_over, begins = threading.Event(), threading.Event()

    def join_late(*given: Any) -> RankGroup:
        is_over.wait()
        begins.set()
        return RankGroup(*given)

    monkeypatch.setattr(ranks, "RankGroup", join_late)
    monkeypatch.setattr(ranks, "_await", lambda other: other.process.kill())
    with pytest.raises(StartupError, match=r"rank 1 on cpu .* was killed by SIGKILL"):
        Ranks(["cpu", "cpu"], llama, TorchSettings())
    is_over.set()
    begins.wait()
    for _ in range(20):
        time.sleep(0.01)


def test_a_rank_whose_connections_fail_first_is_the_cause(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> RankGroup:
        (rank,) = followers()
        threading.Timer(0.3, rank.kill).start()
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(ranks, "RankGroup", fail)
    monkeypatch.setattr(ranks, "CAUSE_SECONDS", 60.0)
    with pytest.raises(StartupError, match=r"rank 1 on cpu .* was killed by SIGKILL"):
        Ranks(["cpu", "cpu"], llama, TorchSettings())
