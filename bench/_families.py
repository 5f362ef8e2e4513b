"""Random-weight models of transformers' families, each of about a billion parameters, or fewer layers of more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from _models import save_model, save_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 32768
SHAPE: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
GEMMA = {**SHAPE, "query_pre_attn_scalar": 64}
MIXTURE = {**SHAPE, "intermediate_size": 4096, "num_hidden_layers": 8, "num_experts_per_tok": 2}
WITHOUT_HEAD_DIM = {name: value for name, value in SHAPE.items() if name != "head_dim"}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 32,
}
"""In place of the same fields, to show that everything runs."""
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SHAPE),
    "mistral": ("mistral", SHAPE),
    "qwen2": ("qwen2", WITHOUT_HEAD_DIM),
    "qwen3": ("qwen3", SHAPE),
    "phi3": ("phi3", {**WITHOUT_HEAD_DIM, "sliding_window": None}),
    "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3_text", GEMMA),
    "mixtral": ("mixtral", {**MIXTURE, "num_local_experts": 8}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            **MIXTURE,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "mlp_only_layers": [],
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {**MIXTURE, "intermediate_size": 1024, "num_local_experts": 32, "num_experts_per_tok": 4},
    ),
}
"""Model type and configuration."""


def build_family(
    folder: Path, name: str, dtype: torch.dtype, device: str, positions: int, *, tiny: bool
) -> dict[str, int]:
    """Saves a model, and returns the bytes that a step reads: `weights` of every token, `experts` all together with
    their number, how many a token chooses, and the KV of a token."""
    model_type, values = FAMILIES[name]
    values = {key: TINY.get(key, value) if tiny else value for key, value in values.items()}
    size = 320 if tiny else VOCABULARY
    common = {
        "vocab_size": size,
        "max_position_embeddings": positions,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "tie_word_embeddings": False,
    }
    config = AutoConfig.for_model(model_type, **{**common, **values})
    torch.manual_seed(0)
    loader: Any = AutoModelForCausalLM
    with torch.device(device):
        model = loader.from_config(config, dtype=dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    save_model(model, folder, dtype)
    save_tokenizer(folder, size)
    sizes = {
        key: each.nbytes for key, each in model.named_parameters() if "embed_tokens" not in key
    }
    experts = sum(size for key, size in sizes.items() if "experts" in key)
    heads = config.num_key_value_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    return {
        "weights": sum(sizes.values()) - experts,
        "experts": experts,
        "count": getattr(config, "num_local_experts", getattr(config, "num_experts", 1)) or 1,
        "chosen": getattr(config, "num_experts_per_tok", 1) or 1,
        "kv": config.num_hidden_layers * 2 * heads * dtype.itemsize,
    }


def family_step_bytes(sizes: dict[str, int], rows: int, kv_tokens: int) -> float:
    """What a decode step reads: with random tokens, an expert remains unread where none of the rows chooses it."""
    read = 1 - (1 - sizes["chosen"] / sizes["count"]) ** rows
    return sizes["weights"] + sizes["experts"] * read + sizes["kv"] * kv_tokens
