"""From a ModelInferRequest to the mesh's own request, and what the caller wants to see of its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtmesh.chassis.errors import InternalError, InvalidRequest, ModelNotFound, TrtmeshError
from trtmesh.router.doors.triton.models import MODEL_VERSION, Model
from trtmesh.router.doors.triton.speculation import check_speculation
from trtmesh.router.doors.triton.templates.llmapi_specs import check_adapter
from trtmesh.router.doors.triton.templates.template import Kind
from trtmesh.router.doors.triton.tensors import InputTensor, check_complete, read_inputs
from trtmesh.router.doors.triton.wording import of_row
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb

STREAM_INPUTS = ("stream", "streaming")
"""A model has one of them, if any."""
PROMPT_INPUTS = {"input_ids", "encoder_input_features"}
PHASES = {
    "context_and_generation": pb.GENERATION_PHASE_CONTEXT_AND_GENERATION,
    "context_only": pb.GENERATION_PHASE_CONTEXT_ONLY,
    "generation_only": pb.GENERATION_PHASE_GENERATION_ONLY,
}
LOGITS_DATA_TYPES = {
    "FP32": pb.DATA_TYPE_FP32,
    "FP16": pb.DATA_TYPE_FP16,
    "BF16": pb.DATA_TYPE_BF16,
}
FIRST_PRIORITY = 1_000_000
"""The mesh's priority of Triton's priority 0; Triton's numbers are the earlier the lower, and 0 stands for none."""

ONE_FOR_ALL_ROWS = frozenset(
    {
        *("stop", *STREAM_INPUTS, "beam_width", "num_return_sequences", "return_log_probs"),
        *("return_context_logits", "return_generation_logits", "return_perf_metrics"),
        *("return_kv_cache_reuse_stats", "return_num_input_tokens", "return_num_output_tokens"),
    }
)
"""Inputs that say what a response looks like, of which the rows of a request have the same."""

LLMAPI_MAX_TOKENS = 32
"""New tokens where a request does not say, as in TensorRT-LLM's LLM API."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request with its inputs read. `request_id` is the client's and may be '' or live."""

    model: Model
    request_id: str
    inputs: Mapping[str, InputTensor]
    batch_size: int
    requested: frozenset[str]
    """Outputs asked for; all that there are where it is empty."""
    parameters: Mapping[str, Any]

    def wants(self, output: str) -> bool:
        """Whether the caller did not leave an output out."""
        return not self.requested or output in self.requested

    def flag(self, name: str) -> bool:
        """An input of one truth value, which is the same in all rows."""
        tensor = self.inputs.get(name)
        return tensor is not None and bool(tensor.scalar(0))

    @property
    def stops(self) -> bool:
        """Whether it ends another request and is none of its own."""
        return self.flag("stop")

    @property
    def streaming(self) -> bool:
        return any(self.flag(name) for name in STREAM_INPUTS)

    @property
    def timeout_seconds(self) -> float | None:
        """How long the request may take, where it says."""
        microseconds = self.parameters.get("timeout", 0)
        return microseconds / 1e6 if isinstance(microseconds, int) and microseconds > 0 else None


def find_model(models: Mapping[str, Model], name: str, version: str) -> Model:
    """The model that a caller names. Raises ModelNotFound in Triton's words."""
    model = models.get(name)
    if model is None:
        raise ModelNotFound(f"Request for unknown model: '{name}' is not found")
    if version not in ("", MODEL_VERSION):
        raise ModelNotFound(f"Request for unknown model: '{name}' version {version} is not found")
    return model


def read_call(model: Model, request: Any) -> Call:
    """The request, its tensors checked. Raises InvalidRequest."""
    specs: dict[str, Any] = dict(model.inputs)
    inputs, batch_size = read_inputs(request, specs, model.max_batch_size)
    _check_alike(inputs, batch_size)
    requested = [output.name for output in request.outputs]
    for output in request.outputs:
        if output.name not in model.outputs:
            raise InvalidRequest(
                f"unexpected inference output '{output.name}' for model '{model.name}'"
            )
        if any(name.startswith(("shared_memory", "classification")) for name in output.parameters):
            raise InvalidRequest(
                f"output '{output.name}' of model '{model.name}' is asked for in shared memory or as classes, which"
                " this server does not do; leave the parameters out"
            )
    call = Call(
        model,
        request.id,
        inputs,
        batch_size,
        frozenset(requested),
        {name: _parameter(parameter) for name, parameter in request.parameters.items()},
    )
    if not call.stops:
        check_complete(inputs, specs, model.name)
    if model.kind is Kind.TOKENS and requested:
        for name in ("output_ids", "sequence_length"):
            if name not in requested:
                raise InvalidRequest(f"{name} tensor must be present in list of output tensors")
    return call


