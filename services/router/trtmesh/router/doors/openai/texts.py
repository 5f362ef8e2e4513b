"""`/tokenize` and `/detokenize`, as vLLM and SGLang have them: texts and conversations to ids, and ids to texts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from aiohttp import web
from trtmesh.chassis.errors import InvalidField
from trtmesh.chassis.fair.messages import ReceivedMessage
from trtmesh.router.doors.http.answers import json_response
from trtmesh.router.doors.http.bodies import Body
from trtmesh.router.doors.http.json_bodies import JSON_COST, parse_json
from trtmesh.router.doors.http.port import HttpPort
from trtmesh.router.doors.openai.chat import conversation
from trtmesh.router.doors.openai.errors import FIELD_NAMES, IGNORED, OpenAiForm, id_of, named
from trtmesh.router.doors.openai.fields import BOOLEAN, LIST, TEXT, Fields, checked_ids
from trtmesh.router.doors.openai.requested import Requested, encoded
from trtmesh.router.doors.openai.served import ServedModels
from trtmesh.router.tokenizers.decoding import TextOptions
from trtmesh.router.tokenizers.pool import TokenizerPool
from trtmesh.v1 import tokenizer_pb2 as pb

T = TypeVar("T")


class TextPaths:
    """The endpoints that run no model."""

    def __init__(
        self,
        served: ServedModels,
        tokenizers: TokenizerPool,
        port: HttpPort,
        *,
        reports_unknown: bool,
    ) -> None:
        self._served, self._tokenizers, self._bodies = served, tokenizers, port.bodies
        self._reports_unknown = reports_unknown
        tokenize = partial(self._serve, _read_text, self._tokenize)
        detokenize = partial(self._serve, _read_ids, self._detokenize)
        for path, handler, told in (
            ("/tokenize", tokenize, "a prompt or messages to token ids"),
            ("/detokenize", detokenize, "token ids to a text"),
        ):
            port.error_forms[path[1:]] = OpenAiForm()
            port.app.router.add_post(path, handler)
            port.served[path] = told

    async def _serve(
        self,
        read_fields: Callable[[Requested], T],
        answer: Callable[[Requested, T], Awaitable[dict[str, Any]]],
        request: web.Request,
    ) -> web.Response:
        async def read(message: ReceivedMessage, body: Body) -> tuple[Requested, T]:
            parse = partial(parse_json, body, self._bodies.limits.most_json_bytes)
            fields = Fields(await message.run(parse, JSON_COST))
            request[FIELD_NAMES] = fields.names
            if self._reports_unknown:
                request[IGNORED] = fields.ignored = []
            served = self._served.find(fields.take("model", TEXT) or "")
            about = self._tokenizers.agreed(served.model)
            requested = Requested(fields, served, id_of(request), about)
            return requested, await message.run(partial(read_fields, requested), JSON_COST)

        async with self._bodies.admitted(request, read) as (requested, taken):
            return named(request, json_response(await answer(requested, taken)))

    async def _tokenize(self, requested: Requested, command: pb.EncodeCommand) -> dict[str, Any]:
        model = requested.served.model
        token_ids = list((await encoded(self._tokenizers, model, command)).token_ids)
        described = self._served.describe(requested.served)
        return {
            "count": len(token_ids),
            "max_model_len": described.get("max_model_len"),
            "tokens": token_ids,
        }

    async def _detokenize(self, requested: Requested, ids: Sequence[int]) -> dict[str, Any]:
        model = requested.served.model
        await self._check_known(model, ids)
        options = TextOptions(skip_special_tokens=False)
        return {"prompt": await self._tokenizers.decode(model, ids, options)}

    async def _check_known(self, model: str, ids: Sequence[int]) -> None:
        """Raises InvalidField for an id without a text, which decoding would leave out, or the pool's errors."""
        size = self._tokenizers.describe(model).vocabulary_size
        asked = sorted(each for each in set(ids) if each < size)
        command = pb.EncodeCommand(described_token_ids=asked)
        told = (await self._tokenizers.encode(model, command)).token_bytes
        known = {each for each, text in zip(asked, told, strict=True) if text}
        for place, each in enumerate(ids):
            if each not in known:
                problem = f"is {each}, which the tokenizer does not know"
                raise InvalidField(problem, field=f"tokens[{place}]")


def _read_text(requested: Requested) -> pb.EncodeCommand:
    fields = requested.fields
    command = pb.EncodeCommand()
    if (text := fields.take("prompt", TEXT)) is None:
        command.chat.CopyFrom(conversation(requested).chat)
    else:
        command.text = text
        command.add_special_tokens = fields.take("add_special_tokens", BOOLEAN) is not False
    fields.refuse_rest()
    return command


def _read_ids(requested: Requested) -> Sequence[int]:
    ids = checked_ids("tokens", requested.fields.need("tokens", LIST))
    requested.fields.refuse_rest()
    return ids
