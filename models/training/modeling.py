"""The two architectures, and how a trained model is written."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 6144
POSITIONS = 2048
HEAD_DIM = 64


def config(name: str) -> LlamaConfig:
    """`demo` (13.8M parameters) or `draft` (1.8M)."""
    sizes = {
        "demo": {"hidden": 384, "mlp": 896, "layers": 8, "heads": 6, "kv": 2},
        "draft": {"hidden": 192, "mlp": 384, "layers": 2, "heads": 3, "kv": 1},
    }[name]
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["mlp"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv"],
        head_dim=HEAD_DIM,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
        attn_implementation="sdpa",
    )


def build(name: str, seed: int) -> LlamaForCausalLM:
    """A float32 model with freshly drawn weights; output projections are scaled by depth."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config(name))
    scale = (2 * model.config.num_hidden_layers) ** -0.5
    for key, parameter in model.named_parameters():
        if key.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.mul_(scale)
    return model


def parameter_count(model: torch.nn.Module) -> int:
    """Tied embeddings count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def save(model: LlamaForCausalLM, folder: Path, shard: str = "64MB") -> None:
    """Writes config.json, generation_config.json and bfloat16 safetensors in shards of `shard`."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(folder, max_shard_size=shard)


def load(folder: Path, device: str, dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    """A model for inference, in `dtype`, that attends through fused SDPA."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    return model.to(device).eval()


if __name__ == "__main__":
    for name, folder in (("demo", "demo"), ("draft", "demo-draft")):
        model = build(name, seed=0)
        print(name, parameter_count(model))
        save(model, Path(__file__).parents[1] / folder)
