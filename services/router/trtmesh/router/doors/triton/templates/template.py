"""The three subjects of the door: a template, a model with all settings decided, one call of a model."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trtmesh.chassis.errors import InvalidRequest, TrtmeshError
from trtmesh.chassis.frozen import frozen
from trtmesh.router.doors.triton.quoted import Quoted
from trtmesh.router.doors.triton.settings import LogitsDataType, Release, TemplateName
from trtmesh.router.doors.triton.templates.tensor_table import InputSpec
from trtmesh.router.doors.triton.tensors import InputTensor, TensorSpec


class Spent(NamedTuple):
    """Nanoseconds of requests, one phase after the other."""

    reading: int = 0
    """Until the inputs were read."""
    encoding: int = 0
    queued: int = 0
    generating: int = 0
    decoding: int = 0
    """From the engine's end to the last text; earlier texts are decoded beside generation."""
    writing: int = 0
    """From the last text to the end of the last response."""


class Share(NamedTuple):
    """Nanoseconds counted for a model, by Triton's phases."""

    queued: int = 0
    input: int = 0
    infer: int = 0
    output: int = 0


@dataclass(frozen=True, kw_only=True)
class Template:
    """A Triton model of TensorRT-LLM. Subclasses are GenerationTemplate and TokenizerTemplate."""

    name: TemplateName
    backend: str
    """'' for an ensemble."""
    inputs: tuple[InputSpec, ...]
    outputs: tuple[TensorSpec, ...]
    decoupled: bool = True
    """Whether a model may answer with a stream of responses."""
    is_core: bool = False
    """Whether this model generates. Ensembles and BLS ask another model."""
    batched: bool = True
    """Whether tensors have a batch dimension."""
    dated: bool = True
    """Whether the configuration follows the release of a model; else it is always the newest."""
    reshapes_scalars: bool = False
    """Whether ModelConfig drops the last dimension of scalar inputs."""
    final_alone: bool = False
    """Whether a stream ends with a separate, empty response."""
    accumulates: bool = False
    """Whether texts accumulate unless a model's settings say otherwise."""
    needs_roles: bool = False
    """Whether a model that no setting names is served only by workers for prefill and for decode."""
    parameters: tuple[str, ...] = ()
    """The settings of a model that are parameters of ModelConfig."""
    request_parameters: frozenset[str] = frozenset()
    """The parameters of a request with an effect."""

    def all_outputs(self, logits_data_type: LogitsDataType = "FP32") -> tuple[TensorSpec, ...]:
        return self.outputs

    def check_outputs(self, call: Call) -> None:
        """Raises InvalidRequest if the requested outputs lack a mandatory output."""

    def share(self, spent: Spent) -> Share:
        """The time counted for this model as a step of another: linear, as it is asked for many requests together."""
        return Share()


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A model as clients see it, every setting decided. Equal to itself alone, and so a key of what is remembered."""

    name: str
    template: Template
    inputs: Mapping[str, InputSpec]
    outputs: Mapping[str, TensorSpec]
    required: frozenset[str]
    """Inputs of every request."""
    mesh_model: str
    """The serving model of the mesh; '' if the mesh has only one."""
    draft_model: str
    """The model of the mesh that drafts for this one; '' for none."""
    decoupled: bool
    """Whether a stream gets several responses to a request."""
    strict_transaction_policy: bool
    """Whether it then refuses unary calls."""
    release: Release
    """The release of its configuration."""
    max_batch_size: int
    """0 where tensors have no batch dimension."""
    max_beam_width: int | None
    exclude_input_in_output: bool
    accumulate_tokens: bool
    merge_tokens: bool
    """Whether every response of a stream holds the whole text so far."""
    logits_data_type: LogitsDataType
    add_special_tokens: bool
    skip_special_tokens: bool
    default_seed: int | None
    """Seed of requests without one; None draws a seed."""
    normalize_log_probs: bool | None
    """None leaves it to the engine."""
    wrap_token_ids: bool
    """Whether prompt ids are taken modulo the size of the vocabulary."""
    steps: tuple[str, ...]
    """Models that count this model's requests too."""

    @property
    def refuses_unary_calls(self) -> bool:
        return self.decoupled and self.strict_transaction_policy

    @property
    def is_ensemble(self) -> bool:
        return self.template.backend == ""

    @property
    def batch_dims(self) -> tuple[int, ...]:
        """The dimensions before those of a TensorSpec."""
        return (-1,) if self.max_batch_size else ()


