"""The life cycle of an engine process, started like a user starts the command."""

from __future__ import annotations

import asyncio
import signal
import socket
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from engine_streams import StreamFailed, eventually, router_stream, serving, stop, submit
from grpc_health.v1 import health_pb2, health_pb2_grpc
from process_constants import constants
from processes import ServiceProcess, run_to_exit, service_process
from recording_backend import INFO, RecordingBackend
from trtmesh.chassis.errors import SettingsError
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import engine_pb2_grpc
from trtmesh.v1 import generation_pb2 as pb

SIMULATED = ("--backend", "simulated", "--load-interval-seconds", "0.01")
TORCH = ("--model-dir", str(Path(__file__).parents[3] / "models" / "demo"))
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
PATIENCE_SECONDS = 60.0


class HealthWatch:
    """The health reports of a process, change by change."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def until(self, status: int) -> None:
        """Waits for the next report of `status`."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (response := await self._call.read()) is not grpc.aio.EOF:
                if response.status == status:
                    return
        raise AssertionError(f"the process never reported {status}")


@asynccontextmanager
async def health_watch(address: str, service: str = "") -> AsyncIterator[HealthWatch]:
    """The stream of changes, beginning with the present status."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=service), wait_for_ready=True
        )
        try:
            yield HealthWatch(call)
        finally:
            call.cancel()


async def until_health(address: str, status: int, service: str = "") -> None:
    """Waits until the process reports `status`."""
    async with health_watch(address, service) as health:
        await health.until(status)


def metrics_of(process: ServiceProcess) -> dict[str, float]:
    url = f"http://127.0.0.1:{process.metrics_port}/metrics"
    with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as response:
        lines = response.read().decode().splitlines()
    values = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in values}


async def test_drain_refuses_new_items_and_finishes_running_items() -> None:
    # The item runs for longer than the process takes to be told.
    slow = ("--simulated-timing-step-ms", "200")
    async with service_process("engine", *SIMULATED, *slow) as process:
        await until_health(process.address, SERVING)
        # Without acknowledgements: a write into an ending stream would hide the status.
        async with router_stream(process.address, credit=1000, acknowledging=False) as stream:
            await stream.send(submit(1, 50))
            await stream.until(lambda: stream.steps)
            process.signal(signal.SIGTERM)
            await stream.until(lambda: stream.loads and stream.loads[-1].draining)
            await stream.send(submit(2, 5))
            refused = (await stream.end(2)).end
            assert refused is not None
            assert refused.error.reason == "DRAINING"
            finished = await stream.end(1)
            assert len(finished.token_ids) == 50
            assert finished.end
            assert finished.end.reason == pb.FINISH_REASON_LENGTH
            failure = await stream.failure()
            assert failure.reason == "DRAINING", failure
        assert await process.wait() == 0
        assert "draining" in process.stderr


async def test_grace_period_ends_running_items() -> None:
    flags = ("--simulated-timing-step-ms", "5", "--grace-seconds", "0.1")
    async with service_process("engine", *SIMULATED, *flags) as process:
        await until_health(process.address, SERVING)
        async with router_stream(process.address) as stream:
            await stream.send(submit(1, 20_000))
            await stream.until(lambda: stream.steps)
            process.signal(signal.SIGTERM)
            assert (await stream.failure()).reason == "DRAINING"
        assert await process.wait() == 0
        assert "grace" in process.stderr


async def test_second_signal_ends_process_at_once() -> None:
    async with service_process("engine", *SIMULATED) as process:
        await until_health(process.address, SERVING)
        async with router_stream(process.address) as stream:
            await stream.send(submit(1, 20_000))
            await stream.until(lambda: stream.steps)
            process.signal(signal.SIGTERM)
            await stream.until(lambda: stream.loads and stream.loads[-1].draining)
            process.signal(signal.SIGINT)
            assert await process.wait() == 130


async def test_signal_while_loading_ends_process() -> None:
    async with service_process(
        "engine", *SIMULATED, "--simulated-timing-load-ms", "3600000"
    ) as process:
        await until_health(process.address, NOT_SERVING)
        async with grpc.aio.insecure_channel(process.address) as channel:
            stub = engine_pb2_grpc.EngineServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match="not loaded yet") as caught:
                await stub.GetEngine(epb.GetEngineRequest())
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(StreamFailed, match="not loaded yet"):
            async with router_stream(process.address):
                pass
        assert await process.stop() == 0


async def test_end_of_standard_input_stops_process() -> None:
    async with service_process("engine", *SIMULATED, "--stop-on-stdin-eof", "true") as process:
        await until_health(process.address, SERVING)
        process.close_stdin()
        assert await process.wait() == 0
        assert "parent process ended" in process.stderr


async def test_broken_backend_ends_process() -> None:
    async with service_process(
        "engine", *SIMULATED, "--simulated-faults-break-after-steps", "5"
    ) as process:
        # Watched early, because the process exits soon after the failure.
        async with (
            health_watch(process.address) as health,
            router_stream(process.address) as stream,
        ):
            await health.until(SERVING)
            noticing = asyncio.create_task(health.until(NOT_SERVING))
            await stream.send(submit(1, 100), submit(2, 100))
            for received in (await stream.ends([1, 2])).values():
                assert received.end
                assert received.end.error.reason == "WORKER_LOST"
                assert len(received.token_ids) == 5
            await noticing
        assert await process.wait() == 1
        assert "simulated.faults.break_after_steps" in process.stderr


async def test_crash_breaks_stream() -> None:
    async with service_process(
        "engine", *SIMULATED, "--simulated-faults-crash-after-steps", "5"
    ) as process:
        await until_health(process.address, SERVING)
        async with router_stream(process.address) as stream:
            await stream.send(submit(1, 100))
            assert (await stream.failure()).code is grpc.StatusCode.UNAVAILABLE
        assert await process.wait() == 70


async def test_stall_is_reported_while_load_continues() -> None:
    flags = ("--simulated-faults-freeze-after-steps", "5", *constants(step_gap_seconds=0.2))
    async with service_process("engine", *SIMULATED, *flags) as process:
        await until_health(process.address, SERVING)
        async with router_stream(process.address) as stream:
            await stream.send(submit(1, 100))
            await until_health(process.address, NOT_SERVING, "trtmesh.v1.EngineService")
            await stream.until(lambda: stream.loads and stream.loads[-1].step_count == 5)
            seen = len(stream.loads)
            await stream.until(lambda: len(stream.loads) >= seen + 3)
            assert stream.loads[-1].running_sequences == 1
            # On a slow machine an earlier step may already have been reported.
            told = "progress: 0.2 s without a step after number 5"
            await eventually(lambda: told in process.stderr)


async def test_health_recovers_with_next_step() -> None:
    flags = ("--simulated-timing-step-ms", "600", *constants(step_gap_seconds=0.1))
    async with service_process("engine", *SIMULATED, *flags) as process:
        async with (
            health_watch(process.address) as health,
            router_stream(process.address) as stream,
        ):
            await health.until(SERVING)
            # Enough steps for a slow watcher to see a stall and the recovery.
            await stream.send(submit(1, 1000))
            await health.until(NOT_SERVING)
            await health.until(SERVING)
            await stream.send(stop(1))
            await stream.end(1)
        assert await process.stop() == 0


async def test_metrics_return_to_zero() -> None:
    async with service_process("engine", *SIMULATED, "--metrics-port", "0") as process:
        await until_health(process.address, SERVING)
        async with router_stream(process.address) as stream:
            await stream.send(*(submit(handle, 5) for handle in range(10)))
            await stream.ends(range(10))
            values = await asyncio.to_thread(metrics_of, process)
            assert values["trtmesh_engine_open_streams"] == 1
            assert values["trtmesh_engine_generated_tokens_total"] == 50
            await stream.send(submit(10, 30_000))
            await stream.until(lambda: 10 in stream.received)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                values = await asyncio.to_thread(metrics_of, process)
                gauges = ("open_streams", "live_sequences", "used_blocks", "running_sequences")
                busy = values["trtmesh_engine_busy_seconds_total"]
                if busy and not any(values[f"trtmesh_engine_{gauge}"] for gauge in gauges):
                    break
        assert values['trtmesh_engine_sequences_finished_total{reason="cancelled"}'] == 1


class TestThatCannotStart:
    @pytest.mark.parametrize("backend", [SIMULATED, TORCH], ids=["simulated", "torch"])
    async def test_port_in_use_exits_with_3(self, backend: tuple[str, ...]) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = str(taken.getsockname()[1])
            ended = await run_to_exit("engine", *backend, "--port", port)
        assert ended.status == 3
        assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr
        assert "Traceback" not in ended.stderr
        assert ended.stdout == ""

    async def test_metrics_port_in_use_exits_with_3(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = str(taken.getsockname()[1])
            ended = await run_to_exit("engine", *SIMULATED, "--metrics-port", port)
        assert ended.status == 3
        assert f"cannot serve metrics on 127.0.0.1:{port}" in ended.stderr

    @pytest.mark.parametrize(
        ("flags", "env", "words"),
        [
            (
                ("--simulated-timing-step-ms", "fast"),
                {},
                ("flag --simulated-timing-step-ms", "'fast'"),
            ),
            (("--simulated-timing-stepms", "5"), {}, ("--simulated-timing-stepms", "--help")),
            (
                (),
                {"TRTMESH_ENGINE_MAX_MESSAGE_BYTES": "0"},
                ("environment variable TRTMESH_ENGINE_MAX_MESSAGE_BYTES", "'0'", "at least 1024"),
            ),
            (
                (
                    "--simulated-vocabulary-first-token-id",
                    "9",
                    "--simulated-vocabulary-last-token-id",
                    "3",
                ),
                {},
                ("first_token_id 9", "last_token_id 3"),
            ),
        ],
    )
    async def test_wrong_setting_exits_with_2(
        self, flags: tuple[str, ...], env: dict[str, str], words: tuple[str, ...]
    ) -> None:
        ended = await run_to_exit("engine", *SIMULATED, *flags, env=env)
        assert ended.status == 2
        assert ended.stderr.startswith("trtmesh engine: error: ")
        assert len(ended.stderr.splitlines()) == 1
        for word in words:
            assert word in ended.stderr


async def test_torch_backend_needs_model_dir() -> None:
    ended = await run_to_exit("engine", "--backend", "torch")
    assert ended.status == 2
    assert "engine.model_dir" in ended.stderr


async def test_role_that_the_backend_lacks_is_refused() -> None:
    assert INFO.capabilities.roles == (epb.WORKER_ROLE_MIXED,)
    with pytest.raises(SettingsError) as refused:
        async with serving(RecordingBackend(INFO), role="prefill"):
            pass
    assert refused.value.setting == "engine.role"


async def test_simulated_engine_never_imports_torch() -> None:
    async with service_process("engine", *SIMULATED) as process:
        await until_health(process.address, SERVING)
        maps = await asyncio.to_thread(Path(f"/proc/{process.pid}/maps").read_text)
        # By name: the folder around the files may have any name.
        files = {Path(line.split(maxsplit=5)[-1]).name for line in maps.splitlines()}
        assert [name for name in files if "torch" in name] == []
