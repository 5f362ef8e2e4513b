"""A chat stream over the death of its engine."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import Any

from compat.plain_http import PlainHttp
from e2e.mesh import INSIDE, SIMULATED, WIDE_TOKENS, Mesh, running_mesh

ENGINES = ("engine-0", "engine-1")
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell me a long story."}],
    "max_tokens": 400,
    "seed": 11,
    "temperature": 0.9,
    "n": 4,
    "stream": True,
    "ignore_eos": True,
}


async def test_killed_engine_leaves_no_trace_in_a_chat_stream() -> None:
    """With OpenAI's package a stream that is cut off raises nothing: its text would silently be short."""

    async def start(mesh: Mesh) -> None:
        flags = (*SIMULATED, *WIDE_TOKENS)
        starts = (mesh.start_engine(*flags, "--worker", name) for name in ENGINES)
        mesh.engines[:] = await asyncio.gather(*starts)
        await mesh.start_router(env=INSIDE)
        await mesh.ready(workers=2, tokenizers=1)

    async with running_mesh(start=start) as mesh, PlainHttp(mesh.router.http_address) as http:
        whole, parts = await told(http, None)
        assert parts > 4 * 10
        moved, _ = await told(http, mesh)
        assert moved == whole
        await mesh.counted("moved_sequences", 1)


async def told(http: PlainHttp, mesh: Mesh | None) -> tuple[list[bytes], int]:
    """The bytes of each choice's text and end, and the number of parts. Kills the engine of the request after some
    parts in `mesh`."""
    choices, parts = [b""] * 4, 0
    async with http.session.post(
        f"http://{http.address}/v1/chat/completions", json=BODY
    ) as response:
        assert response.status == 200
        async for line in response.content:
            if not line.strip() or line.strip() == b"data: [DONE]":
                continue
            part = json.loads(line.removeprefix(b"data: "))
            for choice in part["choices"]:
                choices[choice["index"]] += choice["delta"].get("content", "").encode()
                choices[choice["index"]] += (choice["finish_reason"] or "").encode()
            parts += 1
            if mesh is not None and parts == 40:
                (request,) = (await mesh.admin.list_requests()).requests
                await kill(mesh, request.items[0].worker)
    return choices, parts


async def kill(mesh: Mesh, worker: str) -> None:
    engine = mesh.engines[ENGINES.index(worker)]
    engine.signal(signal.SIGKILL)
    await engine.wait()