@frozen
class Call:
    """A request with its inputs read. `request_id` is the client's and may be '' or live."""

    model: Model
    request_id: str
    inputs: Mapping[str, InputTensor]
    batch_size: int
    decoupled: bool
    """Whether it may have several responses: of a decoupled model, and not a unary call."""
    requested: frozenset[str]
    """Outputs asked for; empty asks for all."""
    parameters: Mapping[str, Any]
    is_large: bool = False
    """Whether it came in a large message."""
    arrived_ns: int = field(default_factory=time.monotonic_ns)
    stops: bool = field(init=False)
    """Whether it only ends another request."""
    streaming: bool = field(init=False)
    """Whether tokens come as they are generated; the first half of a prompt has one response."""

    def __post_init__(self) -> None:
        asks = self.flag("stream") or self.flag("streaming")
        streaming = asks and self.parameters.get("request_type") != "context_only"
        object.__setattr__(self, "streaming", streaming)
        object.__setattr__(self, "stops", self.flag("stop"))

    def wants(self, output: str) -> bool:
        return not self.requested or output in self.requested

    def flag(self, name: str) -> bool:
        """A boolean input, equal in all rows."""
        tensor = self.inputs.get(name)
        return tensor is not None and bool(tensor.elements[0])

    def check_streaming(self, of_whole_model: str) -> None:
        """Raises the error of a streaming request with only one response: `of_whole_model`, Triton's sentence about a
        model without decoupling, or InvalidRequest about a unary call."""
        if not self.streaming or self.decoupled:
            return
        if not self.model.decoupled:
            raise Quoted(of_whole_model, InvalidRequest())
        raise InvalidRequest(
            "is true but a unary call has one response; use ModelStreamInfer or generate_stream, or leave it out",
            field="stream" if self.flag("stream") else "streaming",
            value="True",
            limit="False",
        )

    @property
    def timeout_seconds(self) -> float | None:
        microseconds: int = self.parameters.get("timeout", 0)
        return microseconds / 1e6 if microseconds else None

    def sentence(self, error: TrtmeshError) -> str:
        """An error in the client's words: its tensors and, in a batch, the row."""
        sentence = error.sentence(self.tensor_of)
        if error.batch_index is None or self.batch_size == 1:
            return sentence
        return f"row {error.batch_index}: {sentence}"

    def tensor_of(self, field: str) -> str:
        """The name of the tensor for a field such as `kv_cache.token_ranges[3].token_end`, else the field itself."""
        tensors = self._tensors_by_field()
        head, tail = field, ""
        while head:
            plain, bracket, index = head.partition("[")
            index, _, rest = index.partition("]")
            if (tensor := tensors.get(plain + rest)) is not None:
                return tensor + (f"[{index}]" if bracket else "") + tail
            head, _, last = head.rpartition(".")
            tail = f".{last}{tail}"
        return field

    def _tensors_by_field(self) -> dict[str, str]:
        """Prefers a tensor of this call, then the newest name, then the first, where several set one field."""
        best_first = sorted(
            self.model.inputs.values(),
            key=lambda spec: (spec.name not in self.inputs, bool(spec.same_as)),
        )
        return {"handoff.phase": "parameter 'request_type'"} | {
            field: spec.name
            for spec in reversed(best_first)
            if spec.put
            for field in spec.put.fields
        }
