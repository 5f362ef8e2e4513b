"""Streams of conversations over the loss of an engine or a tokenizer: with OpenAI's package a stream that is cut off
raises nothing, so its text would silently be short."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import cycle
from typing import Any

import pytest
from aiohttp import (
    ClientOSError,
    ClientPayloadError,
    ClientTimeout,
    ServerDisconnectedError,
    SocketTimeoutError,
)
from compat.plain_http import PlainHttp
from e2e.mesh import SMALL, Mesh, eventually, running_mesh, scrape
from processes import ServiceProcess

TORCH = (*SMALL, "--torch-threads", "1", "--torch-kv-cache-tokens", "8192")
TALK = [{"role": "user", "content": "A function that loads a file of JSON"}]
DRAWN = {"temperature": 0.9, "seed": 11, "stream": True}
SCHEMA = {"type": "array", "items": {"enum": ["one", "two", "three"]}, "minItems": 400}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
PARAMETERS = {"type": "object", "properties": {"words": SCHEMA}, "required": ["words"]}
TOOL = {"name": "count", "parameters": PARAMETERS | {"additionalProperties": False}}
CALLED = {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
Streams = Mapping[str, tuple[str, dict[str, Any]]]


def streams_of(tokens: int) -> Streams:
    """Path and body of each stream, with so many tokens a choice."""
    always = {"ignore_eos": True, **DRAWN}
    chat = {"messages": TALK, "max_tokens": tokens, **always}
    return {
        "texts": (CHAT, chat | {"n": 4}),
        "structured": (CHAT, chat | {"response_format": FORMAT, "n": 2}),
        "calls": (CHAT, chat | CALLED | {"n": 2}),
        "items": (RESPONSES, {"input": TALK, "max_output_tokens": tokens, **always}),
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


async def all_told(http: PlainHttp, streams: Streams) -> list[dict[int, bytes]]:
    """What all streams tell, together."""
    told = (Told(name, path, body).read(http) for name, (path, body) in streams.items())
    return await asyncio.gather(*told)


ENDLESS = "endless"
"""Name of a stream that a fault is sure to meet, on a busy machine too."""


@asynccontextmanager
async def endless(http: PlainHttp, begins: Mapping[int, bytes]) -> AsyncIterator[None]:
    """A stream of texts that runs until it has told more than the block's beginning, and begins as it must."""
    path, body = streams_of(4000)["texts"]
    told = Told(ENDLESS, path, body | {"n": len(begins)})
    reading = asyncio.create_task(told.read(http))

    async def has_told(parts: int) -> bool:
        assert not reading.done()
        return told.parts >= parts and all(
            len(told.bytes[choice]) > len(text) for choice, text in begins.items()
        )

    try:
        yield
        here = told.parts
        await eventually(lambda: has_told(here + PARTS))
        for choice, text in begins.items():
            assert told.bytes[choice].startswith(text.removesuffix(b"length"))
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def told_amid(
    fault: signal.Signals, mesh: Mesh, http: PlainHttp, streams: Streams, texts: Mapping[int, bytes]
) -> tuple[list[dict[int, bytes]], Sequence[ServiceProcess]]:
    """What all streams tell while the fault meets an engine and a tokenizer, and these."""
    told = [Told(name, path, body) for name, (path, body) in streams.items()]
    async with endless(http, texts), asyncio.TaskGroup() as group:
        reading = [group.create_task(each.read(http)) for each in told]
        await eventually(lambda: all_begun(told))
        moved = await count(mesh, "moved_sequences")
        engine = await engine_of_endless(mesh)
        engine.signal(fault)
        tokenizer = await strike_a_tokenizer(mesh, fault)
        await mesh.counted("moved_sequences", moved + 1)
    return [task.result() for task in reading], (engine, tokenizer)


async def engine_of_endless(mesh: Mesh) -> ServiceProcess:
    found: list[ServiceProcess] = []

    async def has_one() -> bool:
        requests = (await mesh.admin.list_requests(ENDLESS)).requests
        names = {item.worker for request in requests for item in request.items}
        found[:] = [each for n, each in enumerate(mesh.engines) if f"engine-{n}" in names]
        return bool(found)

    await eventually(has_one)
    return found[0]


async def strike_a_tokenizer(mesh: Mesh, fault: signal.Signals) -> ServiceProcess:
    """Strikes a tokenizer that decodes: what it decodes while it is stopped is there when it is struck."""
    moved = await count(mesh, "moved_decodes")

    async def has_moved() -> bool:
        return await count(mesh, "moved_decodes") > moved

    async def is_over(tokenizer: ServiceProcess) -> bool:
        return await has_moved() or not await decodes(mesh, tokenizer)

    for tokenizer in cycle(mesh.tokenizers):
        tokenizer.signal(signal.SIGSTOP)
        if await decodes(mesh, tokenizer):
            if fault is signal.SIGKILL:
                tokenizer.signal(fault)
                await eventually(has_moved)
                return tokenizer
            await eventually(partial(is_over, tokenizer))
            if await has_moved():
                return tokenizer
        tokenizer.signal(signal.SIGCONT)
    raise AssertionError


