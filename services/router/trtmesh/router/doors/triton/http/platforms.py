"""The paths by which SageMaker and Vertex AI call a container, as Triton serves them: readiness and inference of one
model."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal, Self

from aiohttp import web
from pydantic import Field, model_validator
from trtmesh.chassis.errors import InvalidRequest, SettingsError
from trtmesh.chassis.settings import PlatformVariable, Settings
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

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Route = Annotated[str, Field(pattern=r"^(/[^{}\s]*)?$")]
InferenceType = Literal["infer", "generate", "generate_stream"]


class SageMakerSettings(Settings):
    """SageMaker's paths on the HTTP port: `/ping` and `/invocations`."""

    model: Annotated[str, PlatformVariable("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME")] = ""
    """Triton model of `/invocations`, or the variable SAGEMAKER_TRITON_DEFAULT_MODEL_NAME; empty serves no path."""
    inference_type: Annotated[
        InferenceType, PlatformVariable("SAGEMAKER_TRITON_INFERENCE_TYPE")
    ] = "infer"
    """Endpoint behind `/invocations`, or the variable SAGEMAKER_TRITON_INFERENCE_TYPE."""
    ping_mode: Annotated[
        Literal["ready", "live"], PlatformVariable("SAGEMAKER_TRITON_PING_MODE")
    ] = "ready"
    """Health that `/ping` tells, or the variable SAGEMAKER_TRITON_PING_MODE."""


class VertexAiSettings(Settings):
    """Vertex AI's paths on the HTTP port."""

    predict_route: Annotated[Route, PlatformVariable("AIP_PREDICT_ROUTE")] = ""
    """Path of predictions, or the variable AIP_PREDICT_ROUTE; empty serves no path."""
    health_route: Annotated[Route, PlatformVariable("AIP_HEALTH_ROUTE")] = ""
    """Path of readiness, or the variable AIP_HEALTH_ROUTE."""
    model: str = ""
    """Triton model of predictions; empty means the only one."""

    @model_validator(mode="after")
    def _has_both_routes(self) -> Self:
        if bool(self.predict_route) != bool(self.health_route):
            raise ValueError("predict_route and health_route must both be set, or neither")
        return self


class SageMaker:
    """Answers SageMaker. Raises SettingsError for an unknown model."""

    def __init__(
        self, settings: SageMakerSettings, server: TritonServer, inference: Inference
    ) -> None:
        self._settings = settings
        self._inference = inference
        self._model = _served(server, "router.http.sagemaker.model", settings.model)

    def add_routes(self, app: web.Application, ready: Handler, live: Handler) -> None:
        app.router.add_get("/ping", ready if self._settings.ping_mode == "ready" else live)
        app.router.add_post("/invocations", self._invoke)
        app.router.add_route("*", "/models{rest:.*}", self._control_models)

    async def _invoke(self, request: web.Request) -> web.StreamResponse:
        return await self._inference.serve(
            self._settings.inference_type, request, self._model, SAGEMAKER_BINARY
        )

    async def _control_models(self, request: web.Request) -> web.StreamResponse:
        raise unsupported(MODEL_CONTROL)


class VertexAi:
    """Answers Vertex AI. Raises SettingsError for an unknown model."""

    def __init__(
        self, settings: VertexAiSettings, server: TritonServer, inference: Inference
    ) -> None:
        self._settings = settings
        self._server = server
        self._inference = inference
        only = server.model_names[0] if len(server.model_names) == 1 else ""
        self._model = _served(server, "router.http.vertex_ai.model", settings.model or only)

    def add_routes(self, app: web.Application, ready: Handler) -> None:
        app.router.add_get(self._settings.health_route, ready)
        app.router.add_post(self._settings.predict_route, self._predict)

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


def _served(server: TritonServer, setting: str, name: str) -> Model:
    if name not in server.model_names:
        known = ", ".join(server.model_names)
        raise SettingsError(f"{setting} is {name!r} but must name a Triton model: {known}")
    return server.find_model(name, "")
