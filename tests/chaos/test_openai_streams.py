"""Streams of conversations over the loss of an engine or a tokenizer: with OpenAI's package a stream that is cut off
raises nothing, so its text would silently be short."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import defaultdict
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

import pytest
from aiohttp import ClientPayloadError
from compat.plain_http import PlainHttp
from e2e.mesh import DEMO, Mesh, eventually, running_mesh

TORCH = ("--model-dir", str(DEMO), "--torch-threads", "1", "--torch-kv-cache-tokens", "8192")
TALK = [{"role": "user", "content": "A function that loads a file of JSON"}]
DRAWN = {"temperature": 0.9, "seed": 11, "stream": True}
SCHEMA = {"type": "array", "items": {"enum": ["one", "two", "three"]}, "minItems": 40}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
PARAMETERS = {"type": "object", "properties": {"words": SCHEMA}, "required": ["words"]}
TOOL = {"name": "count", "parameters": PARAMETERS | {"additionalProperties": False}}
CALLED = {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
LONG = {"messages": TALK, "max_tokens": 120, "ignore_eos": True, **DRAWN}
STREAMS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "texts": (CHAT, LONG | {"n": 4}),
    "structured": (CHAT, LONG | {"response_format": FORMAT, "n": 2}),
    "calls": (CHAT, LONG | CALLED | {"n": 2}),
    "items": (RESPONSES, {"input": TALK, "max_output_tokens": 120, "ignore_eos": True, **DRAWN}),
}
PARTS = 8
"""So many are there of every stream before a fault."""


class Told:
    """What a client of a stream is told, and no part of it twice."""

    def __init__(self, name: str, path: str, body: dict[str, Any]) -> None:
        self._name, self._path, self._body = name, path, body
        self.bytes: dict[int, bytes] = defaultdict(bytes)
        """Text and end of each choice."""
        self.parts = 0

    async def read(self, http: PlainHttp) -> dict[int, bytes]:
        url = f"http://{http.address}{self._path}"
        headers = {"X-Request-Id": self._name}
        async with http.session.post(url, json=self._body, headers=headers) as response:
            assert response.status == 200, await response.read()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    self._see(json.loads(line.removeprefix(b"data: ")))
        return dict(self.bytes)

    def _see(self, part: Any) -> None:
        self.parts += 1
        assert "error" not in part
        for choice in part.get("choices", ()):
            said = choice["delta"].get("content", "") + (choice["finish_reason"] or "")
            for call in choice["delta"].get("tool_calls", ()):
                function = call["function"]
                said += call.get("id", "") + function.get("name", "") + function["arguments"]
            self.bytes[choice["index"]] += said.encode()
        if part.get("type") == "response.output_text.delta":
            self.bytes[0] += part["delta"].encode()
        elif "response" in part and part["response"].get("usage"):
            self.bytes[0] += part["type"].encode()


async def all_told(http: PlainHttp, mesh: Mesh | None = None, fault: str = "") -> Any:
    """What all streams tell, together. With a mesh, its fault is amid them."""
    told = [Told(name, path, body) for name, (path, body) in STREAMS.items()]
    async with asyncio.TaskGroup() as group:
        reading = [group.create_task(each.read(http)) for each in told]

        async def all_begun() -> bool:
            return all(each.parts >= PARTS for each in told)

        if mesh is not None:
            await eventually(all_begun)
            await FAULTS[fault](mesh)
    return [task.result() for task in reading]


async def freeze(mesh: Mesh) -> None:
    for process in (mesh.engines[0], mesh.tokenizers[0]):
        process.signal(signal.SIGSTOP)
    await mesh.counted("moved_sequences", 1)
    await mesh.counted("moved_decodes", 1)


async def kill(mesh: Mesh) -> None:
    for process in (mesh.engines[1], mesh.tokenizers[1]):
        process.signal(signal.SIGKILL)
        await process.wait()


FAULTS = {"freeze": freeze, "kill": kill}
"""Of an engine and a tokenizer."""


async def test_no_client_notices_a_lost_engine_or_tokenizer() -> None:
    async def start(mesh: Mesh) -> None:
        engines = (mesh.start_engine(*TORCH, "--worker", f"engine-{n}") for n in range(2))
        tokenizers = (mesh.start_tokenizer(tool_format="hermes") for _ in range(2))
        await asyncio.gather(*engines, *tokenizers)
        await mesh.start_router("--deadlines-silence-seconds", "2")
        await mesh.ready(workers=2, tokenizers=2)

    async with running_mesh(start=start) as mesh, PlainHttp(mesh.router.http_address) as http:
        whole = await all_told(http)
        assert [len(told) for told in whole] == [4, 2, 2, 1]
        assert all(told.startswith(b"call_") for told in whole[2].values())
        assert await all_told(http, mesh, "freeze") == whole
        for process in (mesh.engines[0], mesh.tokenizers[0]):
            process.signal(signal.SIGCONT)
        await mesh.ready(workers=2, tokenizers=2)
        assert await all_told(http, mesh, "kill") == whole
        await mesh.counted("moved_sequences", 2)
        await mesh.counted("moved_decodes", 2)
        await mesh.idle()


async def test_router_that_dies_cuts_a_stream_so_that_clients_see_it() -> None:
    """Chunks without the last one are an error to every client of HTTP/1.1."""
    body = LONG | {"max_tokens": 4000}
    async with (
        running_mesh() as mesh,
        PlainHttp(mesh.router.http_address) as http,
        aclosing(http.events(CHAT, body)) as events,
    ):
        await anext(events)
        mesh.router.signal(signal.SIGKILL)
        with pytest.raises(ClientPayloadError):
            await anext(event async for event in events if event is None)
