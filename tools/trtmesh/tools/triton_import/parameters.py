"""Conversion of the parameters in `config.pbtxt`, and of the arguments in the llmapi model's `model.yaml`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trtmesh.chassis.errors import ModelUnusable, SettingsError
from trtmesh.chassis.fingerprint import tokenizer_fingerprint
from trtmesh.tools.triton_import.findings import Draft, Outcome, Subject
from trtmesh.tools.triton_import.hf_model import ModelLengths
from trtmesh.tools.triton_import.rules import (
    FALSE,
    MODELS,
    TORCH,
    TRUE,
    Rule,
    engine,
    one_of,
    only,
    own,
    positive,
    replaced,
    share,
    truth,
    unsupported,
    whole,
    wrong,
)

IN_FLIGHT = ("inflight_fused_batching", "inflight_batching")
BATCHING = (*IN_FLIGHT, "V1")
POLICY = (*TORCH, "batching", "policy")
STATIC = "static_batch"
POLICIES = one_of(
    "max_utilization",
    "guaranteed_no_evict",
    # The word of the documentation of v0.5.
    guaranteed_completion="guaranteed_no_evict",
)
DECODING = one_of("top_k", "top_p", "top_k_top_p", "beam_search", "auto")
SPECULATIVE = ("medusa", "redrafter", "lookahead", "eagle")

ADAPTERS = (*TORCH, "adapters")
TRITON_HOST_BYTES = 1 << 30
"""Triton's default of lora_cache_host_memory_bytes."""

DTYPE = one_of("auto", "float16", "bfloat16", "float32")
SCHEDULER = one_of(
    GUARANTEED_NO_EVICT="guaranteed_no_evict",
    MAX_UTILIZATION="max_utilization",
    STATIC_BATCH=STATIC,
)

NO_ADAPTERS = (
    "no parameter of the repository asks for LoRA adapters, and the embedded engine takes them only with"
    " engine.torch.adapters.host_bytes"
)
SLOTS = "adapters are ready in engine.torch.adapters.max_batch_adapters slots"
ADAPTER_PAGES = "memory for adapters is counted in bytes, without pages of a size"
ANY_LAYER = "an adapter may update any linear layer, under the names of Hugging Face"
NO_PATHS = (
    "no request names a path; `trtmesh adapters add` registers an adapter, and requests name it"
)
BY_BYTES = "adapters in host memory are limited by bytes: engine.torch.adapters.host_bytes"
NOT_AT_START = "adapters are loaded when a request names them; `trtmesh adapters add` registers one by its directory"
DRAFT_MODEL = "tensorrt_llm_draft_model_name"
OTHER_DRAFTS = (
    "the embedded engine finds drafts by engine.torch.drafts and verifies draft_input_ids, and triton.models.NAME"
    ".draft_model of a BLS names a second model of the mesh; answers are those without drafts"
)
NO_ENCODER = "the embedded engine runs decoder-only models"
NO_SPEECH = "the mesh generates text from text and takes no speech"
NO_PICTURES = "the mesh takes no images and no video; requests with them are refused by name"
GRAMMARS = "the embedded engine follows grammars by llguidance, for the tokenizer.json of its model"
KERNELS = (
    "it tunes TensorRT's kernels, absent from the embedded engine, without an effect on answers"
)
AT_ONCE = "nothing polls: cancels and stops act at once"
ALWAYS_COUNTED = "metrics are always counted"
ONE_PROCESS = "an engine is one process and needs no MPI; start more with mesh.engines"
ONE_ENGINE = "one engine computes a prompt and continues it"
NO_CODE = "no code of a repository is loaded"
NO_CANDIDATES = "one sequence is generated; a request for the best of several is refused"
BROUGHT_BACK = (
    "blocks in host memory are always brought back; kv_cache_host_memory_bytes 0 keeps none there"
)
RESIDENT = "weights are not streamed: they stay on the device"
SHARED = "and all engines of a stack share the setting"
ONE_DEVICE = "an embedded engine runs on one device; start more engines with mesh.engines"
OF_THE_LIBRARY = "the embedded engine has no counterpart of this argument of TensorRT-LLM"
ONE_PROMPT = "the model takes one prompt a request, without a batch dimension"
TOKENIZER_FILES = "the tokenizer's own files decide"
ITS_OWN_FILES = "the model's own files are read: see mesh.model"
NO_VISION_TOWER = "it configures a vision encoder, and the mesh has none"


