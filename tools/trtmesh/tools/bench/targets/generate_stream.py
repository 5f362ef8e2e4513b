"""Triton's `generate_stream`: texts over HTTP, a server-sent event for each response."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import orjson
from trtmesh.tools.bench.reception import Reception
from trtmesh.tools.bench.record import Plan
from trtmesh.tools.bench.targets.http import HttpServer, http_server, parsed
from trtmesh.tools.bench.targets.kserve import COUNTS, DEFAULT_MODEL, TokenCounts, tensor_options
from trtmesh.tools.bench.targets.target import Connecting


class GenerateStreamTarget:
    """A model of a server. The end of the answer is the end of the request."""

    def __init__(self, server: HttpServer, model: str, release: str) -> None:
        self.release = release
        self._server = server
        self._path = f"/v2/models/{model}/generate_stream"

    async def answer(self, plan: Plan, reception: Reception) -> None:
        (prompt,) = plan.prompts
        given = {"input_ids": prompt.ids} if prompt.ids else {"text_input": prompt.whole_text}
        asked = {
            **given,
            "max_tokens": prompt.max_tokens,
            "stream": True,
            "exclude_input_in_output": True,
            # A server without these inputs takes them for parameters, without effect.
            **dict.fromkeys(COUNTS, True),
            **tensor_options(prompt),
        }
        body, counts = orjson.dumps(asked), TokenCounts()
        reception.sent()
        events = self._server.events(self._path, body)
        async with aclosing(events):
            async for event in events:
                fields = parsed(event)
                text = fields.get("text_output") or ""
                reception.chunk(0, text)
                counts.add(fields, has_content=bool(text))
        reception.usage(0, counts.prompt, counts.output())
        reception.finish(0, "")


@asynccontextmanager
async def generate_stream_target(connecting: Connecting) -> AsyncIterator[GenerateStreamTarget]:
    async with http_server(connecting) as server:
        told = await server.get("/v2")
        release = f"{told.get('name', '')} {told.get('version', '')}"
        yield GenerateStreamTarget(server, connecting.model or DEFAULT_MODEL, release)
