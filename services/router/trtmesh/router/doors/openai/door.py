"""The door for OpenAI's clients: translates their requests into those of the mesh, and the events into answers."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from types import MappingProxyType
from typing import Protocol

from aiohttp import HttpVersion11, hdrs, web
from trtmesh.chassis.errors import InternalError, SlowClient, TrtmeshError, UnsupportedCall
from trtmesh.chassis.fair.limits import origin_of
from trtmesh.chassis.fair.messages import ReceivedMessage
from trtmesh.chassis.forwarding import Sink
from trtmesh.chassis.http_server import connection_of
from trtmesh.chassis.logs import rebind_request_id
from trtmesh.router.callers.identity import Identity
from trtmesh.router.doors.generation import GenerationCall, RunningCall
from trtmesh.router.doors.http.answers import EVENT_STREAM, json_response
from trtmesh.router.doors.http.authorising import IDENTITY, Handler
from trtmesh.router.doors.http.bodies import Body
from trtmesh.router.doors.http.json_bodies import JSON_COST, parse_json
from trtmesh.router.doors.http.port import HttpPort
from trtmesh.router.doors.openai.answer import (
    Consumption,
    Events,
    Frame,
    Gathered,
    Piece,
    Wanted,
    Writer,
    scored_of,
)
from trtmesh.router.doors.openai.answer_parser import THINK, THOUGHT
from trtmesh.router.doors.openai.chat import GUIDE, Chats
from trtmesh.router.doors.openai.completions import Completions
from trtmesh.router.doors.openai.errors import (
    FIELD_NAMES,
    IGNORED,
    OpenAiForm,
    error_object,
    id_of,
    named,
)
from trtmesh.router.doors.openai.fields import TEXT, Fields, read_prediction
from trtmesh.router.doors.openai.log_probs import TokenBytes
from trtmesh.router.doors.openai.requested import Requested, encoded, with_prompt
from trtmesh.router.doors.openai.responses import StatelessResponses
from trtmesh.router.doors.openai.served import ServedModels
from trtmesh.router.doors.openai.settings import OpenAiSettings
from trtmesh.router.doors.openai.template_answers import TemplateAnswers
from trtmesh.router.doors.openai.texts import TextPaths
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.requests.live_request import LiveRequest
from trtmesh.router.requests.requests import Requests
from trtmesh.router.streams.client_stream import ClientStream, Waiting, WaitingTokens
from trtmesh.router.tokenizers.pool import TokenizerPool
from trtmesh.router.tracing import CallTrace
from trtmesh.v1 import tokenizer_pb2 as tokenizer_pb

log = logging.getLogger(__name__)

SCORED_COST = 64
"""Bytes of a message that takes as long to parse as a token with its log-probability takes to write."""
NOTHING_SCORED: Mapping[int, bytes] = MappingProxyType({})


class Endpoint(Protocol):
    """A path that generates."""

    path: str
    id_prefix: str
    operation: str
    """Its name in metrics."""

    def read(self, requested: Requested, *, is_large: bool) -> Wanted:
        """The request of a body. Raises TrtmeshError."""

    def writer(self, wanted: Wanted, frame: Frame) -> Writer:
        """Writes its answer as a stream."""

    def answer(self, wanted: Wanted, frame: Frame, gathered: Gathered) -> bytes:
        """A whole answer as JSON."""


DOOR = "openai"
"""Its name in metrics."""

ENDPOINTS: tuple[Endpoint, ...] = (Chats(), Completions(), StatelessResponses())


class OpenAi:
    """Serves OpenAI's paths at a port."""

    def __init__(
        self,
        settings: OpenAiSettings,
        requests: Requests,
        served: ServedModels,
        tokenizers: TokenizerPool,
        metrics: RouterMetrics,
        is_ready: Callable[[], bool],
        port: HttpPort,
    ) -> None:
        """`is_ready` says whether the mesh takes requests."""
        self._is_ready = is_ready
        self._has_defaults = settings.model_defaults
        self._reports_unknown = settings.unknown_fields == "report"
        self._requests = requests
        self._tokenizers = tokenizers
        self._token_bytes = TokenBytes(tokenizers)
        self._served = served
        self._metrics = metrics
        self._bodies = port.bodies
        port.error_forms["v1"] = OpenAiForm()
        router = port.app.router
        router.add_post("/v1/embeddings", _refuse_embeddings)
        port.open_handlers.add(self._health)
        port.served["/health"] = "200 once the mesh takes requests"
        router.add_get("/health", self._health)
        router.add_get("/v1/models", self._models)
        router.add_get("/v1/models/{name:.+}", self._model)
        TextPaths(served, tokenizers, port, reports_unknown=self._reports_unknown)
        port.served["/v1/models"] = "the models and adapters"
        self.generating: Mapping[str, Handler] = {
            each.path: partial(self._generate, each) for each in ENDPOINTS
        }
        """The handlers of the endpoints by path, for other ports that authorise the caller."""
        for path, handler in self.generating.items():
            router.add_post(path, handler)
            port.served[path] = "as OpenAI's API"

    async def _health(self, _: web.Request) -> web.Response:
        status = HTTPStatus.OK if self._is_ready() else HTTPStatus.SERVICE_UNAVAILABLE
        return web.Response(status=status)

    async def _models(self, request: web.Request) -> web.Response:
        described = [self._served.describe(each) for each in self._served.all()]
        return named(request, json_response({"object": "list", "data": described}))

    async def _model(self, request: web.Request) -> web.Response:
        served = self._served.find(request.match_info["name"])
        return named(request, json_response(self._served.describe(served)))

    async def _generate(self, endpoint: Endpoint, request: web.Request) -> web.StreamResponse:
        request_id = id_of(request)
        rebind_request_id(request_id)
        read = partial(self._read, endpoint, request)
        async with self._bodies.admitted(request, read) as (begun, wanted):
            owner, asked = request[IDENTITY], wanted.request
            origin = origin_of(request.remote or "")
            if self._requests.find(owner, asked.request_id) is not None:
                # Proxies name a retry like the call that is not over.
                asked = replace(asked, request_id=secrets.token_hex(8))
            with begun as call:
                opening = self._requests.open(asked, None, owner, origin)
                frame = Frame(f"{endpoint.id_prefix}{request_id}", wanted.model)
                reader = TemplateAnswers(wanted, self._tokenizers)
                if wanted.streamed:
                    writer = endpoint.writer(wanted, frame)
                    stream = EventStream(
                        request, wanted, writer, reader, self._token_bytes, self._metrics
                    )
                    try:
                        async with RunningCall(call, opening) as live:
                            await stream.forward(live.client)
                        return await stream.end()
                    except (SlowClient, ConnectionError):
                        raise
                    except TrtmeshError as error:
                        return await stream.fail(error)
                    except Exception as error:
                        # Broad on purpose: cut off without an event, a stream would seem whole to many clients.
                        log.exception("a stream failed unexpectedly")
                        return await stream.fail(InternalError(f"{type(error).__name__}: {error}"))
                async with RunningCall(call, opening) as live:
                    pieces, usage = await _collect(live, wanted, reader)
                self._metrics.client_messages += 1
                scored = scored_of(pieces)
                bytes_of = await self._token_bytes.of(wanted.request.model, scored)
                write = partial(endpoint.answer, wanted, frame, Gathered(pieces, usage, bytes_of))
                cost = SCORED_COST * sum(1 + len(each.top) for each in scored)
                body = await self._bodies.written(cost, write)
        return named(request, web.Response(body=body, content_type="application/json"))

    async def _read(
        self, endpoint: Endpoint, request: web.Request, message: ReceivedMessage, body: Body
    ) -> tuple[GenerationCall, Wanted]:
        """The request of a body, and its call, which begins here. Raises TrtmeshError."""
        owner, request_id = request[IDENTITY], id_of(request)
        parse = partial(parse_json, body, self._bodies.limits.most_json_bytes)
        trace = CallTrace.begin(self._requests.tracer, DOOR, request.headers.items())
        call = GenerationCall(DOOR, self._requests.metrics_of(""), endpoint.operation, trace=trace)
        try:
            fields = Fields(await message.run(parse, JSON_COST))
            request[FIELD_NAMES] = fields.names
            if self._reports_unknown:
                request[IGNORED] = fields.ignored = []
            served = self._served.find(fields.take("model", TEXT) or "")
            model = served.model
            call.metrics = self._requests.metrics_of(model)
            predicted = await self._predicted(fields, model)
            about = self._tokenizers.agreed(model)
            defaults = about.defaults if self._has_defaults else None
            requested = Requested(fields, served, request_id, about, predicted, defaults)
            wanted = await message.read(partial(endpoint.read, requested))
            return call, await self._begun(fields, wanted, owner)
        except TrtmeshError as error:
            call.end(error)
            raise

    async def _begun(self, fields: Fields, wanted: Wanted, owner: Identity) -> Wanted:
        """The request, with a rendered prompt where the model reasons: the prompt may have begun it. Raises RateLimited
        or the pool's errors."""
        reasons = wanted.reading is not None and wanted.reading.reasons
        if not reasons and wanted.by_template is None:
            return wanted
        self._requests.check_rates(wanted.request, owner)
        model, chat = wanted.request.model, wanted.request.items[0].chat
        command = tokenizer_pb.EncodeCommand(chat=chat, words=(THINK, THOUGHT))
        begun = with_prompt(wanted, await encoded(self._tokenizers, model, command))
        if begun.reading is not None and begun.reading.is_guided:
            fields.call("tools", *GUIDE)
        return begun

    async def _predicted(self, fields: Fields, model: str) -> Sequence[int]:
        """The ids of the answer that the client expects, if it says one. Raises the pool's errors."""
        if (text := read_prediction(fields)) is None:
            return ()
        fields.call("prediction", "text")
        self._tokenizers.check_size(model, text)
        command = tokenizer_pb.EncodeCommand(text=text)
        encoded = await self._tokenizers.encode(model, command)
        return encoded.token_ids


