"""The Triton models, whatever protocol asks for them: each door translates into these calls and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from tritonclient.grpc import service_pb2 as kserve
from trtmesh.chassis.errors import Cancelled, UnsupportedCall
from trtmesh.router.doors.generation import Caller
from trtmesh.router.doors.triton.answers import Answer
from trtmesh.router.doors.triton.engine_metrics import EngineFigures
from trtmesh.router.doors.triton.generations import Generations, Send
from trtmesh.router.doors.triton.log_settings import change_log_settings
from trtmesh.router.doors.triton.metrics import TritonMetrics
from trtmesh.router.doors.triton.models import (
    MODEL_VERSION,
    Model,
    describe_config,
    describe_metadata,
    triton_models,
)
from trtmesh.router.doors.triton.statistics import Counting, Statistics
from trtmesh.router.doors.triton.templates.generation import find_model, read_call
from trtmesh.router.doors.triton.templates.preprocessing import postprocess, preprocess
from trtmesh.router.doors.triton.templates.template import Kind
from trtmesh.router.doors.triton.texts import TextsOf
from trtmesh.router.settings import TritonSettings


class TritonServer:
    """Answers in messages of the KServe protocol. `is_ready` says whether the mesh takes requests."""

    def __init__(
        self,
        settings: TritonSettings,
        generations: Generations,
        texts_of: TextsOf,
        is_ready: Callable[[], bool],
    ) -> None:
        self._models = triton_models(settings)
        self._generations = generations
        self._texts_of = texts_of
        self._statistics = Statistics(self._models)
        self.is_ready = is_ready

    def metrics(self, figures_of: Callable[[Model], EngineFigures]) -> TritonMetrics:
        """The metrics of what is served here."""
        return TritonMetrics(self._models, self._statistics, figures_of)

    def find_model(self, name: str, version: str) -> Model:
        """The model that a caller names. Raises ModelNotFound."""
        return find_model(self._models, name, version)

    def is_model_ready(self, name: str, version: str) -> bool:
        return name in self._models and version in ("", MODEL_VERSION) and self.is_ready()

    def describe(self, extensions: tuple[str, ...]) -> Any:
        """A ServerMetadataResponse; the extensions are the door's."""
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
        """A ModelStatisticsResponse: of all models where none is named. Raises ModelNotFound."""
        models = [self.find_model(name, version)] if name else [*self._models.values()]
        return kserve.ModelStatisticsResponse(
            model_stats=[self._statistics.describe(model) for model in models]
        )

    def repository_index(self, *, only_ready: bool) -> Any:
        """A RepositoryIndexResponse."""
        response = kserve.RepositoryIndexResponse()
        if self.is_ready() or not only_ready:
            state = "READY" if self.is_ready() else "UNAVAILABLE"
            for name in self._models:
                response.models.add(name=name, version=MODEL_VERSION, state=state)
        return response

    def change_trace_settings(self, asked: Mapping[str, Any]) -> Any:
        """A TraceSettingResponse. Nothing is traced here, which is what the settings say; to change them is refused."""
        if asked:
            raise UnsupportedCall("this server does not trace; leave the trace settings alone")
        response = kserve.TraceSettingResponse()
        response.settings["trace_level"].value.append("OFF")
        return response

    def change_log_settings(self, asked: Mapping[str, Any]) -> Any:
        """A LogSettingsResponse. `log_verbose_level` above 0 logs whatever there is to log; the other settings are as
        the process began. Raises InvalidRequest or UnsupportedField."""
        return change_log_settings(asked)

    async def serve(self, model: Model, request: Any, caller: Caller, send: Send) -> None:
        """Does what a ModelInferRequest to `model` asks and sends each answer. Raises TrtmeshError."""
        with self._statistics.counting(read_call(model, request)) as counting:
            await self._answer(counting, caller, send)

    async def _answer(self, counting: Counting, caller: Caller, send: Send) -> None:
        call = counting.call
        if call.stops:
            self._generations.stop(call)
            if call.model.template == "llmapi":
                raise Cancelled("Request cancelled by client")
            await send(Answer(final=True))
        elif call.model.kind is Kind.PREPROCESSING:
            await send(Answer(await preprocess(call, self._texts_of(call.model)), final=True))
        elif call.model.kind is Kind.POSTPROCESSING:
            await send(Answer(await postprocess(call, self._texts_of(call.model)), final=True))
        else:
            await self._generations.run(counting, caller, send)
