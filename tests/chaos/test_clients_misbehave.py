"""Clients that vanish or never read."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from e2e.mesh import (
    ENDLESS,
    INSIDE,
    SIMULATED,
    Mesh,
    check_beginning,
    decode,
    eventually,
    running_mesh,
)
from process_constants import constants
from trtmesh.chassis.error_wire import REASON_METADATA_KEY
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2, router_pb2_grpc

HASTY_CLIENT = Path(__file__).with_name("hasty_client.py")
FLAT_OUT = (*SIMULATED, "--simulated-timing-step-ms", "0", "--simulated-limits-max-sequence-tokens", "100000000",
            "--simulated-kv-cache-total-blocks", "10000000")  # fmt: skip

FIXED_WINDOW = [("grpc.http2.bdp_probe", 0)]
"""Channel options for a fixed flow-control window of 64 KiB. Otherwise it grows with the estimated bandwidth, on some
machines beyond the output of a whole test."""


@asynccontextmanager
async def hasty_client(mesh: Mesh, streams: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """Starts a client process and waits for tokens on every stream."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(HASTY_CLIENT),
        mesh.router.address,
        str(streams),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout
    try:
        started: set[bytes] = set()
        while len(started) < streams:
            number, kind = (await process.stdout.readline()).split()
            if kind == b"Tokens":
                started.add(number)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        # Without a reader of its output, the process hangs in a write.
        await process.communicate()


async def test_killed_client_frees_its_requests() -> None:
    slow = (*SIMULATED, "--simulated-timing-step-ms", "20")
    async with running_mesh(tokenizers=0, engine_flags=slow, router_env=INSIDE) as mesh:
        expected = await mesh.client.complete(["bystander"], max_tokens=60)
        bystander = mesh.open(["bystander"], max_tokens=ENDLESS)
        async with hasty_client(mesh, streams=20) as client:
            await bystander.tokens_here(1)
            assert (await mesh.gauges())["live_requests"] == 21
            client.kill()
            await eventually(lambda: is_live(mesh, 1))
            here = bystander.tokens()
            check_beginning(await bystander.stopped_at(max(60, here + 10)), expected)
            await mesh.idle()


@pytest.mark.parametrize("limit", ["paused", "stall"])
async def test_client_that_never_reads_is_ended(limit: str) -> None:
    flags = {
        "paused": constants(client_unread_seconds=2, buffer_tokens=20_000),
        "stall": constants(client_unread_seconds=1, buffer_tokens=10**9),
    }[limit]
    async with running_mesh(engine_flags=FLAT_OUT, router_flags=flags) as mesh:
        router = psutil.Process(mesh.router.pid)
        (expected,) = await mesh.client.complete(["bystander"], max_tokens=150)
        before = router.memory_info().rss
        request = router_pb2.GenerateRequest(
            items=[router_pb2.GenerateItem(prompt=pb.Prompt(text="endless"))] * 4,
            config=pb.GenerationConfig(stopping=pb.StoppingConfig(max_tokens=50_000_000)),
        )
        async with grpc.aio.insecure_channel(mesh.router.address, FIXED_WINDOW) as channel:
            call = router_pb2_grpc.MeshServiceStub(channel).Generate(request)
            # Counters stay when the request is over; gauges do not.
            await mesh.counted("tokens_out", 150 + 1)
            bystander = mesh.open(["bystander"], max_tokens=150)
            (item,) = await bystander.result()
            assert (item.token_ids, item.text) == (expected.token_ids, expected.text)
            assert item.text == decode(item.token_ids)
            await eventually(lambda: is_live(mesh, 0))
            await mesh.idle()
            grown = router.memory_info().rss - before
            assert grown < 300 * 2**20
            print(f"the router grew by {grown / 2**20:.0f} MiB")
            with pytest.raises(grpc.aio.AioRpcError) as told:
                async for _ in call:
                    pass
            assert told.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert dict(told.value.trailing_metadata())[REASON_METADATA_KEY] == "SLOW_CLIENT"


async def is_live(mesh: Mesh, requests: int) -> bool:
    return (await mesh.gauges())["live_requests"] == requests


async def test_client_that_never_reads_the_last_message_is_ended() -> None:
    """Generation is over, so only the pending message reveals the client."""
    flags = constants(client_unread_seconds=1)
    async with running_mesh(router_flags=flags) as mesh:
        echo = pb.GenerationConfig(
            stopping=pb.StoppingConfig(max_tokens=1),
            output=pb.OutputConfig(exclude_prompt=False, text=False),
        )
        prompt = pb.Prompt(token_ids=pb.TokenIds(ids=[5000] * 20_000))
        request = router_pb2.GenerateRequest(
            items=[router_pb2.GenerateItem(prompt=prompt)] * 100, config=echo
        )
        async with grpc.aio.insecure_channel(mesh.router.address, FIXED_WINDOW) as channel:
            call = router_pb2_grpc.MeshServiceStub(channel).Generate(request)
            # Counters stay when the request is over; gauges do not.
            await mesh.counted("slow_clients", 1)
            await eventually(lambda: is_live(mesh, 0))
            call.cancel()
