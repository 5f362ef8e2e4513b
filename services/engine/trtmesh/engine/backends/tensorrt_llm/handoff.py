"""Handoff by the library's own transfer of KV: a state is its DisaggregatedParams, field by field.

A field that the receiving release lacks is dropped, so that workers of different releases understand each other's
states; whether they pair is said by `kind_of`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from trtmesh.chassis.errors import HandoffFailed
from trtmesh.chassis.json_text import load_json
from trtmesh.engine.backend import MAX_STATE_BYTES, HandoffState, StateKind
from trtmesh.engine.backends.tensorrt_llm.library import Library
from trtmesh.engine.backends.tensorrt_llm.settings import TensorRtLlmSettings

CONTEXT_ONLY = "context_only"
GENERATION_ONLY = "generation_only"

REQUEST_ID_DIGITS = 15
"""Hexadecimal digits of a lease that name the request on both workers: below 2**63, and equal at each attempt."""


def kind_of(settings: TensorRtLlmSettings, library: Library) -> StateKind | None:
    """What two workers must have in common; None without a transfer."""
    if not settings.hands_over:
        return None
    same = {
        "release": library.release,
        "flow": settings.flow,
        "backend": settings.option("cache_transceiver_config", "backend"),
        "runtime": settings.option("cache_transceiver_config", "transceiver_runtime") or "",
        "dtype": settings.option("dtype") or "auto",
        "kv_dtype": settings.option("kv_cache_config", "dtype") or "auto",
        "tokens_per_block": settings.tokens_per_block,
        "tensor": settings.parallel.tensor,
        "pipeline": settings.parallel.pipeline,
        "attention_data": settings.option("enable_attention_dp") or False,
    }
    return StateKind("trtllm", json.dumps(same, sort_keys=True))


def context_params(lease_id: str, library: Library) -> Any:
    """Asks for the prompt alone."""
    values: dict[str, Any] = {"request_type": CONTEXT_ONLY}
    if "disagg_request_id" in library.handoff_arguments:
        values["disagg_request_id"] = int(lease_id[:REQUEST_ID_DIGITS], 16)
    return library.handoff(**values)


def state_of(params: Any, library: Library, seconds: float) -> HandoffState:
    """What the other worker needs, from the result of the prompt. Raises HandoffFailed."""
    if params is None or params.opaque_state is None:
        raise HandoffFailed("the library returned no state of the prompt's KV")
    fields = {}
    for name in sorted(library.handoff_arguments):
        value = getattr(params, name)
        if isinstance(value, bytes):
            fields[name] = {"base64": base64.b64encode(value).decode()}
        elif value is not None and _is_plain(value):
            fields[name] = value
    content = json.dumps(fields).encode()
    if len(content) > MAX_STATE_BYTES:
        raise HandoffFailed(
            f"the library's state takes {len(content)} bytes, more than {MAX_STATE_BYTES}"
        )
    return HandoffState(content, seconds)


def generation_params(content: bytes, first_token: int, library: Library) -> Any:
    """Continues from a state with the token that its worker chose. Raises HandoffFailed."""
    try:
        given = load_json(content)
        fields = {name: _value(value) for name, value in given.items()}
        known = {name: fields[name] for name in fields.keys() & library.handoff_arguments}
        known |= {"request_type": GENERATION_ONLY, "first_gen_tokens": [first_token]}
        return library.handoff(**known)
    except (ValueError, TypeError, AttributeError) as error:
        raise HandoffFailed(f"the state is not one of this library: {error}") from error


def _is_plain(value: object) -> bool:
    """Whether JSON holds it. Logits and log-probabilities of the first token are objects: its worker has told them."""
    if isinstance(value, list):
        return all(type(each) is int for each in value)
    return type(value) in (bool, int, float, str)


def _value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return base64.b64decode(value["base64"], validate=True)
    return value
