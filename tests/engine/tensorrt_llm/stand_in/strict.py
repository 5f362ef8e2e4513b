"""Classes with the names, keywords and defaults of a release, made from its signatures."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, create_model, model_validator

SIGNATURES = json.loads(Path(__file__).with_name("signatures.json").read_text(encoding="utf-8"))
CLASSES: dict[str, dict[str, Any]] = SIGNATURES["classes"]
RELEASE: str = SIGNATURES["release"]
KINDS = {
    "pos": inspect.Parameter.POSITIONAL_OR_KEYWORD,
    "kw": inspect.Parameter.KEYWORD_ONLY,
    "kwargs": inspect.Parameter.VAR_KEYWORD,
}


def publish(module: str, names: dict[str, Any]) -> None:
    """Adds to a module what the release has there."""
    for name, described in CLASSES.items():
        exports = [each.split()[0] for each in described.get("export", "").split(", ") if each]
        if module in (described["module"], *(each.rpartition(".")[0] for each in exports)):
            names[name] = made(name)
    if module == "tensorrt_llm":
        names["__version__"] = RELEASE
    if module == "tensorrt_llm._tensorrt_engine":
        names["LLM"] = made("TensorRtEngineLlm")
    if module == "tensorrt_llm.llmapi":
        # A binding of C++, of which no signature is published; this one is that of its documented uses.
        names["KvCacheRetentionConfig"] = KvCacheRetentionConfig


@cache
def made(name: str) -> Any:
    if name in ("LLM", "TensorRtEngineLlm", "RequestOutput", "IterationResult"):
        from tensorrt_llm._stand_in import llm, results

        return getattr(llm, name, None) or getattr(results, name)
    described = CLASSES[name]
    kind = described["kind"]
    if kind.startswith("dataclass"):
        return _dataclass(name, described)
    if kind.startswith("pydantic"):
        return _model(name, described)
    if kind in ("StrEnum", "IntEnum"):
        return enum.Enum(name, {each: each for each in described["members"]}, type=str)
    if kind == "exception":
        return type(name, (RuntimeError,), {})
    return type(name, (), {})


def signature_of(parameters: list[list[Any]], *, bound: bool = False) -> inspect.Signature:
    """The signature of a function; `bound` adds self."""
    own = [inspect.Parameter("self", KINDS["pos"])] if bound else []
    return inspect.Signature(
        [
            *own,
            *(
                inspect.Parameter(
                    name, KINDS[kind], default=default[0] if default else inspect.Parameter.empty
                )
                for name, kind, *default in parameters
            ),
        ]
    )


def _default(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("<"):
        kind = dict if "dict" in value else list
        return dataclasses.field(default_factory=kind)
    return dataclasses.field(default=value)


def _dataclass(name: str, described: dict[str, Any]) -> Any:
    fields: list[Any] = [
        (each, Any, *([_default(default[0])] if default else []))
        for each, _, *default in described["parameters"]
    ]
    private = described.get("private", [])
    fields += [(each, Any, dataclasses.field(default=None, init=False)) for each in private]
    fields += [
        (each, Any, dataclasses.field(default=0, init=False))
        for each in ("_last_token_ids_len", "_last_logprobs_len")
        if name == "CompletionOutput"
    ]
    behaviour = dict(BEHAVIOUR.get(name, {}))
    kind = described["kind"]
    return dataclasses.make_dataclass(
        name,
        fields,
        namespace=behaviour,
        kw_only="kw_only=True" in kind,
        slots="slots=True" in kind,
    )


def _model(name: str, described: dict[str, Any]) -> Any:
    parents = [made(each) for each in described.get("bases", ()) if each in CLASSES]
    known = described["parameters"]
    # Where its own fields are not published, any are taken.
    extra: Any = "forbid" if known is not None else "allow"
    config = ConfigDict(extra=extra, arbitrary_types_allowed=True, protected_namespaces=())
    base: Any = create_model(f"{name}Base", __config__=config) if not parents else parents[0]
    fields: dict[str, Any] = {
        each: (Any, default[0] if default else ...)
        for each, _, *default in known or ()
        if not each.startswith("_")
    }
    checks: dict[str, Any] = {}
    if name in CHECKS:
        checks["_check"] = model_validator(mode="after")(CHECKS[name])
    model: type[BaseModel] = create_model(name, __base__=base, __validators__=checks, **fields)
    return model


def _needs(*positive: str, given: str = "") -> Callable[[Any], Any]:
    """Refuses a configuration with less than 1 of something, or without something."""

    def check(self: Any) -> Any:
        for name in positive:
            if not (getattr(self, name) or 0) > 0:
                raise ValueError(f"{name} must be > 0")
        if given and not getattr(self, given):
            raise ValueError(f"{given} must be provided")
        return self

    return check


def _check_kv_cache(self: Any) -> Any:
    share = self.free_gpu_memory_fraction
    if share is not None and not 0 <= share <= 1:
        raise ValueError(f"free_gpu_memory_fraction must be in [0, 1], not {share}")
    if self.max_gpu_total_bytes < 0:
        raise ValueError("max_gpu_total_bytes must be non-negative")
    windows = self.max_attention_window
    if windows is not None and not (windows and all(each > 0 for each in windows)):
        raise ValueError("max_attention_window must have positive values")
    return self


def _check_adapter_cache(self: Any) -> Any:
    if self.lora_prefetch_dir is not None:
        raise ValueError("lora_prefetch_dir is not supported")
    return self


CHECKS: dict[str, Callable[[Any], Any]] = {
    "TorchLlmArgs": _needs("stream_interval"),
    "KvCacheConfig": _check_kv_cache,
    "PeftCacheConfig": _check_adapter_cache,
    "NGramDecodingConfig": _needs("max_draft_len", "max_matching_ngram_size"),
    "EagleDecodingConfig": _needs("max_draft_len", given="speculative_model"),
    "DraftTargetDecodingConfig": _needs("max_draft_len", given="speculative_model"),
}
"""What a release's own validation refuses beyond unknown names."""


