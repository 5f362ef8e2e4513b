"""Triton's HTTP endpoints, on a port of their own."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Annotated, Any

from aiohttp import web
from pydantic import BeforeValidator, Field
from trtmesh.chassis.errors import InvalidRequest
from trtmesh.chassis.http_server import HttpLimits, HttpServer
from trtmesh.chassis.settings import OptionalPort, Settings, split_commas
from trtmesh.chassis.tls.certificates import ServerTls
from trtmesh.kserve import grpc_service_pb2 as kserve
from trtmesh.router.callers.callers import Callers
from trtmesh.router.doors.triton.http.authorising import authorising
from trtmesh.router.doors.triton.http.bodies import (
    Bodies,
    BodyLimits,
    as_json,
    json_response,
)
from trtmesh.router.doors.triton.http.errors import answering
from trtmesh.router.doors.triton.http.inference import Inference
from trtmesh.router.doors.triton.http.origins import only_from
from trtmesh.router.doors.triton.http.platforms import (
    Handler,
    SageMaker,
    SageMakerSettings,
    VertexAi,
    VertexAiSettings,
)
from trtmesh.router.doors.triton.server import (
    MODEL_CONTROL,
    SHARED_MEMORY,
    TritonServer,
    unsupported,
)
from trtmesh.router.doors.triton.templates.template import Model

Serving = Awaitable[web.StreamResponse]

log = logging.getLogger(__name__)

EXTENSIONS = (
    *("binary_tensor_data", "generate", "logging", "model_configuration", "model_repository"),
    *("parameters", "statistics"),
)
IDLE_SECONDS = 75.0
"""How long a connection may idle, or take to send the head of a request."""
UNREAD_MARGIN_SECONDS = 1.0
"""How much longer than a request's client a connection may leave an answer unread."""
MODEL = "/v2/models/{model}"
VERSION = "/versions/{version:[0-9]+}"
UNSUPPORTED = {
    "/v2/systemsharedmemory{rest:.*}": SHARED_MEMORY,
    "/v2/cudasharedmemory{rest:.*}": SHARED_MEMORY,
    "/v2/repository/models/{rest:.*}": MODEL_CONTROL,
}
"""Features of Triton without a counterpart here."""


class HttpSettings(Settings):
    """The Triton door over HTTP."""

    port: OptionalPort = 8000
    """Port to listen on; `none` serves no HTTP."""
    max_connections: Annotated[int, Field(ge=1, le=2**20)] = 8192
    """Most open connections; further ones are answered with 503."""
    max_per_address: Annotated[int, Field(ge=1, le=2**20)] = 1024
    """Most open connections of one IPv4 address or one /64 network of IPv6, with the same answer beyond. A proxy is one
    for all behind it, and needs a connection for each request at a time."""
    max_json_bytes: Annotated[int, Field(ge=1024, le=2**31 - 1)] = 16 * 2**20
    """Largest JSON in a body; binary tensors behind it count for `max_message_bytes` alone."""
    max_unfinished_bytes: Annotated[int, Field(ge=1024, le=2**40)] = 128 * 2**20
    """Most bytes of requests that are not parsed yet, of all connections together; beyond, the largest body is answered
    with 429."""
    allowed_origins: Annotated[tuple[str, ...], BeforeValidator(split_commas)] = ()
    """Origins of web pages, such as `https://chat.example`, whose browsers may send requests; `*` allows all. Pages of
    this port itself are allowed under `localhost` and under an IP address."""
    receive_seconds: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """Time for a client to send the body of a request."""
    sagemaker: SageMakerSettings = SageMakerSettings()
    vertex_ai: VertexAiSettings = VertexAiSettings()


