"""Requests to a Triton model, with the inputs of its configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtmesh.chassis.errors import InvalidRequest
from trtmesh.cli.triton.tensors import encode_rows
from trtmesh.kserve import grpc_service_pb2, model_config_pb2

NAMES: Mapping[str, Sequence[str]] = {
    "max_tokens": ("max_tokens", "request_output_len", "sampling_param_max_tokens"),
    "stream": ("stream", "streaming"),
    "top_k": ("top_k", "runtime_top_k", "sampling_param_top_k"),
    "top_p": ("top_p", "runtime_top_p", "sampling_param_top_p"),
    "temperature": ("temperature", "sampling_param_temperature"),
    "seed": ("seed", "sampling_param_seed"),
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
    required: Sequence[str]
    decoupled: bool
    batched: bool
    """Whether tensors have a batch dimension."""
    accumulates: bool
    """Whether each response of a stream has the whole text so far."""

    @classmethod
    def of(cls, config: Any) -> TritonModel:
        """From a ModelConfig."""
        names = model_config_pb2.DataType
        types = {i.name: names.Name(i.data_type).removeprefix("TYPE_") for i in config.input}
        # Triton's llmapi model always accumulates, without a parameter.
        always = any(name.startswith("sampling_param_") for name in types)
        accumulate = config.parameters["accumulate_tokens"].string_value or str(always).lower()
        return cls(
            config.name,
            {name: "BYTES" if kind == "STRING" else kind for name, kind in types.items()},
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


def make_request(
    model: TritonModel, request_id: str, prompts: Sequence[Prompt], options: Mapping[str, Any]
) -> Any:
    """A ModelInferRequest with a row for each prompt and equal options. Raises InvalidRequest."""
    inputs = model.prompt_inputs(prompts)
    for option, value in options.items():
        inputs[model.input_for(option)] = [value if isinstance(value, list) else [value]] * len(
            prompts
        )
    return _message(model, request_id, inputs)


def make_stop(model: TritonModel, request_id: str) -> Any:
    """The ModelInferRequest to stop a request. Raises InvalidRequest."""
    inputs: dict[str, list[Any]] = (
        {"text_input": [[""]]} if "text_input" in model.inputs else {"input_ids": [[0]]}
    )
    for name in model.required:
        inputs.setdefault(name, [[0]])
    if "input_ids" in inputs:
        inputs["input_lengths"] = [[0]]
    return _message(model, request_id, inputs | {model.input_for("stop"): [[True]]})


def _message(model: TritonModel, request_id: str, inputs: Mapping[str, Sequence[Any]]) -> Any:
    request = grpc_service_pb2.ModelInferRequest(model_name=model.name, id=request_id)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, rows in inputs.items():
        data_type = model.inputs[name]
        shape, data = encode_rows(data_type, rows)
        if not model.batched:
            shape = shape[1:]
        request.inputs.add(name=name, datatype=data_type, shape=shape)
        request.raw_input_contents.append(data)
    return request
