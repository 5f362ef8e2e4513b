"""Conversion of the arguments in `model.yaml`, the llmapi model's configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trtmesh.cli.triton_import.findings import Draft, Subject
from trtmesh.cli.triton_import.parameters import (
    ALWAYS_COUNTED,
    AT_ONCE,
    BROUGHT_BACK,
    KERNELS,
    NO_ADAPTERS,
    NO_CODE,
    NO_GRAMMARS,
    NO_PICTURES,
    NO_SPECULATION,
    cache_fraction,
)
from trtmesh.cli.triton_import.rules import (
    TORCH,
    Rule,
    engine,
    one_of,
    only,
    own,
    replaced,
    truth,
    unsupported,
    whole,
)

ONE_DEVICE = "an embedded engine runs on one device; start more engines with mesh.engines"
OF_THE_LIBRARY = "the embedded engine has no counterpart of this argument of TensorRT-LLM"
ONE_PROMPT = "the model takes one prompt a request, without a batch dimension"
ITS_OWN_FILES = "the model's own files are read: see mesh.model"

DTYPE = one_of({name: name for name in ("auto", "float16", "bfloat16", "float32")})
SCHEDULER = one_of(
    {
        "GUARANTEED_NO_EVICT": "guaranteed_no_evict",
        "MAX_UTILIZATION": "max_utilization",
        "STATIC_BATCH": "V1",
    }
)


def _scheduler(subject: Subject, draft: Draft) -> None:
    policy = SCHEDULER(subject)
    name = "batching_type" if policy == "V1" else "batch_scheduler_policy"
    draft.carry(subject, (*TORCH, name), policy)


RULES: Mapping[str, Rule] = {
    "triton_config.max_batch_size": only(whole, value=0, text=ONE_PROMPT),
    "triton_config.decoupled": own("decoupled", truth),
    "triton_config.cancellation_check_period_ms": replaced(AT_ONCE),
    "triton_config.multimodal": unsupported(NO_PICTURES),
    "logits_post_processors": unsupported(NO_CODE),
    "model": replaced(ITS_OWN_FILES),
    "tokenizer": replaced(ITS_OWN_FILES),
    "tokenizer_mode": replaced("the tokenizer's own files decide"),
    "skip_tokenizer_init": replaced("tokenizers are processes of their own"),
    "trust_remote_code": replaced("no code of a model is loaded"),
    "backend": replaced("the embedded engine computes with PyTorch"),
    "dtype": engine("dtype", DTYPE),
    "tensor_parallel_size": only(whole, value=1, text=ONE_DEVICE),
    "pipeline_parallel_size": only(whole, value=1, text=ONE_DEVICE),
    "context_parallel_size": only(whole, value=1, text=ONE_DEVICE),
    "gpus_per_node": only(whole, value=1, text=ONE_DEVICE),
    "max_batch_size": engine("max_batch_size", whole),
    "max_num_tokens": engine("max_step_tokens", whole),
    "max_seq_len": engine("max_sequence_tokens", whole),
    "enable_chunked_prefill": engine("chunked_context", truth),
    "scheduler_config.capacity_scheduler_policy": _scheduler,
    "kv_cache_config.enable_block_reuse": engine("prefix_reuse", truth),
    "kv_cache_config.enable_partial_reuse": engine("partial_reuse", truth),
    "kv_cache_config.max_tokens": engine("kv_cache_tokens", whole),
    "kv_cache_config.free_gpu_memory_fraction": cache_fraction,
    "kv_cache_config.host_cache_size": engine("host_cache_bytes", whole),
    "kv_cache_config.secondary_offload_min_priority": engine("host_cache_min_priority", whole),
    "kv_cache_config.tokens_per_block": engine("tokens_per_block", whole),
    "kv_cache_config.event_buffer_max_size": replaced("changes of the cache are always told"),
    "kv_cache_config.onboard_blocks": only(truth, value=True, text=BROUGHT_BACK),
    "enable_iter_perf_stats": replaced(ALWAYS_COUNTED),
    "enable_iter_req_stats": replaced(ALWAYS_COUNTED),
    "return_perf_metrics": replaced(ALWAYS_COUNTED),
    "cuda_graph_config": replaced(KERNELS),
    "attn_backend": replaced(KERNELS),
    "torch_compile_config": replaced(KERNELS),
    "disable_overlap_scheduler": replaced(KERNELS),
    "enable_lora": only(truth, value=False, text=NO_ADAPTERS),
    "lora_config": unsupported(NO_ADAPTERS),
    "speculative_config": unsupported(NO_SPECULATION),
    "guided_decoding_backend": unsupported(NO_GRAMMARS),
}


def arguments_of(arguments: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The arguments as text, by dotted name; mappings with a rule stay whole."""
    for key, value in arguments.items():
        name = prefix + str(key)
        if isinstance(value, dict) and value and any(rule.startswith(name + ".") for rule in RULES):
            yield from arguments_of(value, name + ".")
        else:
            yield name, "" if value is None else str(value)


def convert_argument(name: str, subject: Subject, draft: Draft) -> None:
    """Converts an argument."""
    RULES.get(name, unsupported(OF_THE_LIBRARY))(subject, draft)