class HttpDoor:
    """Serves from `open` to `close`."""

    def __init__(
        self,
        server: TritonServer,
        callers: Callers,
        settings: HttpSettings,
        host: str,
        max_body_bytes: int,
        unread_seconds: float,
        tls: ServerTls | None,
    ) -> None:
        self._server = server
        self._settings = settings
        self._host = host
        authorise = authorising(callers, (self._live, self._ready, self._model_ready))
        app = web.Application(
            middlewares=[answering, only_from(settings.allowed_origins), authorise],
            client_max_size=max_body_bytes,
        )
        limits = HttpLimits(
            max_open=settings.max_connections,
            max_per_address=settings.max_per_address,
            held_bytes=settings.max_unfinished_bytes,
            idle_seconds=IDLE_SECONDS,
            # A stream ends by the limit of its request, which tells why.
            unread_seconds=unread_seconds + UNREAD_MARGIN_SECONDS,
        )
        self._http = HttpServer(app, limits, tls)
        json_bytes = min(settings.max_json_bytes, max_body_bytes)
        self._bodies = Bodies(
            BodyLimits(max_body_bytes, json_bytes, settings.receive_seconds), self._http
        )
        self._add_routes(app, Inference(server, self._bodies))

    def listen(self) -> str:
        """Takes the address and returns it. Raises StartupError."""
        assert self._settings.port is not None
        address, _ = self._http.listen(self._host, self._settings.port, "listen for HTTP")
        log.info("listening for HTTP on %s", address)
        return address

    async def open(self) -> None:
        await self._http.open()

    def retire_connections(self) -> None:
        """Has clients open their next connections, maybe to another router."""
        self._http.retire_connections()

    async def close(self) -> None:
        await self._http.close()

    def _add_routes(self, app: web.Application, inference: Inference) -> None:
        get, post = app.router.add_get, app.router.add_post
        if self._settings.sagemaker.model:
            sagemaker = SageMaker(self._settings.sagemaker, self._server, inference)
            sagemaker.add_routes(app, self._ready, self._live)
        if self._settings.vertex_ai.predict_route:
            vertex_ai = VertexAi(self._settings.vertex_ai, self._server, inference)
            vertex_ai.add_routes(app, self._ready)
        get("/v2/health/live", self._live)
        get("/v2/health/ready", self._ready)
        get("/v2", self._metadata)
        get("/v2/models/stats", self._statistics)
        get("/v2/logging", self._log_settings)
        post("/v2/logging", self._log_settings)
        post("/v2/repository/index", self._repository_index)
        for path in ("/v2/trace/setting", MODEL + "/trace/setting"):
            get(path, self._trace_settings)
            post(path, self._trace_settings)
        for model in (MODEL, MODEL + VERSION):
            get(model, self._model_metadata)
            get(model + "/ready", self._model_ready)
            get(model + "/config", self._model_configuration)
            get(model + "/stats", self._statistics)
            post(model + "/infer", self._of_path(inference.infer))
            post(model + "/generate", self._of_path(inference.generate))
            post(model + "/generate_stream", self._of_path(inference.generate_stream))
        for path, feature in UNSUPPORTED.items():
            app.router.add_route("*", path, _refuse(feature))

    def _of_path(self, serve: Callable[[web.Request, Model], Serving]) -> Handler:
        """The handler that serves the model of the path."""

        async def handle(request: web.Request) -> web.StreamResponse:
            return await serve(request, self._server.find_model(*model_of(request)))

        return handle

    async def _live(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _ready(self, request: web.Request) -> web.Response:
        return _yes_or_no(self._server.is_ready())

    async def _model_ready(self, request: web.Request) -> web.Response:
        return _yes_or_no(self._server.is_model_ready(*model_of(request)))

    async def _metadata(self, request: web.Request) -> web.Response:
        return json_response(as_json(self._server.describe(EXTENSIONS)))

    async def _model_metadata(self, request: web.Request) -> web.Response:
        return json_response(as_json(self._server.describe_model(*model_of(request))))

    async def _model_configuration(self, request: web.Request) -> web.Response:
        return json_response(as_json(self._server.configuration(*model_of(request))))

    async def _statistics(self, request: web.Request) -> web.Response:
        return json_response(as_json(self._server.statistics(*model_of(request))))

    async def _repository_index(self, request: web.Request) -> web.Response:
        asked = await self._bodies.json_of(request)
        only_ready = asked.get("ready", False)
        if not isinstance(only_ready, bool):
            raise InvalidRequest("Unable to parse 'ready': it must be true or false")
        index = self._server.repository_index(only_ready=only_ready)
        told = [as_json(model) for model in index.models]
        return json_response([{k: text for k, text in model.items() if text} for model in told])

    async def _trace_settings(self, request: web.Request) -> web.Response:
        if name := request.match_info.get("model"):
            self._server.find_model(name, "")
        asked = await self._bodies.json_of(request)
        settings = self._server.change_trace_settings(asked).settings
        return json_response({name: list(settings[name].value) for name in settings})

    async def _log_settings(self, request: web.Request) -> web.Response:
        asked = kserve.LogSettingsRequest()
        given = await self._bodies.json_of(request)
        for name, value in given.items():
            _set_log_setting(asked.settings[name], name, value)
        settings = self._server.change_log_settings(asked.settings).settings
        return json_response({name: _only_value(settings[name]) for name in settings})


def model_of(request: web.Request) -> tuple[str, str]:
    """Name and version of the model in the path, or ''."""
    return request.match_info.get("model", ""), request.match_info.get("version", "")


def _yes_or_no(yes: bool) -> web.Response:  # noqa: FBT001 - its only subject
    """Triton's health answer: a status without a body."""
    return web.Response(status=HTTPStatus.OK if yes else HTTPStatus.BAD_REQUEST)


def _refuse(feature: str) -> Handler:
    async def refuse(_: web.Request) -> web.StreamResponse:
        raise unsupported(feature)

    return refuse


def _set_log_setting(setting: Any, name: str, value: Any) -> None:
    match value:
        case bool():
            setting.bool_param = value
        case int() if 0 <= value < 2**32:
            setting.uint32_param = value
        case str():
            setting.string_param = value
        case _:
            raise InvalidRequest(f"log setting '{name}' must be a number, a boolean or a string")


def _only_value(setting: Any) -> Any:
    return getattr(setting, setting.WhichOneof("parameter_choice"))
