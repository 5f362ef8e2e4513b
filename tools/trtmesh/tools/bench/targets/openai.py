"""OpenAI's API: streams of chats or of completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

import orjson
from trtmesh.chassis.errors import InvalidRequest
from trtmesh.tools.bench.reception import Reception
from trtmesh.tools.bench.record import Plan, Prompt
from trtmesh.tools.bench.targets.http import HttpServer, http_server, parsed
from trtmesh.tools.bench.targets.target import Connecting

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class OpenAiTarget:
    """An endpoint. Usage tells the tokens; those of a chunk are unknown."""

    release = ""

    def __init__(self, server: HttpServer, path: str, model: str) -> None:
        self._server = server
        self._path = path
        self._model = model

    async def answer(self, plan: Plan, reception: Reception) -> None:
        (prompt,) = plan.prompts
        body = orjson.dumps(self._body(prompt))
        reception.sent()
        events = self._server.events(self._path, body)
        reason, usage = "", None
        async with aclosing(events):
            # To its end: then the connection serves the next request.
            async for event in events:
                if event == b"[DONE]":
                    if usage:
                        reception.usage(
                            0, usage.get("prompt_tokens"), usage.get("completion_tokens")
                        )
                    reception.finish(0, reason)
                    continue
                fields = parsed(event)
                usage = fields.get("usage") or usage
                for choice in fields.get("choices", ()):
                    reception.chunk(0, _text(choice), sequence_index=choice.get("index", 0))
                    reason = choice.get("finish_reason") or reason

    def _body(self, prompt: Prompt) -> Mapping[str, Any]:
        """Greedy: the default of the API is to draw."""
        body: dict[str, Any] = {
            "model": prompt.adapter or self._model,
            "max_tokens": prompt.max_tokens,
            "temperature": 0,
            **_prompt(prompt, self._path),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if prompt.ignore_end_id:
            body["ignore_eos"] = True
        if prompt.seed is not None:
            body["seed"] = prompt.seed
        if prompt.json_schema is not None:
            schema = {"name": "answer", "schema": orjson.loads(prompt.json_schema), "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return body


def _prompt(prompt: Prompt, path: str) -> Mapping[str, Any]:
    if not path.endswith(CHAT.removeprefix("/v1")):
        return {"prompt": list(prompt.ids) or prompt.whole_text}
    if prompt.ids:
        raise InvalidRequest(f"token ids need a target openai://HOST:PORT{COMPLETIONS}")
    said = (*prompt.history, prompt.text)
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]}


def _text(choice: Mapping[str, Any]) -> str:
    """New text of a choice, reasoning included."""
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or ""
    return (delta.get("reasoning_content") or "") + (delta.get("content") or "")


@asynccontextmanager
async def openai_target(connecting: Connecting) -> AsyncIterator[OpenAiTarget]:
    """Without a model, the first that the server has."""
    path = connecting.url.path or CHAT
    async with http_server(connecting) as server:
        model = connecting.model
        if not model:
            models = await server.get(f"{path.partition('/v1')[0]}/v1/models")
            try:
                model = models["data"][0]["id"]
            except (KeyError, IndexError, TypeError) as error:
                raise InvalidRequest("the server lists no model; name one by --model") from error
        yield OpenAiTarget(server, path, model)
