"""The linear layers of a model with layers like Llama's, from its configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtmesh.chassis.errors import UnsupportedField
from trtmesh.engine.adapters.lora import Module, Place, Target

NAMES: Mapping[Module, str] = {
    Module.ATTN_Q: "self_attn.q_proj",
    Module.ATTN_K: "self_attn.k_proj",
    Module.ATTN_V: "self_attn.v_proj",
    Module.ATTN_DENSE: "self_attn.o_proj",
    Module.MLP_H_TO_4H: "mlp.gate_proj",
    Module.MLP_GATE: "mlp.up_proj",
    Module.MLP_4H_TO_H: "mlp.down_proj",
}

KNOWN = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "granite")
"""Model types with these layers under these names."""


def targets_of(config: Mapping[str, Any]) -> dict[Place, Target]:
    """Raises UnsupportedField for a model type whose layers are unknown here."""
    kind = config.get("model_type")
    if kind not in KNOWN:
        raise UnsupportedField(
            f"is for a model of type {kind}, whose layers have names unknown here; convert the adapter to PEFT's format"
            " (trtmesh adapters convert)",
            field="adapter.format",
        )
    sizes = _sizes(config)
    return {
        (layer, module): Target(inputs, (outputs,))
        for layer in range(config["num_hidden_layers"])
        for module, (inputs, outputs) in sizes.items()
    }


def names_of(config: Mapping[str, Any]) -> dict[Place, str]:
    """The layers as checkpoints name them."""
    return {
        (layer, module): f"model.layers.{layer}.{name}"
        for layer in range(config["num_hidden_layers"])
        for module, name in NAMES.items()
    }


def _sizes(config: Mapping[str, Any]) -> dict[Module, tuple[int, int]]:
    """Inputs and outputs of each kind of layer."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    queries, keys = heads * head, (config.get("num_key_value_heads") or heads) * head
    wide = config["intermediate_size"]
    return {
        Module.ATTN_Q: (hidden, queries),
        Module.ATTN_K: (hidden, keys),
        Module.ATTN_V: (hidden, keys),
        Module.ATTN_DENSE: (queries, hidden),
        Module.MLP_H_TO_4H: (hidden, wide),
        Module.MLP_GATE: (hidden, wide),
        Module.MLP_4H_TO_H: (wide, hidden),
    }