def _check_alike(inputs: Mapping[str, InputTensor], batch_size: int) -> None:
    if batch_size == 1:
        return
    for name in ONE_FOR_ALL_ROWS & inputs.keys():
        if len({inputs[name].scalar(row) for row in range(batch_size)}) > 1:
            raise InvalidRequest(
                f"input '{name}' differs between the rows of the batch, which are answered alike; send a request for"
                " each of its values"
            )


def to_request(call: Call) -> router_pb.GenerateRequest:
    """What the mesh is asked: one item for each row of the batch. Raises InvalidRequest."""
    if call.streaming and not call.model.decoupled:
        raise InternalError(
            "Streaming is only supported in decoupled mode."
            if call.model.template == "llmapi"
            else "Streaming is only supported if model is deployed using decoupled mode."
        )
    if call.model.kind is Kind.TOKENS and not PROMPT_INPUTS & call.inputs.keys():
        raise InternalError("input_ids or encoder_input_features is not present in the request")
    if call.model.template == "tensorrt_llm_bls":
        check_speculation(call)
    if call.model.template == "llmapi":
        check_adapter(call.inputs)
    request = router_pb.GenerateRequest(model=call.model.mesh_model)
    puts = [
        (spec.put, call.inputs[name])
        for name, spec in call.model.inputs.items()
        if spec.put is not None and name in call.inputs
    ]
    for row in range(call.batch_size):
        item = request.items.add()
        item.config.output.exclude_prompt = call.model.exclude_input_in_output
        try:
            for put, tensor in puts:
                put(item, tensor, row)
            _settle(item, call)
        except TrtmeshError as error:
            raise of_row(error, row, call) from error
    return request


def _settle(item: router_pb.GenerateItem, call: Call) -> None:
    """What follows from several inputs, from none, or from the model."""
    config, model = item.config, call.model
    output, sampling = config.output, config.sampling
    output.stream = call.streaming
    if call.streaming:
        # The prompt is part of whole outputs only.
        output.exclude_prompt = True
    _drop_fillers(sampling)
    if output.context_logits or output.generation_logits:
        output.logits_data_type = LOGITS_DATA_TYPES[model.logits_data_type]
    if model.kind is Kind.TEXT:
        output.skip_special_tokens = model.skip_special_tokens
        item.prompt.add_special_tokens = model.add_special_tokens
    else:
        output.text = False
        if not config.stopping.HasField("end_id"):
            # The core model knows no end id of its own.
            config.stopping.ignore_end_id = True
    if model.max_beam_width is not None and config.beam_search.beam_width > model.max_beam_width:
        raise InternalError(
            f"Requested beam width {config.beam_search.beam_width} is larger than configured max beam width"
            f" {model.max_beam_width}"
        )
    if config.beam_search.beam_width <= 1 and config.HasField("beam_search"):
        if config.beam_search.HasField("beam_width") and config.beam_search.beam_width < 1:
            raise InvalidRequest("input 'beam_width' is 0 but must be at least 1")
        # Nothing in it means anything for a single beam.
        config.ClearField("beam_search")
    if (
        model.template != "llmapi"
        and not config.HasField("beam_search")
        and not sampling.top_k
        and not sampling.HasField("top_p")
        and (sampling.HasField("temperature") or sampling.HasField("top_k"))
    ):
        # Its executor draws only where top_k or top_p says from what, whatever the temperature.
        sampling.top_k = 1
    if model.template == "llmapi" and not config.stopping.HasField("max_tokens"):
        config.stopping.max_tokens = LLMAPI_MAX_TOKENS
    _apply_parameters(config, call.parameters, model)


def _drop_fillers(sampling: pb.SamplingConfig) -> None:
    """Takes empty words, with which the rows of a batch are filled up, away with their weights."""
    words, weights = sampling.embedding_bias_texts, sampling.embedding_bias_weights
    if "" in words and len(words) == len(weights):
        kept = [(word, weight) for word, weight in zip(words, weights, strict=True) if word]
        words[:] = [word for word, _ in kept]
        weights[:] = [weight for _, weight in kept]


def _apply_parameters(
    config: pb.GenerationConfig, parameters: Mapping[str, Any], model: Model
) -> None:
    priority = parameters.get("priority", 0)
    if isinstance(priority, int) and priority > 0:
        config.priority = max(1, FIRST_PRIORITY - priority)
    phase = parameters.get("request_type")
    if phase is not None:
        if phase not in PHASES:
            raise InvalidRequest(
                f"parameter 'request_type' is {phase!r} but must be one of {', '.join(PHASES)}"
            )
        if phase != "context_and_generation":
            if model.template == "disaggregated_serving_bls":
                raise InvalidRequest(
                    f"parameter 'request_type' is {phase!r} but model '{model.name}' computes and continues a"
                    " prompt in one engine; leave it out"
                )
            config.handoff.phase = PHASES[phase]


def _parameter(parameter: Any) -> Any:
    kind = parameter.WhichOneof("parameter_choice")
    return getattr(parameter, kind) if kind else None
