"""Conversion of the parameters in config.pbtxt."""

from __future__ import annotations

from collections.abc import Mapping

from trtmesh.chassis.errors import SettingsError
from trtmesh.cli.triton_import.findings import Draft, Subject
from trtmesh.cli.triton_import.rules import (
    FALSE,
    MODELS,
    TORCH,
    TRUE,
    Rule,
    engine,
    fraction,
    one_of,
    only,
    own,
    replaced,
    truth,
    unsupported,
    whole,
)

BATCHING = {
    "inflight_fused_batching": "inflight_fused_batching",
    "inflight_batching": "inflight_fused_batching",
    "V1": "V1",
}
POLICY = one_of(
    {"max_utilization": "max_utilization", "guaranteed_no_evict": "guaranteed_no_evict"}
)
DECODING = ("top_k", "top_p", "top_k_top_p", "beam_search")
SPECULATIVE = ("medusa", "redrafter", "lookahead", "eagle")

NO_ADAPTERS = "the embedded engine takes no LoRA adapters"
NO_SPECULATION = (
    "the embedded engine does not speculate; every other request is served the same, token by token"
)
NO_ENCODER = "the embedded engine runs decoder-only models"
NO_PICTURES = "the mesh takes no images and no video; requests with them are refused by name"
NO_GRAMMARS = "the embedded engine does no guided decoding; requests for it are refused by name"
KERNELS = (
    "it tunes TensorRT's kernels, absent from the embedded engine, without an effect on answers"
)
AT_ONCE = "nothing polls: cancels and stops act at once"
ALWAYS_COUNTED = "metrics are always counted"
ONE_PROCESS = "an engine is one process and needs no MPI; start more with mesh.engines"
ONE_ENGINE = "one engine computes a prompt and continues it"
NO_HANDOFF = f"{ONE_ENGINE}, so nothing is handed over; requests for a handoff are refused by name"
NO_CODE = "no code of a repository is loaded"
NO_CANDIDATES = "one sequence is generated; a request for the best of several is refused"
BROUGHT_BACK = (
    "blocks in host memory are always brought back; kv_cache_host_memory_bytes 0 keeps none there"
)
RESIDENT = "weights are not streamed: they stay on the device"
NO_VISION_TOWER = "it configures a vision encoder, and the mesh has none"


def cache_fraction(subject: Subject, draft: Draft) -> None:
    share = fraction(subject)
    if str(draft.get((*TORCH, "device"))).startswith("cuda"):
        draft.carry(subject, (*TORCH, "kv_cache_free_memory_fraction"), share)
    else:
        draft.replace(
            subject,
            "no GPU was named, and on a CPU the cache takes 1 GiB; with --device cuda:0 the fraction is carried over",
        )


def _batching(subject: Subject, draft: Draft) -> None:
    if subject.value not in BATCHING:
        # Scripts look for the first words in the log of a failed server.
        raise SettingsError(
            f"Invalid gpt_model_type: model '{subject.model}': {subject.what} is {subject.value!r} but must be one of"
            f" {', '.join(BATCHING)}"
        )
    draft.carry(subject, (*TORCH, "batching_type"), BATCHING[subject.value])


def _special_tokens(subject: Subject, draft: Draft) -> None:
    """Values other than true and false mean true, as in Triton's models."""
    name = subject.what.removeprefix("parameters.")
    if subject.value.strip().lower() in TRUE | FALSE:
        own(name, truth)(subject, draft)
    else:
        draft.put((*MODELS, subject.model, name), value=True)
        draft.refuse(subject, "it is neither true nor false and counts as true, as in Triton")


def _devices(subject: Subject, draft: Draft) -> None:
    """GPUs of an instance are separated by commas, instances by semicolons."""
    instances = [part.split(",") for part in subject.value.split(";") if part.strip()]
    if draft.get((*TORCH, "device")):
        draft.replace(subject, f"--device says {draft.get((*TORCH, 'device'))}")
    elif len(instances) == 1 and len(instances[0]) == 1:
        draft.carry(subject, (*TORCH, "device"), f"cuda:{instances[0][0].strip()}")
    else:
        draft.refuse(
            subject,
            "an embedded engine runs on one GPU, the same for all engines of a stack; start further ones by themselves"
            " and list them in router.engines",
        )


def _decoding(subject: Subject, draft: Draft) -> None:
    if subject.value in SPECULATIVE:
        draft.refuse(subject, NO_SPECULATION)
    else:
        read = one_of({mode: mode for mode in DECODING} | {"auto": "auto"})
        draft.carry(subject, (*TORCH, "decoding_mode"), read(subject))


def _scheduler_policy(subject: Subject, draft: Draft) -> None:
    policy = POLICY(subject)
    if policy == "max_utilization" and draft.get((*TORCH, "batching_type")) == "V1":
        draft.refuse(subject, "V1 never pauses a sequence")
    else:
        draft.carry(subject, (*TORCH, "batch_scheduler_policy"), policy)