async def _refuse_embeddings(_: web.Request) -> web.StreamResponse:
    raise UnsupportedCall("embeddings are not served: this mesh runs models that generate")


async def _collect(
    live: LiveRequest, wanted: Wanted, reader: TemplateAnswers
) -> tuple[list[Piece], Consumption]:
    """Gathers a whole answer. Raises the first error of an item, which ends the others: an answer has no place for
    it."""
    events, pieces = Events(wanted), list[Piece]()
    while (waiting := await live.client.next_entries()) is not None:
        pieces += await reader.read([*events.read(waiting)])
        for error in events.errors:
            raise error
    return pieces, events.usage


class _EventResponse(web.StreamResponse):
    # Its head leaves with the first events.
    _send_headers_immediately = False


class EventStream(Sink[Sequence[Waiting]]):
    """An answer as server-sent events. It begins with the first token, so an early error has a status of its own; later
    ones are events at the end, after the choices of the other prompts."""

    def __init__(
        self,
        request: web.Request,
        wanted: Wanted,
        writer: Writer,
        reader: TemplateAnswers,
        token_bytes: TokenBytes,
        metrics: RouterMetrics,
    ) -> None:
        self._request, self._writer, self._metrics = request, writer, metrics
        self._model, self._token_bytes = wanted.request.model, token_bytes
        self._reader = reader
        self._is_plain, self._is_read_apart = wanted.is_plain, wanted.is_read_apart
        self._sequences = wanted.sequences
        self._connection = connection_of(request)
        self._chunked = request.version >= HttpVersion11
        self._events = Events(wanted)
        self._response: web.StreamResponse | None = None
        self._held = b""
        """Events to be written with the next ones."""

    def write_now(self, message: Sequence[Waiting]) -> bool:
        transport = self._connection.free_transport
        if self._response is None or transport is None or transport.is_closing():
            return False
        if self._is_read_apart:
            return False
        written = b""
        for entry in message:
            if self._is_plain and isinstance(entry, WaitingTokens):
                choice, texts = entry.batch_index * self._sequences, entry.texts
                text = texts[0] if len(texts) == 1 else "".join(texts)
                written += self._writer.text(choice + entry.sequence_index, text)
            else:
                written += self._written(self._events.read([entry]), NOTHING_SCORED)
        if written:
            # As aiohttp writes it, for a fifth of the time.
            transport.write(b"%x\r\n%b\r\n" % (len(written), written) if self._chunked else written)
            self._metrics.client_messages += 1
        return True

    async def forward(self, source: ClientStream) -> None:
        """Writes what comes, up to the end of `source`."""
        self._source = source
        await source.forward(self)

    async def write(self, message: Sequence[Waiting]) -> None:
        pieces = await self._reader.read([*self._events.read(message)])
        bytes_of: Mapping[int, bytes] = NOTHING_SCORED
        if tokens := scored_of(pieces):
            bytes_of = await self._token_bytes.of(self._model, tokens)
        self._held += self._written(pieces, bytes_of)
        # The last message leaves with the end of the stream: each write is a system call.
        if self._held and not self._source.is_over:
            held, self._held = self._held, b""
            await (await self._begun()).write(held)
            self._metrics.client_messages += 1

    def _written(self, pieces: Iterable[Piece], bytes_of: Mapping[int, bytes]) -> bytes:
        return b"".join(self._writer.of(piece, bytes_of) for piece in pieces)

    async def end(self) -> web.StreamResponse:
        """Ends the stream, with the errors of items if any. Raises the first of them if there is no choice."""
        errors = self._events.errors
        if errors and self._is_empty:
            raise errors[0]
        if errors:
            return await self._fail(errors)
        return await self._finished(self._writer.end(self._events.usage))

    async def fail(self, error: TrtmeshError) -> web.StreamResponse:
        """Ends the stream with an error. Raises it before the first event."""
        if self._is_empty:
            raise error
        return await self._fail([error])

    @property
    def _is_empty(self) -> bool:
        return self._response is None and not self._held

    async def _fail(self, errors: Sequence[TrtmeshError]) -> web.StreamResponse:
        told = [error_object(self._request, error) for error in errors]
        return await self._finished(self._writer.failed(told))

    async def _finished(self, rest: bytes) -> web.StreamResponse:
        response = await self._begun()
        await response.write_eof(self._held + rest)
        self._metrics.client_messages += 1
        return response

    async def _begun(self) -> web.StreamResponse:
        if self._response is None:
            headers = {hdrs.CONTENT_TYPE: EVENT_STREAM, hdrs.CACHE_CONTROL: "no-cache"}
            response = _EventResponse(status=HTTPStatus.OK, headers=headers)
            await named(self._request, response).prepare(self._request)
            self._response = response
        return self._response
