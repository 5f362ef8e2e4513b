"""Random-weight Llama models of a given size, as directories for transformers and as files for llama.cpp."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 320,
        "tie_word_embeddings": False,
    },
    "10M": {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "vocab_size": 8000,
        "tie_word_embeddings": False,
    },
    "100M": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 32000,
        "tie_word_embeddings": True,
    },
}
POSITIONS = 4096
WEIGHT_STD = 0.15
"""Wide enough that the most likely token of a random model stands clear of the next."""
GGUF_TYPES = {"float32": "F32", "bfloat16": "BF16"}


def build(folder: Path, name: str) -> Path:
    """Saves the model `name` of SHAPES in float32; the same weights every time."""
    config = LlamaConfig(
        **SHAPES[name],
        max_position_embeddings=POSITIONS,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=WEIGHT_STD)
    model.save_pretrained(folder)
    return folder


def llama_cpp_is_there() -> bool:
    """Whether llama_cpp and gguf can be imported."""
    return all(importlib.util.find_spec(name) for name in ("llama_cpp", "gguf"))


def write_gguf(file: Path, folder: Path, dtype: str) -> Path:
    """Writes the model of `folder` for llama.cpp, matrices in `dtype`, without a tokenizer."""
    gguf: Any = importlib.import_module("gguf")

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config: Any = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    kind = gguf.GGMLQuantizationType[GGUF_TYPES[dtype]]
    for name, weight in _gguf_tensors(model):
        array = weight.detach().numpy()
        if array.ndim == 1:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _gguf_tensors(model: LlamaForCausalLM) -> list[tuple[str, torch.Tensor]]:
    config: Any = model.config
    named: list[tuple[str, torch.Tensor]] = [
        ("token_embd.weight", model.model.embed_tokens.weight),
        ("output_norm.weight", model.model.norm.weight),
    ]
    if not config.tie_word_embeddings:
        named.append(("output.weight", model.lm_head.weight))
    for number, layer in enumerate(model.model.layers):
        module: Any = layer
        attention, mlp = module.self_attn, module.mlp
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        parts = {
            "attn_norm": module.input_layernorm.weight,
            "attn_q": _interleaved(attention.q_proj.weight, heads),
            "attn_k": _interleaved(attention.k_proj.weight, kv_heads),
            "attn_v": attention.v_proj.weight,
            "attn_output": attention.o_proj.weight,
            "ffn_norm": module.post_attention_layernorm.weight,
            "ffn_gate": mlp.gate_proj.weight,
            "ffn_up": mlp.up_proj.weight,
            "ffn_down": mlp.down_proj.weight,
        }
        named += [(f"blk.{number}.{part}.weight", weight) for part, weight in parts.items()]
    return named


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbouring dimensions of a head, transformers those half a head apart."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns).contiguous()
