"""The paths of SageMaker and Vertex AI for a container, as served by Triton: readiness and inference of a model."""

from __future__ import annotations

import re
from collections.abc import Mapping

from aiohttp import web
from trtmesh.chassis.errors import InvalidRequest, SettingsError
from trtmesh.chassis.settings import Settings
from trtmesh.router.doors.http.authorising import Handler
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

Environment = Mapping[str, str]


class VertexAiSettings(Settings):
    """Vertex AI's paths on the HTTP port, which its variables AIP_PREDICT_ROUTE and AIP_HEALTH_ROUTE name."""

    model: str = ""
    """Triton model of predictions; empty means the only one."""


def add_sagemaker(
    app: web.Application,
    environment: Environment,
    server: TritonServer,
    inference: Inference,
    ready: Handler,
    live: Handler,
) -> None:
    """Serves SageMaker's paths, as set by its variables. Raises SettingsError for a variable with a wrong value."""
    model = _served(server, f"environment variable {SAGEMAKER_MODEL}", environment[SAGEMAKER_MODEL])
    endpoint = _word(
        environment, "SAGEMAKER_TRITON_INFERENCE_TYPE", "infer", "generate", "generate_stream"
    )
    ping = _word(environment, "SAGEMAKER_TRITON_PING_MODE", "ready", "live")

    async def invoke(request: web.Request) -> web.StreamResponse:
        return await inference.serve(endpoint, request, model, SAGEMAKER_BINARY)

    async def control_models(_: web.Request) -> web.StreamResponse:
        raise unsupported(MODEL_CONTROL)

    app.router.add_get("/ping", ready if ping == "ready" else live)
    app.router.add_post("/invocations", invoke)
    app.router.add_route("*", "/models{rest:.*}", control_models)


def add_vertex_ai(
    app: web.Application,
    environment: Environment,
    model: str,
    server: TritonServer,
    inference: Inference,
    ready: Handler,
) -> None:
    """Serves Vertex AI's paths, as set by its variables; `model` is the setting. Raises SettingsError for a wrong value
    or an unknown model."""
    routes = [environment.get(name, "") for name in (HEALTH_ROUTE, PREDICT_ROUTE)]
    if not all(map(ROUTE.fullmatch, routes)):
        raise SettingsError(
            f"environment variables {HEALTH_ROUTE} and {PREDICT_ROUTE} are {routes} but must both be paths"
        )
    only = server.model_names[0] if len(server.model_names) == 1 else ""
    usual = _served(server, "router.http.vertex_ai.model", model or only)

    async def predict(request: web.Request) -> web.StreamResponse:
        redirect = request.headers.get(REDIRECT)
        endpoint, asked = ("infer", usual) if redirect is None else _redirected(server, redirect)
        return await inference.serve(endpoint, request, asked, VERTEX_BINARY)

    app.router.add_get(routes[0], ready)
    app.router.add_post(routes[1], predict)


def _redirected(server: TritonServer, redirect: str) -> tuple[str, Model]:
    """The endpoint and the model of a request. Raises InvalidRequest or ModelNotFound."""
    named = REDIRECTION.fullmatch(redirect)
    if named is None:
        raise InvalidRequest(
            field=f"header {REDIRECT}",
            value=repr(redirect),
            limit="v2/models/MODEL/ENDPOINT with the endpoint infer, generate or generate_stream",
        )
    name, version, endpoint = named.groups()
    return endpoint, server.find_model(name, version or "")


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
