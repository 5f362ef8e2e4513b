"""The Triton models that the door serves: their tensors, and how they answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tritonclient.grpc import model_config_pb2, service_pb2
from trtmesh.router.settings import TritonSettings
from trtmesh.router.triton.inputs import BLS_INPUTS, TEXT_INPUTS, TOKEN_INPUTS, InputSpec
from trtmesh.router.triton.tensors import TensorSpec

MODEL_VERSION = "1"


class Kind(Enum):
    """What a model makes of a request."""

    TEXT = "text"
    """Text in, text out."""
    TOKENS = "tokens"
    """Token ids in, token ids out."""
    PREPROCESSING = "preprocessing"
    """Text in, the inputs of the core model out."""
    POSTPROCESSING = "postprocessing"
    """Token ids in, text out."""


@dataclass(frozen=True, slots=True)
class Model:
    """One model as clients see it."""

    name: str
    kind: Kind
    backend: str
    inputs: Mapping[str, InputSpec]
    outputs: Mapping[str, TensorSpec]
    decoupled: bool = False
    accumulate: bool = False
    """Whether every response of a stream holds the whole text so far."""
    final_alone: bool = False
    """Whether the end of a stream is a response of its own, without outputs."""
    max_batch_size: int = 128
    parameters: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_ensemble(self) -> bool:
        return self.backend == ""


def _out(name: str, data_type: str, *dims: int) -> TensorSpec:
    return TensorSpec(name, (data_type,), dims)


PERF_OUTPUTS = tuple(
    _out(name, data_type, 1)
    for name, data_type in (
        ("kv_cache_alloc_new_blocks", "INT32"),
        ("kv_cache_reused_blocks", "INT32"),
        ("kv_cache_alloc_total_blocks", "INT32"),
        ("arrival_time_ns", "INT64"),
        ("first_scheduled_time_ns", "INT64"),
        ("first_token_time_ns", "INT64"),
        ("last_token_time_ns", "INT64"),
        ("acceptance_rate", "FP32"),
        ("total_accepted_draft_tokens", "INT32"),
        ("total_draft_tokens", "INT32"),
    )
)
"""Named like the fields of PerfMetrics."""


def _generation_outputs(logits_data_type: str) -> tuple[TensorSpec, ...]:
    return (
        _out("cum_log_probs", "FP32", -1),
        _out("output_log_probs", "FP32", -1, -1),
        _out("context_logits", logits_data_type, -1, -1),
        _out("generation_logits", logits_data_type, -1, -1, -1),
        _out("batch_index", "INT32", 1),
        _out("sequence_index", "INT32", 1),
        *PERF_OUTPUTS,
        _out("num_input_tokens", "INT32", 1),
        _out("num_output_tokens", "INT32", 1),
    )


def _preprocessing_inputs() -> tuple[InputSpec, ...]:
    def one(name: str, data_type: str, *dims: int, optional: bool = True) -> InputSpec:
        return InputSpec(name, (data_type,), dims or (1,), optional)

    return (
        one("QUERY", "BYTES", optional=False),
        one("DECODER_QUERY", "BYTES"),
        one("REQUEST_OUTPUT_LEN", "INT32", optional=False),
        one("BAD_WORDS_DICT", "BYTES", -1),
        one("STOP_WORDS_DICT", "BYTES", -1),
        one("EMBEDDING_BIAS_WORDS", "BYTES", -1),
        one("EMBEDDING_BIAS_WEIGHTS", "FP32", -1),
        one("END_ID", "INT32"),
        one("PAD_ID", "INT32"),
        one("PROMPT_TABLE_EXTRA_ID", "UINT64"),
    )


PREPROCESSING_OUTPUTS = (
    _out("INPUT_ID", "INT32", -1),
    _out("REQUEST_INPUT_LEN", "INT32", 1),
    _out("DECODER_INPUT_ID", "INT32", -1),
    _out("REQUEST_DECODER_INPUT_LEN", "INT32", 1),
    _out("BAD_WORDS_IDS", "INT32", 2, -1),
    _out("STOP_WORDS_IDS", "INT32", 2, -1),
    _out("EMBEDDING_BIAS", "FP32", -1),
    _out("REQUEST_OUTPUT_LEN", "INT32", -1),
    _out("OUT_END_ID", "INT32", 1),
    _out("OUT_PAD_ID", "INT32", 1),
    _out("OUT_PROMPT_TABLE_EXTRA_IDS", "UINT64", -1),
)
POSTPROCESSING_INPUTS = (
    InputSpec("TOKENS_BATCH", ("INT32",), (-1, -1), optional=False),
    InputSpec("SEQUENCE_LENGTH", ("INT32",), (-1,), optional=False),
)
CORE_MODEL = "tensorrt_llm"


def triton_models(settings: TritonSettings) -> dict[str, Model]:
    """The models by name."""
    shared = _generation_outputs(settings.logits_data_type)

    def model(
        name: str,
        kind: Kind,
        backend: str,
        inputs: tuple[InputSpec, ...],
        outputs: tuple[TensorSpec, ...],
        **more: Any,
    ) -> Model:
        return Model(
            name,
            kind,
            backend,
            {spec.name: spec for spec in inputs},
            {spec.name: spec for spec in outputs},
            max_batch_size=settings.max_batch_size,
            decoupled=name in settings.decoupled,
            **more,
        )

    text_outputs = (_out("text_output", "BYTES", -1), *shared)
    token_outputs = (
        _out("output_ids", "INT32", -1, -1),
        _out("sequence_length", "INT32", -1),
        *shared,
        _out("context_phase_params", "UINT8", -1),
    )
    models = (
        model("ensemble", Kind.TEXT, "", TEXT_INPUTS, text_outputs),
        model(
            "tensorrt_llm_bls",
            Kind.TEXT,
            "python",
            BLS_INPUTS,
            text_outputs,
            accumulate=settings.accumulate_tokens,
            final_alone=True,
            parameters={"accumulate_tokens": str(settings.accumulate_tokens).lower()},
        ),
        model(
            CORE_MODEL,
            Kind.TOKENS,
            "tensorrtllm",
            TOKEN_INPUTS,
            token_outputs,
            parameters={
                "exclude_input_in_output": str(settings.exclude_input_in_output).lower(),
            },
        ),
        model(
            "preprocessing",
            Kind.PREPROCESSING,
            "python",
            _preprocessing_inputs(),
            PREPROCESSING_OUTPUTS,
        ),
        model(
            "postprocessing",
            Kind.POSTPROCESSING,
            "python",
            POSTPROCESSING_INPUTS,
            (_out("OUTPUT", "BYTES", -1),),
        ),
    )
    return {each.name: each for each in models}


def describe_metadata(model: Model) -> service_pb2.ModelMetadataResponse:
    """The model as ModelMetadata answers."""
    response = service_pb2.ModelMetadataResponse(
        name=model.name, versions=[MODEL_VERSION], platform=model.backend or "ensemble"
    )
    for specs, listed in (
        (model.inputs.values(), response.inputs),
        (model.outputs.values(), response.outputs),
    ):
        for spec in specs:
            listed.add(name=spec.name, datatype=spec.data_type, shape=(-1, *spec.dims))
    return response


def describe_config(model: Model) -> model_config_pb2.ModelConfig:
    """The model as ModelConfig answers."""
    config = model_config_pb2.ModelConfig(
        name=model.name,
        backend=model.backend,
        platform="ensemble" if model.is_ensemble else "",
        max_batch_size=model.max_batch_size,
    )
    config.version_policy.latest.num_versions = 1
    config.model_transaction_policy.decoupled = model.decoupled
    for spec in model.inputs.values():
        given = config.input.add(
            name=spec.name,
            data_type=_config_type(spec),
            dims=spec.dims,
            optional=spec.optional,
            allow_ragged_batch=spec.ragged and not model.is_ensemble,
        )
        if spec.scalar and model.kind is Kind.TOKENS:
            # An empty shape is a reshape too: of one value a row, to none.
            given.reshape.SetInParent()
    for output in model.outputs.values():
        config.output.add(name=output.name, data_type=_config_type(output), dims=output.dims)
    if model.is_ensemble:
        for step in ("preprocessing", CORE_MODEL, "postprocessing"):
            config.ensemble_scheduling.step.add(model_name=step, model_version=-1)
    for key, text in model.parameters.items():
        config.parameters[key].string_value = text
    return config


def _config_type(spec: TensorSpec) -> int:
    name = "STRING" if spec.data_type == "BYTES" else spec.data_type
    return int(model_config_pb2.DataType.Value(f"TYPE_{name}"))
