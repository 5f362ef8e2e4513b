"""The layers of an adapter, by the names of checkpoints and of the library.

The library skips layers outside its target modules with a warning at most, and would compute another adapter. For a
model with layers like Llama's, the configuration alone gives the linear layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from trtmesh.chassis.adapter_content import AdapterContent
from trtmesh.chassis.errors import InvalidField, UnsupportedField
from trtmesh.chassis.peft_adapter import WEIGHTS, parse_config
from trtmesh.chassis.safetensors_header import read_entries
from trtmesh.engine.adapters.lora import Module, Place, Target

WORDS: Mapping[str, str] = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "qkv_proj": "attn_qkv",
    "o_proj": "attn_dense",
    "gate_proj": "mlp_h_to_4h",
    "up_proj": "mlp_gate",
    "down_proj": "mlp_4h_to_h",
    "gate_up_proj": "mlp_gate_up",
    "w1": "moe_h_to_4h",
    "w2": "moe_4h_to_h",
    "w3": "moe_gate",
    "gate": "moe_router",
    "shared_expert.gate_proj": "shared_expert_h_to_4h",
    "shared_expert.up_proj": "shared_expert_gate",
    "shared_expert.down_proj": "shared_expert_4h_to_h",
    "in_proj": "mamba_in_proj",
    "out_proj": "mamba_out_proj",
    "fc1_latent_proj": "moe_latent_fc1",
    "fc2_latent_proj": "moe_latent_fc2",
}
"""The library's words by the ends of layers' names in checkpoints."""

_KEY = re.compile(r"(?P<layer>.+)\.lora_[AB]\.weight")


def check_peft(content: AdapterContent, modules: Iterable[str] | None) -> None:
    """Raises InvalidField or UnsupportedField for what the library would leave out of an adapter without a word.

    `modules` are those that it computes, None all. A rank_pattern is no matter: it takes the ranks of the tensors.
    """
    config = parse_config(content.config)
    config.check()
    if config.alpha_pattern:
        raise UnsupportedField(
            "is not read by TensorRT-LLM, which scales every layer by lora_alpha; scale the B matrices of these layers"
            " and remove it",
            field="adapter_config.alpha_pattern",
            value=str(config.alpha_pattern)[:200],
        )
    for key in read_entries(content.weights, WEIGHTS):
        found = _KEY.fullmatch(key)
        name = found["layer"] if found else key
        word = _word_of(name) if found else None
        if word is None:
            raise UnsupportedField(
                "is not a layer that TensorRT-LLM can update", field=f"adapter.{name}"[:200]
            )
        check_module(name, word, modules)


def check_module(name: str, word: str, modules: Iterable[str] | None) -> None:
    """Raises InvalidField for a layer outside the modules that the library computes."""
    if modules is not None and word not in modules:
        raise InvalidField.of(
            "adapter layer",
            f"{name} ({word})"[:200],
            f"one of {', '.join(modules)}",
            "options.lora_config.lora_target_modules",
        )


def _word_of(name: str) -> str | None:
    *_, parent, own = ("", *name.split("."))
    return WORDS.get(f"{parent}.{own}", WORDS.get(own))


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
