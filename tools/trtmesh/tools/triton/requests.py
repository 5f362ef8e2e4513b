"""Requests to a Triton model, with the inputs of its configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtmesh.chassis.errors import InvalidRequest
from trtmesh.kserve import grpc_service_pb2, model_config_pb2
from trtmesh.tools.triton.tensors import Array, encode_rows

NAMES: Mapping[str, Sequence[str]] = {
    "max_tokens": ("max_tokens", "request_output_len", "sampling_param_max_tokens"),
    "stream": ("stream", "streaming"),
    "top_k": ("top_k", "runtime_top_k", "sampling_param_top_k"),
    "top_p": ("top_p", "runtime_top_p", "sampling_param_top_p"),
    "temperature": ("temperature", "sampling_param_temperature"),
    "seed": ("seed", "random_seed", "sampling_param_seed"),
    "stop_words": ("stop_words", "sampling_param_stop"),
    "length_penalty": ("length_penalty", "len_penalty"),
    "perf_metrics": ("return_perf_metrics", "sampling_param_return_perf_metrics"),
    "exclude_input": ("exclude_input_in_output", "sampling_param_exclude_input_from_output"),
    "log_probs": ("return_log_probs", "return_cumulative_logprob"),
}
"""Names of an option in the models; other options keep their name."""

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class TritonModel:
    """A model, from its configuration."""

    name: str
    inputs: Mapping[str, str]
    """Data types of the inputs, by name."""
    ranks: Mapping[str, int]
    """Dimensions of the inputs, without the batch."""
    required: Sequence[str]
    decoupled: bool
    batched: bool
    """Whether tensors have a batch dimension."""
    accumulates: bool
    """Whether each response of a stream has the whole text so far."""

    @classmethod
    def of(cls, config: Any) -> TritonModel:
        names = model_config_pb2.DataType
        types = {i.name: names.Name(i.data_type).removeprefix("TYPE_") for i in config.input}
        # Triton's llmapi model always accumulates, without a parameter.
        always = any(name.startswith("sampling_param_") for name in types)
        accumulate = config.parameters["accumulate_tokens"].string_value or str(always).lower()
        return cls(
            config.name,
            {name: "BYTES" if kind == "STRING" else kind for name, kind in types.items()},
            {given.name: len(given.dims) for given in config.input},
            [given.name for given in config.input if not given.optional],
            config.model_transaction_policy.decoupled,
            config.max_batch_size > 0,
            accumulate.lower() in ("true", "yes", "1", "t"),
        )

    def input_for(self, option: str) -> str:
        """The input of an option. Raises InvalidRequest."""
        for name in NAMES.get(option, (option,)):
            if name in self.inputs:
                return name
        raise InvalidRequest(
            f"model '{self.name}' has no input for {option}; its inputs are: {', '.join(self.inputs)}"
        )

    @property
    def takes_ids(self) -> bool:
        return "input_ids" in self.inputs and "text_input" not in self.inputs

    def row_of(self, name: str, value: Any) -> Any:
        """The value of an input for one row: a list, or an array without a leading dimension of 1."""
        if not isinstance(value, Array):
            return value if isinstance(value, list) else [value]
        if len(value.shape) == self.ranks[name] + 1 and value.shape[0] == 1:
            return value[0]
        return value

    def prompt_inputs(self, prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
        """The rows of the prompt's inputs. Raises InvalidRequest."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if "text_input" in self.inputs and len(texts) == len(prompts):
            return {"text_input": [[text] for text in texts]}
        if "input_ids" in self.inputs and not texts:
            rows = [list(prompt) for prompt in prompts]
            longest = max(map(len, rows))
            return {
                "input_ids": [row + [0] * (longest - len(row)) for row in rows],
                "input_lengths": [[len(row)] for row in rows],
            }
        wanted = "token ids: --ids" if "input_ids" in self.inputs else "texts as prompts"
        raise InvalidRequest(f"model '{self.name}' takes {wanted}")


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a request sends beside its prompts, equal for all rows."""

    options: Mapping[str, Any]
    """Values by option or by the name of an input."""
    table: TableId | None = None
    outputs: Sequence[str] = ()
    """Outputs to return; none returns all."""


@dataclass(frozen=True, slots=True)
class TableId:
    """The identity of a prompt table, without which prompts with one share no KV."""

    extra_id: int
    vocabulary_size: int = 0
    """First token id to address the table; 0 gives every token the identity."""

    def rows(self, model: TritonModel, prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
        """The rows of the input: a value for each prompt, or each token. Raises InvalidRequest."""
        if "prompt_table_extra_ids" not in model.inputs:
            if self.vocabulary_size:
                raise InvalidRequest(
                    f"--vocab-size needs token ids; model '{model.name}' has texts"
                )
            return {model.input_for("prompt_table_extra_id"): [[self.extra_id]] * len(prompts)}
        longest = max(map(len, prompts))
        rows = [
            [self.extra_id if int(each) >= self.vocabulary_size else 0 for each in prompt]
            for prompt in prompts
        ]
        return {"prompt_table_extra_ids": [row + [0] * (longest - len(row)) for row in rows]}


def make_request(
    model: TritonModel, request_id: str, prompts: Sequence[Prompt], asked: Inputs
) -> Any:
    """A ModelInferRequest with a row for each prompt. Raises InvalidRequest."""
    inputs = model.prompt_inputs(prompts)
    if asked.table:
        inputs |= asked.table.rows(model, prompts)
    for option, value in asked.options.items():
        name = model.input_for(option)
        inputs[name] = [model.row_of(name, value)] * len(prompts)
    return _message(model, request_id, inputs, asked.outputs)


def make_encoding(model: TritonModel, request_id: str, text: str) -> Any:
    """The ModelInferRequest that turns a text into token ids. Raises InvalidRequest."""
    inputs = {name: [_blank(model.inputs[name])] for name in model.required}
    return _message(model, request_id, inputs | {model.input_for("QUERY"): [[text]]})


def make_stop(model: TritonModel, request_id: str) -> Any:
    """The ModelInferRequest to stop a request. Raises InvalidRequest."""
    prompt = "text_input" if "text_input" in model.inputs else "input_ids"
    names = {prompt, *model.required} | ({"input_lengths"} if prompt == "input_ids" else set())
    inputs = {name: [_blank(model.inputs[name])] for name in sorted(names)}
    return _message(model, request_id, inputs | {model.input_for("stop"): [[True]]})


def _blank(data_type: str) -> list[Any]:
    """The value of a required input without a meaning."""
    return [""] if data_type == "BYTES" else [0]


def _message(
    model: TritonModel,
    request_id: str,
    inputs: Mapping[str, Sequence[Any]],
    outputs: Sequence[str] = (),
) -> Any:
    request = grpc_service_pb2.ModelInferRequest(model_name=model.name, id=request_id)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, rows in inputs.items():
        data_type = model.inputs[name]
        shape, data = encode_rows(data_type, rows)
        if not model.batched:
            shape = shape[1:]
        request.inputs.add(name=name, datatype=data_type, shape=shape)
        request.raw_input_contents.append(data)
    for name in outputs:
        request.outputs.add(name=name)
    return request