def _cache_fraction(subject: Subject, draft: Draft) -> None:
    if draft.runs_on_gpus:
        draft.carry(
            subject, (*TORCH, "kv_cache", "free_memory_fraction"), min(share(subject), 0.99)
        )
    else:
        draft.replace(
            subject,
            "not all engines have a GPU, and on a CPU the cache takes 1 GiB; with --device cuda:0 the fraction is"
            " carried over",
        )


def has_adapters(draft: Draft) -> bool:
    """Whether engines take adapters."""
    return bool(draft.get((*ADAPTERS, "host_bytes")))


def with_adapters(rule: Rule) -> Rule:
    """A parameter of adapters turns them on, with as much host memory as Triton takes unasked."""

    def turning_on(subject: Subject, draft: Draft) -> None:
        draft.imply(subject, (*ADAPTERS, "host_bytes"), TRITON_HOST_BYTES)
        rule(subject, draft)

    return turning_on


@with_adapters
def _prefetch(subject: Subject, draft: Draft) -> None:
    directory = Path(subject.value)
    if directory.is_dir():
        draft.carry(subject, (*ADAPTERS, "prefetch_directory"), str(directory))
    else:
        draft.refuse(
            subject,
            "this machine has no such directory; set engine.torch.adapters.prefetch_directory where engines run",
        )


def _adapters(subject: Subject, draft: Draft) -> None:
    draft.carry(subject, (*ADAPTERS, "host_bytes"), TRITON_HOST_BYTES if truth(subject) else 0)


def _batching(subject: Subject, draft: Draft) -> None:
    if subject.value not in BATCHING:
        # Scripts look for the first words in the log of a failed server.
        raise SettingsError(
            f"Invalid gpt_model_type: model '{subject.model}': {subject.what} is {subject.value!r} but must be one of"
            f" {', '.join(BATCHING)}"
        )
    if subject.value == "V1":
        _carry_policy(subject, draft, STATIC)
    elif draft.get(POLICY) == STATIC:
        draft.refuse(subject, f"batches of another model are static, {SHARED}")
    else:
        draft.replace(subject, "sequences join and leave at every step")


def _carry_policy(subject: Subject, draft: Draft, policy: str) -> None:
    replaced = (each.value for each in draft.findings if each.outcome is Outcome.REPLACED)
    if policy == STATIC and any(value in IN_FLIGHT for value in replaced):
        draft.refuse(subject, f"batches of another model are in flight, {SHARED}")
    else:
        draft.carry(subject, POLICY, policy)


def _special_tokens(subject: Subject, draft: Draft) -> None:
    """Values other than true and false mean true, as in Triton's models."""
    name = subject.what.removeprefix("parameters.")
    if subject.value.strip().lower() in TRUE | FALSE:
        own(name, truth)(subject, draft)
    else:
        draft.put((*MODELS, subject.model, name), value=True)
        draft.refuse(subject, "it is neither true nor false and counts as true, as in Triton")


def _chunked_context(subject: Subject, draft: Draft) -> None:
    if truth(subject):
        draft.carry(subject, (*TORCH, "batching", "chunked_context"), value=True)
    else:
        # Off, it would refuse prompts longer than a step here, which Triton's engine is built to take.
        draft.replace(subject, "a long prompt takes several steps; its answer is the same")


def _decoding(subject: Subject, draft: Draft) -> None:
    if subject.value in SPECULATIVE:
        draft.refuse(subject, OTHER_DRAFTS)
    else:
        DECODING(subject)
        draft.replace(subject, "each request says how it is decoded")


