"""Tensors of the llmapi flavour of `tensorrt_llm`: other names than the five models have, and no batch dimension."""

from __future__ import annotations

from collections.abc import Mapping

from trtmesh.chassis.errors import InternalError, InvalidRequest, UnsupportedField
from trtmesh.router.doors.triton.templates import put
from trtmesh.router.doors.triton.templates.inputs import ANY, ONE, InputSpec
from trtmesh.router.doors.triton.templates.specs import PERF_OUTPUTS, TEXT_OUTPUT, out
from trtmesh.router.doors.triton.tensors import InputTensor
from trtmesh.v1 import router_pb2 as router_pb


@put.sets("prompt.text")
def _prompt(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    texts = tensor.texts(row)
    if len(texts) != 1:
        raise InvalidRequest(
            f"input '{tensor.name}' has {len(texts)} texts but the model takes one; send a request for each"
        )
    item.prompt.text = texts[0]


@put.sets("sampling.best_of")
def _candidates(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    """One is what is generated anyway."""
    if tensor.scalar(row) != 1:
        put.value("sampling.best_of")(item, tensor, row)


@put.sets("sampling.logits_post_processor")
def _post_processor(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    """An empty name means none."""
    if any(tensor.texts(row)):
        put.text("sampling.logits_post_processor")(item, tensor, row)


@put.sets()
def _adapter_path(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    raise UnsupportedField(
        f"input '{tensor.name}': this server reads no adapter from a path that a request names; leave it out and name"
        " an adapter with lora_id and lora_name"
    )


def check_adapter(inputs: Mapping[str, InputTensor]) -> None:
    """Raises InternalError where an adapter is named by halves. A request may leave the path out, which Triton's model
    needs: adapters are known by id and name."""
    given = {"lora_id", "lora_name", "lora_path"} & inputs.keys()
    if given and not given >= {"lora_id", "lora_name"}:
        raise InternalError("lora_id, lora_name, and lora_path must all be provided together")


def _one(name: str, data_type: str, where: put.Put | None) -> InputSpec:
    return InputSpec(name, (data_type,), ONE, put=where)


LLMAPI_INPUTS = (
    InputSpec("text_input", ("BYTES",), ANY, optional=False, put=_prompt),
    InputSpec("image_url", ("BYTES",), ANY, put=put.image_urls),
    _one("streaming", "BOOL", None),
    _one("sampling_param_best_of", "INT32", _candidates),
    _one("sampling_param_temperature", "FP32", put.value("sampling.temperature")),
    _one("sampling_param_top_k", "INT32", put.value("sampling.top_k")),
    _one("sampling_param_top_p", "FP32", put.value("sampling.top_p")),
    _one("sampling_param_frequency_penalty", "FP32", put.value("sampling.frequency_penalty")),
    _one("sampling_param_presence_penalty", "FP32", put.value("sampling.presence_penalty")),
    _one("sampling_param_max_tokens", "INT32", put.max_tokens),
    InputSpec("sampling_param_stop", ("BYTES",), ANY, put=put.texts("stopping.stop_texts")),
    _one("sampling_param_seed", "UINT64", put.value("sampling.seed")),
    _one("sampling_param_exclude_input_from_output", "BOOL", put.value("output.exclude_prompt")),
    _one("sampling_param_return_perf_metrics", "BOOL", put.value("output.perf_metrics")),
    _one("sampling_param_logits_post_processor_name", "BYTES", _post_processor),
    _one("return_finish_reason", "BOOL", None),
    _one("return_stop_reason", "BOOL", None),
    _one("return_cumulative_logprob", "BOOL", put.value("output.log_probs")),
    _one("stop", "BOOL", None),
    _one("lora_id", "UINT64", put.value("lora.id")),
    _one("lora_name", "BYTES", put.text("lora.name")),
    _one("lora_path", "BYTES", _adapter_path),
    _one("lora_ckpt_source", "BYTES", _adapter_path),
)
"""What the llmapi model takes."""

_OF_THE_CACHE = ("kv_cache_reused_block", "kv_cache_missed_block")
LLMAPI_OUTPUTS = (
    TEXT_OUTPUT,
    out("finish_reason", "BYTES", -1),
    out("stop_reason", "BYTES", -1),
    out("cumulative_logprob", "FP32", -1),
    *(out(name, "INT32", -1) for name in _OF_THE_CACHE),
    out("kv_cache_hit_rate", "FP32", -1),
    *(spec for spec in PERF_OUTPUTS if spec.name != "kv_cache_reused_blocks"),
)
