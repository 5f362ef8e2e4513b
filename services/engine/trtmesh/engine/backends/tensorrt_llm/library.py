"""The installed TensorRT-LLM: names, and the features of the release. No other file imports the library.

Releases differ in names, so each release is asked for names; the version is only ever shown to people.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

from trtmesh.chassis.errors import ModelUnusable, SettingsError

SECTION = "engine.tensorrt_llm"

NESTED: Mapping[str, str] = {
    "KvCacheConfig": "kv_cache_config",
    "SchedulerConfig": "scheduler_config",
    "LoraConfig": "lora_config",
    "PeftCacheConfig": "peft_cache_config",
    "CacheTransceiverConfig": "cache_transceiver_config",
    "NGramDecodingConfig": "speculative_config",
    "MTPDecodingConfig": "speculative_config",
    "Eagle3DecodingConfig": "speculative_config",
    "EagleDecodingConfig": "speculative_config",
    "DraftTargetDecodingConfig": "speculative_config",
}
"""Classes of configurations, with the constructor's argument for each."""

CONSTRUCTOR = "LLM"


@dataclass(frozen=True, slots=True)
class Given:
    """An argument of the constructor, or of a configuration there, and the setting behind the value."""

    of: str
    name: str
    value: object
    setting: str
    """Below `engine.tensorrt_llm`."""