def _scheduler_policy(subject: Subject, draft: Draft) -> None:
    policy = POLICIES(subject)
    if draft.get(POLICY) != STATIC:
        draft.carry(subject, POLICY, policy)
    elif policy == "max_utilization":
        draft.refuse(subject, "V1 never pauses a sequence")
    else:
        draft.replace(subject, "V1 never pauses a sequence")


def _beam_width(subject: Subject, draft: Draft) -> None:
    width = positive(subject)
    own("max_beam_width", positive)(subject, draft)
    sequences = (*TORCH, "limits", "max_sequences_per_item")
    if width > (draft.get(sequences) or 16):
        draft.put(sequences, width)


def _scheduler(subject: Subject, draft: Draft) -> None:
    _carry_policy(subject, draft, SCHEDULER(subject))


def _windows(subject: Subject, draft: Draft) -> None:
    """A window for all layers, or one for each."""
    try:
        windows = [int(text) for text in subject.value.strip("[] ").split(",")]
    except ValueError:
        raise wrong(subject, "whole numbers separated by commas") from None
    lengths = ModelLengths.of(subject.weights)
    if all(window == lengths.window for window in windows):
        draft.replace(subject, "the model's own config.json has this window")
    elif lengths.longest is not None and min(windows) >= lengths.longest:
        draft.replace(
            subject, f"it changes nothing: no sequence has more than {lengths.longest} tokens"
        )
    else:
        draft.refuse(
            subject,
            f"the windows are those of the model's own config.json; sequences of more than {min(windows)} tokens attend"
            " to more here, as the model was trained",
        )


def _engine_files(subject: Subject, draft: Draft) -> None:
    draft.replace(subject, f"the engine reads the Hugging Face model in {subject.weights}")


def _tokenizer(subject: Subject, draft: Draft) -> None:
    """Compares the tokenizer with the one beside the weights, which the mesh uses."""
    own, weights = Path(subject.value), subject.weights
    try:
        differs = own.is_dir() and tokenizer_fingerprint(own) != tokenizer_fingerprint(weights)
    except (OSError, ModelUnusable) as error:
        raise SettingsError(f"cannot compare {own} with {weights}: {error}") from error
    if differs:
        draft.refuse(
            subject,
            f"the tokenizer beside the weights, in {weights}, differs and is used; copy these files there if they are"
            " right",
        )
    else:
        draft.replace(subject, f"the tokenizer in {weights}, beside the weights")