def _beam_width(subject: Subject, draft: Draft) -> None:
    width = whole(subject)
    own("max_beam_width", whole)(subject, draft)
    sequences = (*TORCH, "max_sequences_per_item")
    if width > (draft.get(sequences) or 16):
        draft.put(sequences, width)


CORE_PARAMETERS: Mapping[str, Rule] = {
    # Later parameters depend on the first four.
    "gpt_model_type": _batching,
    "batching_strategy": _batching,
    "gpu_device_ids": _devices,
    "encoder_model_path": unsupported(NO_ENCODER),
    "cross_kv_cache_fraction": unsupported(NO_ENCODER),
    "max_beam_width": _beam_width,
    "decoding_mode": _decoding,
    "batch_scheduler_policy": _scheduler_policy,
    "max_tokens_in_paged_kv_cache": engine("kv_cache_tokens", whole),
    "kv_cache_free_gpu_mem_fraction": cache_fraction,
    "kv_cache_host_memory_bytes": engine("host_cache_bytes", whole),
    "kv_cache_onboard_blocks": only(truth, value=True, text=BROUGHT_BACK),
    "enable_kv_cache_reuse": engine("prefix_reuse", truth),
    "enable_chunked_context": engine("chunked_context", truth),
    "max_attention_window_size": unsupported(
        "the windows are those of the model's own config.json; a cyclic cache over a model trained without changes"
        " its answers"
    ),
    "sink_token_length": unsupported("the model attends as it was trained, without sinks"),
    "exclude_input_in_output": own("exclude_input_in_output", truth),
    "normalize_log_probs": engine("normalize_log_probs", truth),
    "cancellation_check_period_ms": replaced(AT_ONCE),
    "stats_check_period_ms": replaced(ALWAYS_COUNTED),
    "recv_poll_period_ms": replaced(AT_ONCE),
    "iter_stats_max_iterations": replaced(ALWAYS_COUNTED),
    "request_stats_max_iterations": replaced(ALWAYS_COUNTED),
    "participant_ids": replaced(ONE_PROCESS),
    "num_nodes": only(
        whole, value=1, text=ONE_PROCESS, reason="an embedded engine runs on one machine"
    ),
    "executor_worker_path": replaced(ONE_PROCESS),
    "worker_path": replaced(ONE_PROCESS),
    "lora_cache_optimal_adapter_size": unsupported(NO_ADAPTERS),
    "lora_cache_max_adapter_size": unsupported(NO_ADAPTERS),
    "lora_cache_gpu_memory_fraction": unsupported(NO_ADAPTERS),
    "lora_cache_host_memory_bytes": unsupported(NO_ADAPTERS),
    "lora_prefetch_dir": unsupported(NO_ADAPTERS),
    "lookahead_window_size": unsupported(NO_SPECULATION),
    "lookahead_ngram_size": unsupported(NO_SPECULATION),
    "lookahead_verification_set_size": unsupported(NO_SPECULATION),
    "medusa_choices": unsupported(NO_SPECULATION),
    "eagle_choices": unsupported(NO_SPECULATION),
    "speculative_decoding_fast_logits": only(
        truth, value=False, text="there are no drafts", reason=NO_SPECULATION
    ),
    "gpu_weights_percent": only(fraction, value=1.0, text=RESIDENT),
    "enable_context_fmha_fp32_acc": replaced(KERNELS),
    "multi_block_mode": replaced(KERNELS),
    "cuda_graph_mode": replaced(KERNELS),
    "cuda_graph_cache_size": replaced(KERNELS),
    "enable_trt_overlap": replaced(KERNELS),
    "guided_decoding_backend": unsupported(NO_GRAMMARS),
    "xgrammar_tokenizer_info_path": unsupported(NO_GRAMMARS),
    "tokenizer_dir": replaced(
        "tokenizers are processes of their own: see the one of preprocessing"
    ),
    "FORCE_CPU_ONLY_INPUT_TENSORS": replaced("inputs never lie on a device"),
}

TEXT_PARAMETERS: Mapping[str, Rule] = {
    "tokenizer_type": replaced("the tokenizer's own files decide"),
    "add_special_tokens": _special_tokens,
    "skip_special_tokens": _special_tokens,
    "multimodal_model_path": unsupported(NO_VISION_TOWER),
    "max_num_images": unsupported(NO_VISION_TOWER),
    "hf_model_path": replaced("the model's own files are read: see mesh.model"),
}

BLS_PARAMETERS: Mapping[str, Rule] = {
    "accumulate_tokens": own("accumulate_tokens", truth),
    "tensorrt_llm_model_name": replaced(
        "the mesh serves it itself; requests count for this model too"
    ),
    "tensorrt_llm_draft_model_name": unsupported(NO_SPECULATION),
    "multimodal_encoders_name": unsupported(NO_PICTURES),
}

DISAGGREGATED_PARAMETERS: Mapping[str, Rule] = {
    "context_model_name": replaced(ONE_ENGINE),
    "generation_model_name": replaced(f"{ONE_ENGINE}; requests count for this model too"),
}

LLMAPI_PARAMETERS: Mapping[str, Rule] = {"gpu_device_ids": _devices}