class Library:
    """One flow of the installed release."""

    def __init__(self, flow: str) -> None:
        """Imports the library, in tens of seconds. Raises SettingsError without it, or without the flow."""
        try:
            import tensorrt_llm
            from tensorrt_llm import executor, llmapi
            from tensorrt_llm.executor import request, utils
            from tensorrt_llm.llmapi import llm_args
        except ImportError as error:
            raise SettingsError(
                f"is tensorrt_llm, but the library cannot be imported ({error}): install it on a machine with its GPU"
                " (pip install 'trtmesh[tensorrt-llm]' with NVIDIA's index), or use its image",
                setting="engine.backend",
            ) from error
        self.release: str = tensorrt_llm.__version__
        self.flow = flow
        self._homes = (llmapi, llm_args, request, utils, executor)
        self._llm, self._arguments = self._flow_of(tensorrt_llm)
        self._sampling: Any = tensorrt_llm.SamplingParams
        self.request_error: type[Exception] = self._named("RequestError")

    def _flow_of(self, package: Any) -> tuple[Any, Any]:
        """The constructor and the class of its arguments."""
        if self.flow == "pytorch":
            return package.LLM, self._named("TorchLlmArgs")
        try:
            from tensorrt_llm._tensorrt_engine import LLM
        except ImportError as error:
            raise SettingsError(
                f"is set, but TensorRT-LLM {self.release} runs no built engines; leave it out, or use a release 1.2",
                setting=f"{SECTION}.engine_dir",
            ) from error
        return LLM, self._named("TrtLlmArgs")

    def _find(self, name: str) -> Any:
        return next((found for home in self._homes if (found := getattr(home, name, None))), None)

    def _named(self, name: str) -> Any:
        found = self._find(name)
        if found is None:
            raise ModelUnusable(
                f"TensorRT-LLM {self.release} has no {name}, which this worker needs"
            )
        return found

    # What the release offers.

    def offers(self, of: str, name: str) -> bool:
        """Whether the constructor or a configuration takes an argument."""
        return name in self._fields(of)

    def has(self, name: str) -> bool:
        """Whether the release has a class."""
        return name == "LoraConfig" or self._find(name) is not None

    @cached_property
    def request_arguments(self) -> frozenset[str]:
        return frozenset(inspect.signature(self._llm.generate_async).parameters)

    @cached_property
    def sampling_arguments(self) -> frozenset[str]:
        return frozenset(field.name for field in dataclasses.fields(self._sampling) if field.init)

    @cached_property
    def handoff_arguments(self) -> frozenset[str]:
        return _fields(self._named("DisaggregatedParams"))

    @cached_property
    def takes_stop_ids(self) -> bool:
        """Whether stop words may be sequences of ids."""
        return _takes_ids(self._sampling(), "stop")

    @cached_property
    def takes_bad_ids(self) -> bool:
        """Whether bad words may be sequences of ids."""
        return _takes_ids(self._sampling(), "bad")

    def _class(self, of: str) -> Any:
        if of == CONSTRUCTOR:
            return self._arguments
        return _lora_config() if of == "LoraConfig" else self._named(of)

    def _fields(self, of: str) -> frozenset[str]:
        return _fields(self._class(of))

    # What the worker makes.

    def construct(self, model: Path, given: Iterable[Given]) -> Any:
        """Loads the model: takes minutes, blocks, and starts processes. Raises SettingsError for a setting unknown to
        the release, and ModelUnusable for a refused model."""
        groups: dict[str, dict[str, Given]] = {CONSTRUCTOR: {}}
        for each in given:
            groups.setdefault(each.of, {})[each.name] = each
        for of, members in groups.items():
            self._check(of, members.values())
        values = {each.name: each.value for each in groups.pop(CONSTRUCTOR).values()}
        for of, members in groups.items():
            values[NESTED[of]] = self._configuration(of, members)
        try:
            return self._llm(model=str(model), skip_tokenizer_init=True, **values)
        except Exception as error:
            # Broad on purpose: the library raises whatever its parts raise.
            raise ModelUnusable(
                f"TensorRT-LLM {self.release} does not load {model}: {type(error).__name__}: {error}"
            ) from error

    def _check(self, of: str, members: Iterable[Given]) -> None:
        for each in members:
            if of != CONSTRUCTOR and not self.has(of):
                missing = of
            elif not self.offers(of, each.name):
                missing = f"{each.name} in {of}"
            elif of != CONSTRUCTOR and not self.offers(CONSTRUCTOR, NESTED[of]):
                missing = NESTED[of]
            else:
                continue
            raise SettingsError(
                f"is set, but TensorRT-LLM {self.release} has no {missing} in the {self.flow} flow; leave it out, or"
                " use another release",
                setting=f"{SECTION}.{each.setting}",
            )

    def _configuration(self, of: str, members: Mapping[str, Given]) -> Any:
        try:
            return self._class(of)(**{name: each.value for name, each in members.items()})
        except (TypeError, ValueError) as error:
            settings = ", ".join(f"{SECTION}.{each.setting}" for each in members.values())
            raise SettingsError(
                f"are refused by TensorRT-LLM {self.release}: {error}", setting=settings
            ) from error

    def sampling(
        self,
        values: Mapping[str, object],
        stop: Iterable[tuple[int, ...]] = (),
        bad: Iterable[tuple[int, ...]] = (),
    ) -> Any:
        """Fresh sampling parameters: the library changes them. `stop` and `bad` are words as ids. Raises ValueError."""
        params = self._sampling(**values)
        for name, words in (("stop", stop), ("bad", bad)):
            if ids := [list(word) for word in words]:
                setattr(params, name, [" ".join(map(str, word)) for word in ids])
                setattr(params, f"_{name}_word_ids", ids)
        return params

    def guide(self, **guide: object) -> Any:
        return self._named("GuidedDecodingParams")(**guide)

    def adapter(self, name: str, number: int, directory: Path) -> Any:
        return self._named("LoRARequest")(name, number, str(directory), "hf")

    def retention(
        self,
        ranges: Iterable[tuple[int, int | None, int, int | None]],
        decode_priority: int,
        decode_duration_ms: int | None,
    ) -> Any:
        """`ranges` are first token, end, priority and milliseconds."""
        config = self._named("KvCacheRetentionConfig")
        return config(
            [
                config.TokenRangeRetentionConfig(start, end, priority, _duration(milliseconds))
                for start, end, priority, milliseconds in ranges
            ],
            decode_priority,
            _duration(decode_duration_ms),
        )

    def handoff(self, **values: object) -> Any:
        return self._named("DisaggregatedParams")(**values)

    # What went wrong.

    def means_death(self, error: BaseException) -> bool:
        """Whether an error means the loss of the model's processes."""
        dead = self._find("EngineDeadError")
        return dead is not None and isinstance(error, dead)


def is_dead(llm: Any) -> bool:
    """Whether a model was shut down, by the owner or after an error of the processes."""
    executor = llm._executor
    if executor is None or executor.is_shutdown():
        return True
    return getattr(executor, "_fatal_error", None) is not None


def capacity_of(llm: Any) -> Mapping[str, Any] | None:
    """The size of the KV cache, in releases that say so."""
    tell: Callable[[], Mapping[str, Any]] | None = getattr(llm, "get_kv_cache_capacity", None)
    return tell() if tell else None


def _takes_ids(params: Any, name: str) -> bool:
    return hasattr(params, f"_{name}_word_ids") and hasattr(params, f"_get_{name}_words")


def _duration(milliseconds: int | None) -> timedelta | None:
    return None if milliseconds is None else timedelta(milliseconds=milliseconds)


def _fields(of: Any) -> frozenset[str]:
    if dataclasses.is_dataclass(of):
        return frozenset(field.name for field in dataclasses.fields(of) if field.init)
    return frozenset(of.model_fields)


def _lora_config() -> Any:
    """The module moved between releases."""
    try:
        from tensorrt_llm.lora_helper import LoraConfig
    except ImportError:
        from tensorrt_llm._torch.peft.lora.config import LoraConfig
    return LoraConfig