CORE_PARAMETERS: Mapping[str, Rule] = {
    # Later parameters depend on the first two.
    "gpt_model_type": _batching,
    "batching_strategy": _batching,
    "gpt_model_path": _engine_files,
    "engine_dir": _engine_files,
    "encoder_model_path": unsupported(NO_ENCODER),
    "cross_kv_cache_fraction": unsupported(NO_ENCODER),
    "max_beam_width": _beam_width,
    "decoding_mode": _decoding,
    "batch_scheduler_policy": _scheduler_policy,
    "max_tokens_in_paged_kv_cache": engine("kv_cache.tokens", positive),
    "kv_cache_free_gpu_mem_fraction": _cache_fraction,
    "kv_cache_host_memory_bytes": engine("host_cache.bytes", whole),
    "kv_cache_onboard_blocks": only(truth, value=True, text=BROUGHT_BACK),
    "enable_kv_cache_reuse": engine("kv_cache.prefix_reuse", truth),
    "enable_chunked_context": _chunked_context,
    # Names of v0.5 to v0.7; the window has its present name since v0.7.
    "max_num_sequences": engine("limits.max_batch_size", positive),
    "max_kv_cache_length": _windows,
    "max_attention_window_size": _windows,
    "sink_token_length": only(
        whole, value=0, text="the model attends as it was trained, without sinks"
    ),
    "exclude_input_in_output": own("exclude_input_in_output", truth),
    "normalize_log_probs": own("normalize_log_probs", truth),
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
    "lora_cache_host_memory_bytes": engine("adapters.host_bytes", whole),
    # They turn adapters on, with Triton's default of the bytes.
    "lora_cache_gpu_memory_fraction": with_adapters(replaced(SLOTS)),
    "lora_cache_max_adapter_size": with_adapters(engine("adapters.max_rank", positive)),
    "lora_cache_optimal_adapter_size": with_adapters(replaced(ADAPTER_PAGES)),
    "lora_prefetch_dir": _prefetch,
    "lookahead_window_size": unsupported(OTHER_DRAFTS),
    "lookahead_ngram_size": unsupported(OTHER_DRAFTS),
    "lookahead_verification_set_size": unsupported(OTHER_DRAFTS),
    "medusa_choices": unsupported(OTHER_DRAFTS),
    "eagle_choices": unsupported(OTHER_DRAFTS),
    "speculative_decoding_fast_logits": only(
        truth, value=False, text="there are no drafts", reason=OTHER_DRAFTS
    ),
    "gpu_weights_percent": only(share, value=1.0, text=RESIDENT),
    "enable_context_fmha_fp32_acc": replaced(KERNELS),
    "multi_block_mode": replaced(KERNELS),
    "cuda_graph_mode": replaced(KERNELS),
    "cuda_graph_cache_size": replaced(KERNELS),
    "enable_trt_overlap": replaced(KERNELS),
    "guided_decoding_backend": replaced(GRAMMARS),
    "xgrammar_tokenizer_info_path": replaced(GRAMMARS),
    "tokenizer_dir": replaced("engines have no tokenizer: see the one of preprocessing"),
    "FORCE_CPU_ONLY_INPUT_TENSORS": replaced("inputs never lie on a device"),
}

CORE_DEFAULTS: Mapping[str, Any] = {"normalize_log_probs": True}
"""Triton's defaults, where those of the mesh differ: settings of a model by parameter."""

TEXT_PARAMETERS: Mapping[str, Rule] = {
    "gpt_model_path": _engine_files,
    "engine_dir": _engine_files,
    "tokenizer_dir": _tokenizer,
    "tokenizer_type": replaced(TOKENIZER_FILES),
    "add_special_tokens": _special_tokens,
    "skip_special_tokens": _special_tokens,
    "multimodal_model_path": unsupported(NO_VISION_TOWER),
    "visual_model_path": unsupported(NO_VISION_TOWER),
    "max_num_images": unsupported(NO_VISION_TOWER),
    "hf_model_path": replaced(ITS_OWN_FILES),
}


def _half(role: str, rest: str) -> Rule:
    """The engines of one half of a disaggregated model."""

    def rule(subject: Subject, draft: Draft) -> None:
        if engines := draft.get(("mesh", role)):
            draft.count(subject, f"mesh.{role}: {engines}{rest}")
        else:
            draft.replace(subject, f"{ONE_ENGINE}{rest}")

    return rule


BLS_PARAMETERS: Mapping[str, Rule] = {
    "accumulate_tokens": own("accumulate_tokens", truth),
    "tensorrt_llm_model_name": replaced(
        "the mesh serves it itself; requests count for this model too"
    ),
    DRAFT_MODEL: unsupported(OTHER_DRAFTS),
    "multimodal_encoders_name": unsupported(NO_PICTURES),
}

DISAGGREGATED_PARAMETERS: Mapping[str, Rule] = {
    "context_model_name": _half("prefill", ""),
    "generation_model_name": _half("decode", "; requests count for this model too"),
}

