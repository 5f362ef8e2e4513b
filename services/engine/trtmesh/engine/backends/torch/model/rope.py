"""Freezes rotary embeddings with frequencies by the whole batch. `dynamic` and `longrope` choose frequencies by the
largest position of a forward, so a long sequence would change its batch mates. Both get the frequencies of the longest
allowed sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from trtmesh.chassis.errors import ModelUnusable

INDEPENDENT = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
FROZEN = "frozen"


def freeze_rope(model: torch.nn.Module, max_sequence_tokens: int) -> bool:
    """Makes every rotary embedding a function of a token's own position; returns whether none depends on
    `max_sequence_tokens`. Raises ModelUnusable for unknown types."""
    is_independent = True
    for name, module in model.named_modules():
        kind = getattr(module, "rope_type", None)
        if kind is None:
            continue
        kinds = set(kind.values()) if isinstance(kind, dict) else {kind}
        if kinds <= INDEPENDENT:
            continue
        if isinstance(kind, str) and kind in {"dynamic", "longrope"}:
            _freeze(module, kind, max_sequence_tokens)
            is_independent = False
            continue
        raise ModelUnusable(
            f"{name} has the rotary embedding type {sorted(kinds - INDEPENDENT)}, which may couple the"
            f" requests of a batch; known are {sorted(INDEPENDENT)}, dynamic and longrope"
        )
    return is_independent


def _freeze(module: Any, kind: str, max_sequence_tokens: int) -> None:
    if kind == "dynamic":
        original = module.original_max_seq_len
    else:
        original = module.config.rope_parameters["original_max_position_embeddings"]
    length = max(max_sequence_tokens, original) if kind == "dynamic" else max_sequence_tokens
    device = module.inv_freq.device
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, device, seq_len=length)
    module.inv_freq = inv_freq
    module.attention_scaling = scaling
    # Forward updates inv_freq for the types known by name.
    module.rope_type = FROZEN
