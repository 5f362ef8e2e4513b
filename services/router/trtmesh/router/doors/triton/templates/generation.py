"""Templates that generate: from a call to the request of the mesh, and Triton's words for failures."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from trtmesh.chassis.errors import (
    AdapterNotFound,
    AdaptersFull,
    BackendFailed,
    InvalidField,
    InvalidRequest,
    PromptTooLong,
    TokenOutOfVocabulary,
    TrtmeshError,
    forget_frames,
)
from trtmesh.chassis.parsing import parse_config
from trtmesh.router.doors.triton.quoted import Quoted
from trtmesh.router.doors.triton.settings import LogitsDataType
from trtmesh.router.doors.triton.templates.outputs import DetailedOutputs, OutputBuilder
from trtmesh.router.doors.triton.templates.put import PutRow
from trtmesh.router.doors.triton.templates.template import Call, Model, Template
from trtmesh.router.doors.triton.templates.tensor_table import detail_outputs
from trtmesh.router.doors.triton.tensors import MESH_DATA_TYPES, TensorSpec
from trtmesh.router.values.request import GenerationRequest, parse_request
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb
from trtmesh.v1.generation_fields import FILTERS

PHASES = {
    "context_and_generation": pb.GENERATION_PHASE_CONTEXT_AND_GENERATION,
    "context_only": pb.GENERATION_PHASE_CONTEXT_ONLY,
    "generation_only": pb.GENERATION_PHASE_GENERATION_ONLY,
}
DEFAULT_PRIORITY = 16
"""Triton's priority that equals an unset one, the mesh's 0. Triton serves lower numbers first; 0 is its unset."""
LOWEST_PRIORITY = -(2**31)
REMEMBERED_INPUTS = 1024
"""Sets of inputs: a client sends few."""


@dataclass(frozen=True, slots=True)
class ItemFailure:
    """A failed item, with the figures in Triton's messages."""

    error: TrtmeshError
    request_id: str
    prompt_tokens: int
    longest_prompt: int


@dataclass(frozen=True, kw_only=True)
class GenerationTemplate(Template, ABC):
    """Each row of a call becomes an item of the mesh."""

    text: bool
    """Whether text goes in and out, not token ids."""
    draws_by_seed: bool = False
    """Whether draws depend on the seed alone, and not on the row."""
    request_parameters: frozenset[str] = frozenset({"priority", "timeout", "request_type"})

    @abstractmethod
    def output_builder(self, call: Call, request: GenerationRequest) -> OutputBuilder:
        """Makes the outputs of the call's responses."""

    def request(self, call: Call, request_id: str) -> GenerationRequest:
        """Translates a call. Raises InvalidRequest or Quoted."""
        self.check(call)
        request = router_pb.GenerateRequest(model=call.model.mesh_model)
        puts = _puts_of(call.model, tuple(call.inputs))
        refused: dict[int, TrtmeshError] = {}
        for row in range(call.batch_size):
            item = request.items.add()
            item.config.output.exclude_prompt = call.model.exclude_input_in_output
            try:
                for name, put_row in puts:
                    put_row(item, call.inputs[name], row)
                self.settle(item, call)
            except TrtmeshError as error:
                forget_frames(error)
                refused[row] = error
        parsed = parse_request(
            request,
            request_id,
            refused,
            is_large=call.is_large,
            by_seed=self.draws_by_seed,
            default_seed=call.model.default_seed if self.draws_by_seed else None,
        )
        if parsed.refused and not call.decoupled:
            # The only response is an error; the other rows need not run.
            first = parsed.refused[0]
            raise first.error.of_item(first.batch_index)
        return parsed

    def check(self, call: Call) -> None:
        """Raises Quoted for inputs in conflict."""
        call.check_streaming(
            "Streaming is only supported if model is deployed using decoupled mode."
        )

    def settle(self, item: router_pb.GenerateItem, call: Call) -> None:
        """Sets what follows from several inputs, from none, or from the model."""
        config, model = item.config, call.model
        config.output.stream = call.streaming
        if call.streaming:
            # The prompt is part of whole outputs only.
            config.output.exclude_prompt = True
        if self.text:
            config.output.skip_special_tokens = model.skip_special_tokens
            item.prompt.add_special_tokens = model.add_special_tokens
        if config.HasField("sampling"):
            _drop_fillers(config.sampling)
            _count_prompt(config.sampling)
        if config.output.context_logits or config.output.generation_logits:
            config.output.logits_data_type = MESH_DATA_TYPES[model.logits_data_type]
        if config.HasField("beam_search"):
            _settle_beams(config, model.max_beam_width)
        normalizes = model.normalize_log_probs
        if (
            normalizes is not None
            and config.output.log_probs
            and not config.HasField("beam_search")
        ):
            config.output.normalize_log_probs = normalizes
        if call.parameters:
            _apply_parameters(config, call.parameters)

    def unnamed_stop(self) -> InvalidRequest:
        """The error of a stop request without an id."""
        return InvalidRequest("Trying to stop a request but request ID is not provided")

    def check_stopped(self) -> None:
        """Raises the answer to a stop request where upstream answers with an error."""

    def failed(self, call: Call, failure: ItemFailure) -> TrtmeshError:
        """The error of an item, quoted by Triton's own error where Triton has one."""
        if isinstance(failure.error, PromptTooLong):
            # A text that is far too long is never encoded whole: then the error has what was counted.
            tokens = failure.prompt_tokens or failure.error.value
            words = (
                f"Prompt length ({tokens}) exceeds maximum input length ({failure.longest_prompt})"
            )
            return quoting(call, words, failure.error)
        if isinstance(failure.error, AdapterNotFound):
            words = f"LoRA task {failure.error.value} not found in cache. Please send LoRA weights with request"
            return quoting(call, words, failure.error)
        if isinstance(failure.error, AdaptersFull):
            words = "Cache is full. There are no done tasks to evict"
            return quoting(call, words, failure.error)
        if isinstance(failure.error, TokenOutOfVocabulary) and not call.model.wrap_token_ids:
            return _naming_the_setting(failure.error)
        return failure.error


