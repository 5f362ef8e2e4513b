"""Triton's HTTP endpoints."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from aiohttp import web
from google.protobuf.descriptor import FieldDescriptor
from trtmesh.chassis.errors import InvalidRequest
from trtmesh.kserve import grpc_service_pb2 as kserve
from trtmesh.router.doors.http.answers import json_response
from trtmesh.router.doors.http.authorising import Handler
from trtmesh.router.doors.http.errors import PlainForm
from trtmesh.router.doors.http.port import HttpPort, PortSettings
from trtmesh.router.doors.triton.http.inference import Inference
from trtmesh.router.doors.triton.http.platforms import (
    HEALTH_ROUTE,
    PREDICT_ROUTE,
    SAGEMAKER_MODEL,
    Environment,
    VertexAiSettings,
    add_sagemaker,
    add_vertex_ai,
)
from trtmesh.router.doors.triton.server import (
    MODEL_CONTROL,
    SHARED_MEMORY,
    TritonServer,
    unsupported,
)
from trtmesh.router.doors.triton.templates.template import Model

Serving = Awaitable[web.StreamResponse]

EXTENSIONS = (
    *("binary_tensor_data", "generate", "logging", "model_configuration", "model_repository"),
    *("parameters", "statistics"),
)
MODEL = "/v2/models/{model}"
VERSION = "/versions/{version:[0-9]+}"
UNSUPPORTED = {
    "/v2/systemsharedmemory{rest:.*}": SHARED_MEMORY,
    "/v2/cudasharedmemory{rest:.*}": SHARED_MEMORY,
    "/v2/repository/models/{rest:.*}": MODEL_CONTROL,
}
"""Features of Triton without a counterpart here."""


class HttpSettings(PortSettings):
    """The Triton door over HTTP."""

    vertex_ai: VertexAiSettings = VertexAiSettings()


class HttpDoor:
    """Serves the Triton models at a port."""

    def __init__(
        self,
        server: TritonServer,
        settings: HttpSettings,
        environment: Environment,
        port: HttpPort,
    ) -> None:
        """`environment` has the variables of the platform that runs the process, if any. Raises SettingsError."""
        self._server = server
        self._bodies, app = port.bodies, port.app
        port.served["/v2"] = "Triton's models, by the KServe protocol and generate"
        inference = Inference(server, port.bodies)
        port.open_handlers.update((self._live, self._ready, self._model_ready))
        get, post = app.router.add_get, app.router.add_post
        if environment.get(SAGEMAKER_MODEL):
            add_sagemaker(app, environment, server, inference, self._ready, self._live)
        if environment.get(PREDICT_ROUTE) or environment.get(HEALTH_ROUTE):
            model = settings.vertex_ai.model
            add_vertex_ai(app, environment, model, server, inference, self._ready)
            # The platform's routes are below the /v1 of another door.
            for name in (PREDICT_ROUTE, HEALTH_ROUTE):
                port.error_forms[environment[name]] = PlainForm()
        get("/v2/health/live", self._live)
        get("/v2/health/ready", self._ready)
        get("/v2", self._metadata)
        get("/v2/models/stats", _described(server.statistics))
        get("/v2/logging", self._log_settings)
        post("/v2/logging", self._log_settings)
        post("/v2/repository/index", self._repository_index)
        for path in ("/v2/trace/setting", MODEL + "/trace/setting"):
            get(path, self._trace_settings)
            post(path, self._trace_settings)
        for model in (MODEL, MODEL + VERSION):
            get(model, _described(server.describe_model))
            get(model + "/ready", self._model_ready)
            get(model + "/config", _described(server.configuration))
            get(model + "/stats", _described(server.statistics))
            post(model + "/infer", self._of_path(inference.infer))
            post(model + "/generate", self._of_path(inference.generate))
            post(model + "/generate_stream", self._of_path(inference.generate_stream))
        for path, feature in UNSUPPORTED.items():
            app.router.add_route("*", path, _refuse(feature))

    def _of_path(self, serve: Callable[[web.Request, Model], Serving]) -> Handler:
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


def _described(describe: Callable[[str, str], Any]) -> Handler:
    """Answers with a message about the model in the path."""

    async def tell(request: web.Request) -> web.StreamResponse:
        return json_response(as_json(describe(*model_of(request))))

    return tell


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


def as_json(message: Any) -> dict[str, Any]:
    """Returns a KServe message as written by Triton: with fields at the default, and with 64-bit numbers as numbers.
    Protobuf's JSON writes these as texts."""
    return {
        field.name: _field(message, field)
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _field(message: Any, field: FieldDescriptor) -> Any:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        of_values = field.message_type.fields_by_name["value"]
        return {str(key): _one(value[key], of_values) for key in value}
    if field.is_repeated:
        return [_one(element, field) for element in value]
    return _one(value, field)


def _one(value: Any, field: FieldDescriptor) -> Any:
    if field.message_type is not None:
        return as_json(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return value