ARGUMENTS: Mapping[str, Rule] = {
    "triton_config.max_batch_size": only(whole, value=0, text=ONE_PROMPT),
    "triton_config.decoupled": own("decoupled", truth),
    "triton_config.cancellation_check_period_ms": replaced(AT_ONCE),
    "triton_config.multimodal": unsupported(NO_PICTURES),
    "logits_post_processors": unsupported(NO_CODE),
    "model": replaced(ITS_OWN_FILES),
    "tokenizer": replaced(ITS_OWN_FILES),
    "tokenizer_mode": replaced(TOKENIZER_FILES),
    "skip_tokenizer_init": replaced("engines have no tokenizer"),
    "trust_remote_code": replaced("no code of a model is loaded"),
    "backend": replaced("the embedded engine computes with PyTorch"),
    "dtype": engine("dtype", DTYPE),
    "tensor_parallel_size": only(whole, value=1, text=ONE_DEVICE),
    "pipeline_parallel_size": only(whole, value=1, text=ONE_DEVICE),
    "context_parallel_size": only(whole, value=1, text=ONE_DEVICE),
    "gpus_per_node": only(whole, value=1, text=ONE_DEVICE),
    "max_batch_size": engine("limits.max_batch_size", positive),
    "max_num_tokens": engine("batching.max_step_tokens", positive),
    "max_seq_len": engine("limits.max_sequence_tokens", whole),
    "enable_chunked_prefill": _chunked_context,
    "scheduler_config.capacity_scheduler_policy": _scheduler,
    "kv_cache_config.enable_block_reuse": engine("kv_cache.prefix_reuse", truth),
    "kv_cache_config.enable_partial_reuse": replaced(
        "the matching part of a cached block is always used"
    ),
    "kv_cache_config.max_tokens": engine("kv_cache.tokens", positive),
    "kv_cache_config.free_gpu_memory_fraction": _cache_fraction,
    "kv_cache_config.host_cache_size": engine("host_cache.bytes", whole),
    "kv_cache_config.secondary_offload_min_priority": only(
        whole,
        value=35,
        text="blocks below the default priority are not kept on the host",
    ),
    "kv_cache_config.tokens_per_block": engine("kv_cache.tokens_per_block", positive),
    "kv_cache_config.max_attention_window": _windows,
    "kv_cache_config.event_buffer_max_size": replaced("changes of the cache are always told"),
    "kv_cache_config.onboard_blocks": only(truth, value=True, text=BROUGHT_BACK),
    "enable_iter_perf_stats": replaced(ALWAYS_COUNTED),
    "enable_iter_req_stats": replaced(ALWAYS_COUNTED),
    "return_perf_metrics": replaced(ALWAYS_COUNTED),
    "cuda_graph_config": replaced(KERNELS),
    "attn_backend": replaced(KERNELS),
    "torch_compile_config": replaced(KERNELS),
    "disable_overlap_scheduler": replaced(KERNELS),
    "enable_lora": _adapters,
    "lora_config.max_lora_rank": with_adapters(engine("adapters.max_rank", positive)),
    "lora_config.max_loras": with_adapters(engine("adapters.max_batch_adapters", positive)),
    "lora_config.max_cpu_loras": with_adapters(replaced(BY_BYTES)),
    "lora_config.lora_target_modules": with_adapters(replaced(ANY_LAYER)),
    "lora_config.trtllm_modules_to_hf_modules": with_adapters(replaced(ANY_LAYER)),
    "lora_config.lora_dir": unsupported(NOT_AT_START),
    "lora_config.lora_ckpt_source": only(
        one_of("hf", "nemo"),
        value="hf",
        text="adapters are directories of PEFT or of TensorRT-LLM's arrays",
    ),
    "speculative_config": unsupported(OTHER_DRAFTS),
    "guided_decoding_backend": replaced(GRAMMARS),
}


def arguments_of(arguments: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The arguments as text, by dotted name; mappings with a rule stay whole."""
    for key, value in arguments.items():
        name = prefix + str(key)
        if (
            isinstance(value, dict)
            and value
            and any(rule.startswith(name + ".") for rule in ARGUMENTS)
        ):
            yield from arguments_of(value, name + ".")
        else:
            yield name, "" if value is None else str(value)
