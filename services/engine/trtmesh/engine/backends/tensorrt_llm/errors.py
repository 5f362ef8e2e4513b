"""Translates errors of the library into those of the mesh."""

from __future__ import annotations

from trtmesh.chassis.errors import (
    BackendFailed,
    Exhausted,
    HandoffFailed,
    InvalidField,
    InvalidRequest,
    PromptTooLong,
    TrtmeshError,
    WorkerLost,
)
from trtmesh.engine.backends.tensorrt_llm.library import Library

_BY_WORDS: tuple[tuple[tuple[str, ...], type[TrtmeshError], str], ...] = (
    (("beam width",), InvalidField, "beam_search.beam_width"),
    (("max_num_tokens",), PromptTooLong, "prompt"),
    (("prompt length",), PromptTooLong, "prompt"),
    (("lora",), InvalidField, "lora.id"),
    (("kv_cache_transceiver", "cache transceiver", "context phase"), HandoffFailed, ""),
    (("out of memory", "not enough", "insufficient", "resource"), Exhausted, ""),
)
"""Class and field by words of the message, in lower case: the library has one class for all errors of requests."""


def of_request(error: Exception, library: Library) -> TrtmeshError:
    """What ends one item."""
    if isinstance(error, TrtmeshError):
        return error
    text = f"TensorRT-LLM: {error}"
    if isinstance(error, library.request_error):
        lower = str(error).lower()
        for words, kind, field in _BY_WORDS:
            if any(word in lower for word in words):
                return kind(f"is refused by {text}" if field else text, field=field)
        return InvalidRequest(text)
    if isinstance(error, TypeError | ValueError):
        return InvalidRequest(text)
    if library.means_death(error) or "shutting down" in str(error).lower():
        return WorkerLost(text)
    return BackendFailed(f"TensorRT-LLM: {type(error).__name__}: {error}")