async def decodes(mesh: Mesh, tokenizer: ServiceProcess) -> bool:
    found = (await mesh.status()).tokenizers
    return any(each.sequences for each in found if each.address == tokenizer.address)


async def count(mesh: Mesh, name: str) -> float:
    return (await scrape(mesh.router)).get(f"trtmesh_router_{name}_total", 0.0)


async def test_no_client_notices_a_lost_engine_or_tokenizer() -> None:
    async def start(mesh: Mesh) -> None:
        engines = (mesh.start_engine(*TORCH, "--worker", f"engine-{n}") for n in range(2))
        tokenizers = (mesh.start_tokenizer(tool_format="hermes") for _ in range(2))
        await asyncio.gather(*engines, *tokenizers)
        await mesh.start_router("--deadlines-silence-seconds", "2")
        await mesh.ready(workers=2, tokenizers=2)

    async with running_mesh(start=start) as mesh, PlainHttp(mesh.router.http_address) as http:
        streams = streams_of(40)
        whole = await all_told(http, streams)
        assert [len(told) for told in whole] == [4, 2, 2, 1]
        assert all(told.startswith(b"call_") for told in whole[2].values())
        for fault in (signal.SIGSTOP, signal.SIGKILL):
            told, lost = await told_amid(fault, mesh, http, streams, {0: whole[0][0]})
            assert told == whole
            if fault is signal.SIGSTOP:
                for process in lost:
                    process.signal(signal.SIGCONT)
                await mesh.ready(workers=2, tokenizers=2)
        await mesh.idle()


SILENCE = ClientTimeout(total=None, sock_read=5)
"""For a router that says nothing more; in place of the 600 s of OpenAI's package."""
LOST = (ClientPayloadError, ServerDisconnectedError, ClientOSError, SocketTimeoutError)
"""What HTTP clients raise; OpenAI's package raises APIConnectionError or APITimeoutError for these."""


async def whole_answer(routers: Sequence[PlainHttp], path: str, body: dict[str, Any]) -> Any:
    """As OpenAI's package asks: again after a connection was lost or silent, here at the next of several routers."""
    for http in routers[:-1]:
        with suppress(*LOST):
            return (await http.post(path, body, timeout=SILENCE)).json
    return (await routers[-1].post(path, body)).json


@pytest.mark.parametrize(
    "fault", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.soak)]
)
async def test_clients_of_a_lost_router_see_it_and_have_the_same_of_the_next(
    fault: signal.Signals,
) -> None:
    async def start(mesh: Mesh) -> None:
        engines = (mesh.start_engine(*TORCH, "--worker", f"engine-{n}") for n in range(2))
        await asyncio.gather(*engines, mesh.start_tokenizer(tool_format="hermes"))
        await mesh.start_router()
        await mesh.ready(workers=2, tokenizers=1)

    async with running_mesh(start=start) as mesh, PlainHttp(mesh.router.http_address) as next_one:
        engines = ",".join(engine.address for engine in mesh.engines)
        peers = ("--engines", engines, "--tokenizers", mesh.tokenizers[0].address, "--port", "0")
        lost = await mesh.start("router", *peers)
        async with PlainHttp(lost.http_address) as http:
            await eventually(http.is_ready)
            short = streams_of(30)
            whole = await all_told(next_one, short)
            # Too long to be over before the fault.
            longer = streams_of(4000)
            told = [Told(name, path, body) for name, (path, body) in longer.items()]
            reading = [asyncio.create_task(each.read(http)) for each in told]
            path, body = longer["calls"]
            at_once = {"stream": False, "max_tokens": 30}
            await eventually(lambda: all_begun(told))
            lost.signal(fault)
            answer = await whole_answer([http, next_one], path, body | at_once)
            calls = [each["message"]["tool_calls"] for each in answer["choices"]]
            assert all(call[0]["function"]["name"] == "count" for call in calls)
            # A seed is all that it takes: the next router tells the same, from the beginning.
            assert await all_told(next_one, short) == whole
            for one, again in zip(told, whole, strict=True):
                for choice, text in again.items():
                    length = min(len(one.bytes[choice]), len(text) - len("response.incomplete"))
                    assert one.bytes[choice][:length] == text[:length]
            if fault == signal.SIGSTOP:
                # Frozen, it holds its clients until their own timeout.
                assert not any(task.done() for task in reading)
                lost.signal(signal.SIGKILL)
            ends = await asyncio.gather(*reading, return_exceptions=True)
            assert [type(end) for end in ends] == [ClientPayloadError] * len(told)
        await mesh.idle()


async def all_begun(told: Sequence[Told]) -> bool:
    return all(each.parts >= PARTS for each in told)