@dataclass(frozen=True, kw_only=True)
class ExecutorTemplate(GenerationTemplate):
    """Templates over TensorRT-LLM's C++ executor, upstream. Its generators start from the seed alone, and from 0
    without one."""

    draws_by_seed: bool = True

    def all_outputs(self, logits_data_type: LogitsDataType = "FP32") -> tuple[TensorSpec, ...]:
        return (*self.outputs, *detail_outputs(logits_data_type))

    def output_builder(self, call: Call, request: GenerationRequest) -> OutputBuilder:
        return DetailedOutputs(call, request, text=self.text)

    def settle(self, item: router_pb.GenerateItem, call: Call) -> None:
        super().settle(item, call)
        sampling = item.config.sampling
        if (
            not item.config.HasField("beam_search")
            and not sampling.top_k
            and not sampling.HasField("top_p")
            and (sampling.HasField("temperature") or sampling.HasField("top_k"))
        ):
            # The executor samples only with top_k or top_p, even at a temperature.
            sampling.top_k = 1

    def failed(self, call: Call, failure: ItemFailure) -> TrtmeshError:
        if isinstance(failure.error, BackendFailed):
            words = (
                f"Executor failed process requestId {failure.request_id} due to the following error"
            )
            return quoting(call, words, failure.error)
        return super().failed(call, failure)


@lru_cache(REMEMBERED_INPUTS)
def _puts_of(model: Model, names: tuple[str, ...]) -> Sequence[tuple[str, PutRow]]:
    """How to put these inputs, in the order of the model's."""
    return [
        (name, spec.put.put_row)
        for name, spec in model.inputs.items()
        if spec.put is not None and name in names
    ]


def _naming_the_setting(error: TokenOutOfVocabulary) -> TokenOutOfVocabulary:
    named = copy.copy(error)
    named.problem += "; the setting triton.wrap_token_ids takes such ids modulo its size"
    return named


def quoting(call: Call, words: str, error: TrtmeshError) -> Quoted:
    """Triton's own error around an error of the mesh."""
    return Quoted(f"{words}: {error.sentence(call.tensor_of)}", error)


def _drop_fillers(sampling: pb.SamplingConfig) -> None:
    """Removes empty words, the padding of a batch, with their weights."""
    words, weights = sampling.embedding_bias_texts, sampling.embedding_bias_weights
    if "" in words and len(words) == len(weights):
        kept = [(word, weight) for word, weight in zip(words, weights, strict=True) if word]
        words[:] = [word for word, _ in kept]
        weights[:] = [weight for _, weight in kept]


def _count_prompt(sampling: pb.SamplingConfig) -> None:
    """Penalties count the whole prompt unless the client says otherwise, as in TensorRT-LLM."""
    penalised = sampling.presence_penalty or sampling.frequency_penalty
    if penalised and not sampling.HasField("prompt_ignore_length"):
        sampling.prompt_ignore_length = 0


def _settle_beams(config: pb.GenerationConfig, max_beam_width: int | None) -> None:
    width = config.beam_search.beam_width
    if max_beam_width is not None and width > max_beam_width:
        raise Quoted(
            f"Requested beam width {width} is larger than configured max beam width {max_beam_width}",
            InvalidField(),
        )
    if width > 1:
        _drop_draws(config)
    else:
        if config.beam_search.HasField("beam_width") and width < 1:
            raise InvalidRequest(field="beam_search.beam_width", value="0", limit="at least 1")
        # Nothing else of beam search applies to a single beam.
        config.ClearField("beam_search")


def _drop_draws(config: pb.GenerationConfig) -> None:
    """Removes valid filters of draws: a beam search draws nothing, and the executor accepts them."""
    sampling: Any = config.sampling
    if any(map(sampling.HasField, FILTERS)):
        parse_config(config)
        for field in FILTERS:
            sampling.ClearField(field)


def _apply_parameters(config: pb.GenerationConfig, parameters: Mapping[str, Any]) -> None:
    if priority := parameters.get("priority", 0):
        config.priority = max(LOWEST_PRIORITY, DEFAULT_PRIORITY - priority)
    phase = parameters.get("request_type")
    if phase is None:
        return
    if phase not in PHASES:
        raise InvalidRequest(
            field="handoff.phase", value=repr(phase), limit=f"one of {', '.join(PHASES)}"
        )
    if phase != "context_and_generation":
        config.handoff.phase = PHASES[phase]
