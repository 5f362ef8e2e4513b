"""The paths of SageMaker and Vertex AI for a container, as served by Triton: readiness and inference of a model."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web
from trtmesh.chassis.errors import InvalidRequest, SettingsError
from trtmesh.chassis.settings import Settings
from trtmesh.router.doors.triton.http.inference import Inference
from trtmesh.router.doors.triton.server import MODEL_CONTROL, TritonServer, unsupported
from trtmesh.router.doors.triton.templates.template import Model

SAGEMAKER_BINARY = "application/vnd.sagemaker-triton.binary+json;json-header-size="
VERTEX_BINARY = "application/vnd.vertex-ai-triton.binary+json;json-header-size="
"""Content types of bodies with binary tensors; the length of the JSON follows."""
REDIRECT = "X-Vertex-Ai-Triton-Redirect"
REDIRECTION = re.compile(
    r"v2/models/([^/]+)(?:/versions/([0-9]+))?/(infer|generate|generate_stream)"
)

SAGEMAKER_MODEL = "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME"
"""Variable with the Triton model of `/invocations`; without one there are no paths."""
PREDICT_ROUTE, HEALTH_ROUTE = "AIP_PREDICT_ROUTE", "AIP_HEALTH_ROUTE"
"""Variables with Vertex AI's paths of predictions and of readiness; without them there are none."""
ROUTE = re.compile(r"/[^{}\s]*")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Environment = Mapping[str, str]


class VertexAiSettings(Settings):
    """Vertex AI's paths on the HTTP port, which its variables AIP_PREDICT_ROUTE and AIP_HEALTH_ROUTE name."""

    model: str = ""
    """Triton model of predictions; empty means the only one."""


class SageMaker:
    """Answers SageMaker, as set by SageMaker's variables. Raises SettingsError for a variable with a wrong value."""

    def __init__(
        self, environment: Environment, server: TritonServer, inference: Inference
    ) -> None:
        self._inference = inference
        self._model = _served(
            server, f"environment variable {SAGEMAKER_MODEL}", environment[SAGEMAKER_MODEL]
        )
        self._endpoint = _word(
            environment, "SAGEMAKER_TRITON_INFERENCE_TYPE", "infer", "generate", "generate_stream"
        )
        self._ping = _word(environment, "SAGEMAKER_TRITON_PING_MODE", "ready", "live")

    def add_routes(self, app: web.Application, ready: Handler, live: Handler) -> None:
        app.router.add_get("/ping", ready if self._ping == "ready" else live)
        app.router.add_post("/invocations", self._invoke)
        app.router.add_route("*", "/models{rest:.*}", self._control_models)

    async def _invoke(self, request: web.Request) -> web.StreamResponse:
        return await self._inference.serve(self._endpoint, request, self._model, SAGEMAKER_BINARY)

    async def _control_models(self, request: web.Request) -> web.StreamResponse:
        raise unsupported(MODEL_CONTROL)


class VertexAi:
    """Answers Vertex AI, as set by Vertex AI's variables. Raises SettingsError for a wrong value or an unknown
    model."""

    def __init__(
        self,
        environment: Environment,
        settings: VertexAiSettings,
        server: TritonServer,
        inference: Inference,
    ) -> None:
        self._routes = [environment.get(name, "") for name in (HEALTH_ROUTE, PREDICT_ROUTE)]
        if not all(map(ROUTE.fullmatch, self._routes)):
            raise SettingsError(
                f"environment variables {HEALTH_ROUTE} and {PREDICT_ROUTE} are {self._routes} but must both be paths"
            )
        self._server = server
        self._inference = inference
        only = server.model_names[0] if len(server.model_names) == 1 else ""
        self._model = _served(server, "router.http.vertex_ai.model", settings.model or only)

    def add_routes(self, app: web.Application, ready: Handler) -> None:
        health, predict = self._routes
        app.router.add_get(health, ready)
        app.router.add_post(predict, self._predict)

    async def _predict(self, request: web.Request) -> web.StreamResponse:
        endpoint, model = self._endpoint(request.headers.get(REDIRECT))
        return await self._inference.serve(endpoint, request, model, VERTEX_BINARY)

    def _endpoint(self, redirect: str | None) -> tuple[str, Model]:
        """The endpoint and the model of a request. Raises InvalidRequest or ModelNotFound."""
        if redirect is None:
            return "infer", self._model
        named = REDIRECTION.fullmatch(redirect)
        if named is None:
            raise InvalidRequest(
                field=f"header {REDIRECT}",
                value=repr(redirect),
                limit="v2/models/MODEL/ENDPOINT with the endpoint infer, generate or generate_stream",
            )
        name, version, endpoint = named.groups()
        return endpoint, self._server.find_model(name, version or "")


def _word(environment: Environment, name: str, *words: str) -> str:
    """The word in a variable, by default the first."""
    word = environment.get(name, words[0])
    if word not in words:
        known = ", ".join(words)
        raise SettingsError(f"environment variable {name} is {word!r} but must be one of {known}")
    return word


def _served(server: TritonServer, setting: str, name: str) -> Model:
    if name not in server.model_names:
        known = ", ".join(server.model_names)
        raise SettingsError(f"{setting} is {name!r} but must name a Triton model: {known}")
    return server.find_model(name, "")
