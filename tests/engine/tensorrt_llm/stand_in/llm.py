"""The constructor and the calls of the LLM API, as strict as the library's."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from tensorrt_llm._stand_in.machine import Executor
from tensorrt_llm._stand_in.results import IterationResult, RequestOutput
from tensorrt_llm._stand_in.strict import CLASSES, RELEASE, SIGNATURES, made, signature_of

CONFIGURATIONS = {
    "kv_cache_config": "KvCacheConfig",
    "scheduler_config": "SchedulerConfig",
    "cache_transceiver_config": "CacheTransceiverConfig",
    "peft_cache_config": "PeftCacheConfig",
    "lora_config": "LoraConfig",
}
POLICIES = {
    "capacity_scheduler_policy": "CapacitySchedulerPolicy",
    "context_chunking_policy": "ContextChunkingPolicy",
}
GENERATE = signature_of(SIGNATURES["functions"]["LLM.generate_async"]["parameters"])


def _off_the_loop(what: str) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise AssertionError(f"{what} blocks for long, but is called on the event loop")


class LLM:
    """The PyTorch flow."""

    flow = "pytorch"
    arguments_class = "TorchLlmArgs"

    def __init__(self, *given: Any, **named: Any) -> None:
        _off_the_loop("the constructor")
        bound = signature_of(CLASSES["LLM"]["parameters"]).bind(*given, **named)
        bound.apply_defaults()
        values = dict(bound.arguments)
        extra = values.pop("kwargs", {})
        self.args = self._checked(values | extra, set(extra))
        self.tokenizer = None
        config = _config(Path(values["model"]))
        arguments = {**values, **extra, "flow": self.flow}
        self._has_tokenizer = not values["skip_tokenizer_init"]
        self._executor: Executor | None = Executor(
            int(config["vocab_size"]), _end_ids(config), arguments
        )
        self._used: list[Any] = []

    def _checked(self, values: dict[str, Any], extra: set[str]) -> Any:
        known = made(self.arguments_class).model_fields
        for name in sorted(extra):
            if name not in known:
                if "TrtLlmArgs" in CLASSES and name in made("TrtLlmArgs").model_fields:
                    raise ValueError(f"{name} is for tensorrt_llm._tensorrt_engine.LLM")
                raise ValueError(f"LLM got invalid argument: {name}")
        for name, kind in CONFIGURATIONS.items():
            if (value := values.get(name)) is not None and not isinstance(value, made(kind)):
                raise TypeError(f"{name} must be a {kind}, not {type(value).__name__}")
        scheduler = values.get("scheduler_config")
        for name, kind in POLICIES.items():
            if (value := getattr(scheduler, name, None)) is not None:
                member = str(value).rpartition(".")[2]
                if member not in CLASSES[kind]["members"]:
                    raise ValueError(f"{name} is {value}, not one of {CLASSES[kind]['members']}")
        transceiver = values.get("cache_transceiver_config")
        backends = (None, "DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI")
        if transceiver is not None and transceiver.backend not in backends:
            raise ValueError(f"backend is {transceiver.backend}")
        return made(self.arguments_class)(**values)

    def generate_async(self, *given: Any, **named: Any) -> RequestOutput:
        bound = GENERATE.bind(*given, **named)
        assert not given, "pass arguments by keyword: their order differs between releases"
        arguments = dict(bound.arguments)
        if self._executor is None or self._executor.is_shutdown():
            raise RuntimeError("LLM is shutting down")
        params = arguments.get("sampling_params") or made("SamplingParams")()
        if not isinstance(params, made("SamplingParams")):
            raise TypeError(f"expected SamplingParams, got {type(params).__name__}")
        assert not any(params is each for each in self._used), "SamplingParams are used again"
        self._used.append(params)
        prompt = self._prompt(arguments["inputs"])
        self._check(params, prompt, arguments)
        self._executor.calls.append(arguments)
        return self._executor.submit(prompt, params, dict(arguments))

    @staticmethod
    def _prompt(inputs: Any) -> list[int]:
        if isinstance(inputs, dict) and "prompt_token_ids" in inputs:
            return list(inputs["prompt_token_ids"])
        if isinstance(inputs, list):
            return list(inputs)
        raise TypeError("inputs have neither a prompt nor prompt_token_ids")

    def _check(self, params: Any, prompt: list[int], arguments: dict[str, Any]) -> None:
        assert self._executor
        given = self._executor.arguments
        if params.end_id is None and not self._has_tokenizer:
            raise ValueError("tokenizer is required to initialize end_id")
        params._get_stop_words()
        params._get_bad_words()
        error = made("RequestError")
        most = self._executor.max_num_tokens
        if not given.get("enable_chunked_prefill") and len(prompt) > most:
            raise error(f"The prompt length ({len(prompt)}) exceeds max_num_tokens ({most})")
        if arguments.get("lora_request") and not given.get("lora_config"):
            raise error("LoRA is not enabled")
        if params.guided_decoding and not given.get("guided_decoding_backend"):
            raise error("guided decoding is not enabled")
        if params.return_generation_logits and not given.get("gather_generation_logits"):
            raise error("gather_generation_logits must be enabled")
        if not RELEASE.startswith("1.2"):
            salt, priority = arguments.get("cache_salt"), arguments.get("priority", 0.5)
            if not isinstance(salt, str | None):
                raise TypeError(f"cache_salt must be a str, not {type(salt).__name__}")
            if salt is not None and len(salt.encode()) > 256:
                raise ValueError("cache_salt is longer than 256 bytes")
            if not 0 <= priority <= 1:
                raise ValueError("priority must be in [0, 1]")

    def get_stats_async(self, timeout: float = 2) -> IterationResult:
        assert self._executor
        return IterationResult(self._executor.rows, timeout)

    def get_kv_cache_events_async(self, timeout: float = 2) -> IterationResult:
        assert self._executor
        assert self._executor.events, "KV Event IterationResult is not properly instantiated"
        return IterationResult(self._executor.events, timeout)

    def shutdown(self) -> None:
        _off_the_loop("shutdown")
        if self._executor:
            self._executor.shutdown()
        self._executor = None


# What `inspect.signature` finds.
setattr(  # noqa: B010 - a function has no such attribute by type
    LLM.generate_async,
    "__signature__",
    signature_of(SIGNATURES["functions"]["LLM.generate_async"]["parameters"], bound=True),
)


class TensorRtEngineLlm(LLM):
    """The flow of built engines."""

    flow = "tensorrt"
    arguments_class = "TrtLlmArgs"


def _config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return config.get("pretrained_config") or config


def _end_ids(config: dict[str, Any]) -> list[int]:
    ids = config.get("eos_token_id")
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


if "LLM.get_kv_cache_capacity" in SIGNATURES["functions"]:

    def _capacity(self: LLM) -> dict[str, int]:
        executor = self._executor
        assert executor
        blocks, size = executor.total_blocks, executor.tokens_per_block
        return {"maxNumBlocks": blocks, "tokensPerBlock": size, "maxNumTokens": blocks * size}

    LLM.get_kv_cache_capacity = _capacity  # type: ignore[attr-defined]  # only where the release has it
