"""Other values of constants: a test cannot wait as long, or fill as much, as what operators have.

`python process_constants.py CONSTANTS MODULE ARGUMENT...` runs a module as `python -m` would, with the constants of a
JSON mapping.
"""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

Constants = Mapping[str, float]
"""Values by MODULE:NAME."""

FLAG = "--constant"

PLACES = {
    "max_logits_bytes": "trtmesh.engine.admission:MAX_LOGITS_BYTES",
    "max_prompt_table_bytes": "trtmesh.engine.backends.torch.model.prompt_tables:MAX_PROMPT_TABLE_BYTES",
    "step_gap_seconds": "trtmesh.engine.service.engine_service:STEP_GAP_SECONDS",
    "layers_per_part": "trtmesh.engine.backends.torch.loading:LAYERS_PER_PART",
    "unread_answer_seconds": "trtmesh.engine.gateways.trtllm.servicer:UNREAD_SECONDS",
    "max_json_bytes": "trtmesh.router.doors.http.port:MAX_JSON_BYTES",
    "max_adapter_bytes": "trtmesh.chassis.adapter_content:MAX_ADAPTER_BYTES",
    "adapter_load_seconds": "trtmesh.router.adapters.contents:LOAD_SECONDS",
    "delivery_seconds": "trtmesh.router.fleet.deliveries:DELIVERY_SECONDS",
    "resolve_seconds": "trtmesh.router.fleet.discovery:RESOLVE_SECONDS",
    "explained_decisions": "trtmesh.router.fleet.fleet:EXPLAINED_DECISIONS",
    "lease_seconds": "trtmesh.router.handoffs.live_handoff:LEASE_SECONDS",
    "client_lease_seconds": "trtmesh.router.handoffs.live_handoff:CLIENT_LEASE_SECONDS",
    "handoff_reserve_seconds": "trtmesh.router.handoffs.live_handoff:RESERVE_SECONDS",
    "handoff_prefill_seconds": "trtmesh.router.handoffs.live_handoff:PREFILL_SECONDS",
    "handoff_transfer_seconds": "trtmesh.router.handoffs.live_handoff:TRANSFER_SECONDS",
    "max_parked": "trtmesh.router.handoffs.table:MAX_PARKED",
    "max_lost_workers": "trtmesh.router.requests.placer:MAX_LOST_WORKERS",
    "siblings_together": "trtmesh.router.requests.siblings:MAX_TOGETHER",
    "sibling_wait_seconds": "trtmesh.router.requests.siblings:WAIT_SECONDS",
    "buffer_tokens": "trtmesh.router.streams.client_stream:BUFFER_TOKENS",
    "buffer_bytes": "trtmesh.router.streams.client_stream:BUFFER_BYTES",
    "client_unread_seconds": "trtmesh.router.streams.client_stream:UNREAD_SECONDS",
    "max_lost_tokenizers": "trtmesh.router.tokenizers.pool:MAX_LOST_TOKENIZERS",
    "tokenizer_wait_seconds": "trtmesh.router.tokenizers.pool:WAIT_SECONDS",
    "decode_seconds": "trtmesh.router.tokenizers.tokenizer:DECODE_SECONDS",
    "encode_seconds": "trtmesh.router.tokenizers.tokenizer:ENCODE_SECONDS",
    "max_line_file_bytes": "trtmesh.router.line_file:MAX_BYTES",
    "warmup_tokens": "trtmesh.tools.bench.upstream.core:WARMUP_TOKENS",
}
"""The module that defines a constant and alone reads it."""


def constants(**values: float) -> tuple[str, ...]:
    """Returns flags of `service_process` that give constants of PLACES these values."""
    return tuple(
        part
        for name, value in values.items()
        for part in (FLAG, f"{PLACES[name]}={json.dumps(value)}")
    )


def parted(flags: Sequence[str]) -> tuple[tuple[str, ...], Constants]:
    """Returns the flags that a service has, and the constants among `flags`; the last value of each counts."""
    own: list[str] = []
    found = {}
    rest = iter(flags)
    for flag in rest:
        if flag == FLAG:
            place, _, value = next(rest).partition("=")
            found[place] = json.loads(value)
        else:
            own.append(flag)
    return tuple(own), found


def patch(patching: pytest.MonkeyPatch, **values: float) -> None:
    """Gives constants of PLACES these values in this process."""
    set_constants({PLACES[name]: value for name, value in values.items()}, patching.setattr)


def set_constants(
    values: Constants, change: Callable[[object, str, object], None] = setattr
) -> None:
    """Gives constants other values."""
    for place, value in values.items():
        module, _, name = place.partition(":")
        owner = importlib.import_module(module)
        assert isinstance(getattr(owner, name), int | float), f"{place} is no number"
        change(owner, name, value)


if __name__ == "__main__":
    set_constants(json.loads(sys.argv[1]))
    # As `python -m` has it.
    sys.path[0] = str(Path.cwd())
    module, sys.argv[1:] = sys.argv[2], sys.argv[3:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
