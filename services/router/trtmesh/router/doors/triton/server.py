"""The Triton models for both doors, gRPC and HTTP, in messages of the KServe protocol."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib.metadata import version
from time import monotonic
from typing import Any

from trtmesh.chassis.errors import (
    InvalidRequest,
    ModelNotFound,
    TrtmeshError,
    UnsupportedCall,
    UnsupportedField,
)
from trtmesh.chassis.fair.messages import ReceivedMessage
from trtmesh.chassis.forwarding import Sink
from trtmesh.chassis.quoting import cut
from trtmesh.kserve import grpc_service_pb2 as kserve
from trtmesh.router.doors.generation import Caller, ErrorWording
from trtmesh.router.doors.triton.answers import Answer
from trtmesh.router.doors.triton.calls import read_call
from trtmesh.router.doors.triton.engines import Engines
from trtmesh.router.doors.triton.generations import Generations
from trtmesh.router.doors.triton.metrics import TritonMetrics
from trtmesh.router.doors.triton.models import (
    MODEL_VERSION,
    describe_config,
    describe_metadata,
    triton_models,
)
from trtmesh.router.doors.triton.settings import TritonSettings
from trtmesh.router.doors.triton.statistics import Statistics
from trtmesh.router.doors.triton.templates.generation import GenerationTemplate
from trtmesh.router.doors.triton.templates.template import Call, Model
from trtmesh.router.doors.triton.templates.texts import Texts
from trtmesh.router.doors.triton.templates.tokenization import TokenizerTemplate
from trtmesh.router.doors.triton.tensors import Contents
from trtmesh.router.metrics import RouterMetrics

log = logging.getLogger(__name__)

OF_THE_PROTOCOL = frozenset({"triton_enable_empty_final_response"})
"""Parameters with an effect at the door, for every model."""
COUNTS = ("priority", "timeout")
MOST_NAME_CHARACTERS = 64
"""Longest quoted name."""

VERBOSE = "log_verbose_level"
SHARED_MEMORY = "shared memory; send tensors in the request"
MODEL_CONTROL = (
    "loading and unloading of models; the router's setting triton.models names the served models"
)


def unsupported(feature: str) -> UnsupportedCall:
    """The error of a call for a feature of Triton without a counterpart here."""
    return UnsupportedCall(f"this server does not serve {feature}")


class TritonServer:
    """Answers both doors. `is_ready` says whether the mesh takes requests."""

    def __init__(
        self,
        settings: TritonSettings,
        models: Sequence[str],
        generations: Generations,
        texts: Texts,
        engines: Engines,
        metrics: RouterMetrics,
        is_ready: Callable[[], bool],
    ) -> None:
        self._models = triton_models(settings, models)
        self._configured = [*settings.models]
        self._generations = generations
        self._texts = texts
        self._engines = engines
        self._metrics = metrics
        self._statistics = Statistics(self._models)
        self.is_ready = is_ready
        # Models of the settings are listed before their first request.
        self.metrics = TritonMetrics(
            self._models, self._statistics, engines.figures, self._configured
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        return tuple(model.name for model in self._served)

    @property
    def _served(self) -> Iterator[Model]:
        return filter(self._serves, self._models.values())

    def _serves(self, model: Model) -> bool:
        """Whether a setting names the model, or it suits the fleet."""
        is_listed = not model.template.needs_roles or model.name in self._configured
        return is_listed or self._engines.have_roles(model)

    def find_model(self, name: str, version: str) -> Model:
        """The model of a name. Raises ModelNotFound in Triton's words."""
        model = self._models.get(name)
        if model is None or not self._serves(model):
            raise ModelNotFound(f"Request for unknown model: '{cut(name)}' is not found")
        if version not in ("", MODEL_VERSION):
            unknown = f"'{name}' version {cut(version)}"
            raise ModelNotFound(f"Request for unknown model: {unknown} is not found")
        return model

    def arriving(
        self, message: ReceivedMessage, caller: Caller, name: str
    ) -> AbstractContextManager[None]:
        """The block in which a request of this name is read and served."""
        return self._generations.arriving(message, caller.identity, name)

    async def read(
        self,
        message: ReceivedMessage,
        request: Any,
        wording: ErrorWording,
        model: Model | None = None,
        raw: Sequence[Contents] | None = None,
        *,
        unary: bool = False,
    ) -> Call:
        """Reads the ModelInferRequest of a message, for `wording` too; `raw` are its raw contents where a door has them
        apart. Raises ModelNotFound or InvalidRequest."""
        served = model or self.find_model(request.model_name, request.model_version)
        began = monotonic()
        try:
            call = await message.read(partial(read_call, served, request, raw, unary=unary))
            wording.sentence = call.sentence
            if call.parameters:
                check_parameters(call, self._metrics)
        except TrtmeshError as error:
            if isinstance(served.template, GenerationTemplate):
                self._generations.refused(served, error, began)
            raise
        return call

    def is_model_ready(self, name: str, version: str) -> bool:
        model = self._models.get(name)
        if model is None or not self._serves(model):
            return False
        return version in ("", MODEL_VERSION) and not self._problem(model)

    def _problem(self, model: Model) -> str:
        """Why a model takes no requests now, or ''."""
        if not self.is_ready():
            return "the server is not ready"
        if isinstance(model.template, GenerationTemplate):
            return self._generations.problem(model, model.template)
        return self._texts.problem(model)

    def describe(self, extensions: tuple[str, ...]) -> Any:
        """A ServerMetadataResponse with the extensions of a door."""
        return kserve.ServerMetadataResponse(
            name="trtmesh", version=version("trtmesh"), extensions=extensions
        )

    def describe_model(self, name: str, version: str) -> Any:
        """A ModelMetadataResponse. Raises ModelNotFound."""
        return describe_metadata(self.find_model(name, version))

    def configuration(self, name: str, version: str) -> Any:
        """A ModelConfig. Raises ModelNotFound."""
        return describe_config(self.find_model(name, version))

    def statistics(self, name: str, version: str) -> Any:
        """A ModelStatisticsResponse; without a name, of all models. Raises ModelNotFound."""
        models = [self.find_model(name, version)] if name else self._served
        return kserve.ModelStatisticsResponse(model_stats=self._statistics.describe(models))

    def repository_index(self, *, only_ready: bool) -> Any:
        """A RepositoryIndexResponse."""
        response = kserve.RepositoryIndexResponse()
        for model in self._served:
            reason = self._problem(model)
            if not reason or not only_ready:
                state = "UNAVAILABLE" if reason else "READY"
                response.models.add(
                    name=model.name, version=MODEL_VERSION, state=state, reason=reason
                )
        return response

    def change_trace_settings(self, asked: Mapping[str, Any]) -> Any:
        """A TraceSettingResponse: tracing is off. Raises UnsupportedCall for any change."""
        if asked:
            raise UnsupportedCall("this server does not trace; leave the trace settings alone")
        response = kserve.TraceSettingResponse()
        response.settings["trace_level"].value.append("OFF")
        return response

    def change_log_settings(self, asked: Mapping[str, Any]) -> Any:
        """A LogSettingsResponse. A `log_verbose_level` above 0 logs everything; no other setting changes at run time.
        Raises InvalidRequest or UnsupportedField."""
        _check_log_settings(asked)
        whole = logging.getLogger("trtmesh")
        if VERBOSE in asked:
            whole.setLevel(logging.DEBUG if asked[VERBOSE].uint32_param else logging.NOTSET)
        response = kserve.LogSettingsResponse()
        for name, level in (
            ("log_info", logging.INFO),
            ("log_warning", logging.WARNING),
            ("log_error", logging.ERROR),
        ):
            response.settings[name].bool_param = whole.isEnabledFor(level)
        response.settings[VERBOSE].uint32_param = int(whole.isEnabledFor(logging.DEBUG))
        response.settings["log_format"].string_param = "default"
        response.settings["log_file"].string_param = ""
        return response

    async def serve(
        self, call: Call, message: ReceivedMessage, caller: Caller, sink: Sink[Answer]
    ) -> None:
        """Passes the answers of a call to a sink. Raises TrtmeshError, for the door to speak."""
        with self._statistics.counting(call) as counting:
            template = call.model.template
            if not isinstance(template, GenerationTemplate):
                assert isinstance(template, TokenizerTemplate)
                outputs = await template.outputs_of(call, self._texts)
                await sink.write(Answer(outputs, final=True))
            elif call.stops:
                self._generations.stop(call, template, caller.identity)
                template.check_stopped()
                await sink.write(Answer(final=True))
            else:
                await self._generations.run(counting, message, template, caller, sink)


def check_parameters(call: Call, metrics: RouterMetrics) -> None:
    """Checks request parameters with an effect; counts and logs the others. Raises InvalidRequest."""
    read = call.model.template.request_parameters
    for name in COUNTS:
        value = call.parameters.get(name, 0) if name in read else 0
        if type(value) is not int or value < 0:
            raise InvalidRequest(
                field=f"parameter '{name}'", value=repr(value), limit="an integer, at least 0"
            )
    for name in call.parameters.keys() - read - OF_THE_PROTOCOL:
        shown = name[:MOST_NAME_CHARACTERS]
        if metrics.note_unknown_parameter(shown):
            log.warning("request parameter %r has no effect in model '%s'", shown, call.model.name)


def _check_log_settings(asked: Mapping[str, Any]) -> None:
    for name, value in asked.items():
        if name != VERBOSE:
            raise UnsupportedField(
                f"log setting '{name}' cannot be changed while the server runs; only {VERBOSE} can"
            )
        if value.WhichOneof("parameter_choice") != "uint32_param":
            raise InvalidRequest(f"log setting '{VERBOSE}' must be a number, at least 0")
