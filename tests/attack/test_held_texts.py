"""What a router holds for large texts that wait for a tokenizer."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress

import grpc
import psutil
from attack.conftest import PATIENCE_SECONDS, until_serving
from e2e.mesh import DEMO, PATIENT
from processes import service_process
from trtmesh.client import AdminClient
from trtmesh.v1 import router_pb2 as pb
from trtmesh.v1 import router_pb2_grpc

TEXT = "\U0001f600" * 250_000
TEXT_BYTES = 1_000_000
REQUESTS = 40
MOST_COPIES = 1.6
"""Memory of a waiting request in multiples of its text: one copy, and what is on its way."""
FREE = ("--port", "0")


async def test_a_waiting_text_is_held_once() -> None:
    """Neither the message of the request nor a part of it keeps another copy."""
    request = pb.GenerateRequest()
    request.config.stopping.max_tokens = 1
    request.items.add().prompt.text = TEXT
    async with (
        service_process("tokenizer", *FREE, "--model-dir", str(DEMO)) as tokenizer,
        service_process("engine", *FREE, "--backend", "simulated", "--model", "demo") as engine,
        service_process(
            *("router", *FREE, *PATIENT),
            *("--engines", engine.address, "--tokenizers", tokenizer.address),
        ) as router,
        grpc.aio.insecure_channel(router.address) as channel,
        AdminClient(router.admin_address) as admin,
    ):
        await until_serving(router.address)
        stub = router_pb2_grpc.MeshServiceStub(channel)
        process = psutil.Process(router.pid)
        # The first large message leaves memory for those after it.
        with suppress(grpc.aio.AioRpcError):
            await stub.Generate(request).read()
        before = process.memory_info().rss
        os.kill(tokenizer.pid, signal.SIGSTOP)
        try:
            calls = [stub.Generate(request) for _ in range(REQUESTS)]
            async with asyncio.timeout(PATIENCE_SECONDS):
                while (await admin.list_requests(limit=1)).live_requests < REQUESTS:  # noqa: ASYNC110 - a count sets no event
                    await asyncio.sleep(0.05)
            grown = process.memory_info().rss - before
            for call in calls:
                call.cancel()
        finally:
            os.kill(tokenizer.pid, signal.SIGCONT)
    assert grown < MOST_COPIES * REQUESTS * TEXT_BYTES, f"{grown / 2**20:.0f} MiB"