class KvCacheRetentionConfig:
    """Retention of a request's blocks."""

    class TokenRangeRetentionConfig:
        def __init__(
            self,
            token_start: int,
            token_end: int | None = None,
            priority: int = 35,
            duration_ms: Any = None,
        ) -> None:
            assert duration_ms is None or hasattr(duration_ms, "total_seconds"), "not a timedelta"
            self.token_start, self.token_end = token_start, token_end
            self.priority, self.duration_ms = priority, duration_ms

    def __init__(
        self,
        token_range_retention_configs: list[Any],
        decode_retention_priority: int = 35,
        decode_duration_ms: Any = None,
    ) -> None:
        assert decode_duration_ms is None or hasattr(decode_duration_ms, "total_seconds")
        self.token_range_retention_configs = token_range_retention_configs
        self.decode_retention_priority = decode_retention_priority
        self.decode_duration_ms = decode_duration_ms


def _check_sampling(self: Any) -> None:
    """As `__post_init__` and `_validate` of the library."""
    if self.pad_id is None:
        self.pad_id = self.end_id
    self.best_of = self.best_of or self.n
    if self.embedding_bias is not None:
        import torch

        self.embedding_bias = torch.as_tensor(self.embedding_bias, dtype=torch.float32).clone()
    if self.top_p is not None and not 0 <= self.top_p <= 1:
        raise ValueError(f"require 0 <= top_p <= 1, got top_p={self.top_p}")
    if self.top_k is not None and self.top_k < 0:
        raise ValueError(f"require top_k >= 0, got top_k={self.top_k}")
    if self.temperature is not None and self.temperature < 0:
        raise ValueError(f"require temperature >= 0, got temperature={self.temperature}")
    if self.best_of < self.n:
        raise ValueError(f"best_of ({self.best_of}) cannot be less than n ({self.n})")
    guides = self.guided_decoding
    if guides is not None:
        given = [guides.json, guides.regex, guides.grammar, guides.structural_tag]
        if sum(each is not None for each in given) + bool(guides.json_object) > 1:
            raise ValueError("only one guide can be used")
    if self.best_of > 1 and is_greedy(self) and "TLLM_ALLOW_N_GREEDY_DECODING" not in os.environ:
        raise ValueError("Greedy decoding in the LLM API does not allow multiple returns")


def is_greedy(params: Any) -> bool:
    if params.use_beam_search:
        return False
    unset = params.temperature is None and params.top_p is None and params.top_k is None
    return unset or params.top_k == 1 or params.top_p == 0 or params.temperature == 0


def _words(self: Any, name: str) -> list[list[int]]:
    singles = [[each] for each in getattr(self, f"{name}_token_ids") or ()]
    labels = getattr(self, name)
    if labels is None:
        return singles
    ids = getattr(self, f"_{name}_word_ids", None)
    if ids is None:
        raise RuntimeError(f"{name} word ids are not set: tokenizer required")
    return [*singles, *ids]


def _reasons(self: Any) -> list[tuple[Any, list[int]]]:
    reasons = [*(self.stop_token_ids or ()), *(self.stop or ())]
    return list(zip(reasons, _words(self, "stop"), strict=True))


def _check_adapter(self: Any) -> None:
    if self.lora_ckpt_source not in ("hf", "nemo"):
        raise ValueError(f"lora_ckpt_source must be hf or nemo, not {self.lora_ckpt_source}")
    checks_path = RELEASE.startswith("1.2") and self.lora_path is not None
    # An empty path is no place, although it means the present directory to pathlib.
    if checks_path and not (self.lora_path and Path(self.lora_path).exists()):
        raise ValueError(f"lora_path ({self.lora_path}) does not exist.")


def _check_handoff(self: Any) -> None:
    if self.request_type is not None:
        self.request_type = self.request_type.lower()
        if self.request_type not in ("context_only", "generation_only", "context_and_generation"):
            raise ValueError(f"Unknown request type: {self.request_type}")


BEHAVIOUR: dict[str, dict[str, Any]] = {
    "SamplingParams": {
        "__post_init__": _check_sampling,
        "_get_stop_words": lambda self: _words(self, "stop"),
        "_get_bad_words": lambda self: _words(self, "bad"),
        "_get_stop_reasons_and_words": _reasons,
    },
    "LoRARequest": {
        "__post_init__": _check_adapter,
        "adapter_id": property(lambda self: self.lora_int_id),
        "path": property(lambda self: self.lora_path),
    },
    "DisaggregatedParams": {"__post_init__": _check_handoff},
    "CompletionOutput": {
        "length": property(lambda self: len(self.token_ids)),
        "token_ids_diff": property(lambda self: self.token_ids[self._last_token_ids_len :]),
        "logprobs_diff": property(lambda self: self.logprobs[self._last_logprobs_len :]),
    },
}
