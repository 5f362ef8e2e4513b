"""Random-weight Llama models of a given size, as directories for transformers and as files for llama.cpp."""

from __future__ import annotations

import importlib
import importlib.util
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

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
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
}
POSITIONS = 4096
WEIGHT_STD = 0.15
"""Wide enough that the most likely token of a random model stands clear of the next."""
GGUF_TYPES = {"float32": "F32", "bfloat16": "BF16"}
SAFETENSORS_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
STAGING_BYTES = 2**28
SHARED_MEMORY = Path("/dev/shm")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def build(
    folder: Path,
    name: str,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    positions: int = POSITIONS,
) -> Path:
    """Saves the model `name` of SHAPES, with weights drawn on `device`; the same weights every time."""
    config = LlamaConfig(
        **SHAPES[name],
        max_position_embeddings=positions,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    torch.nn.Module.to(model, dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=WEIGHT_STD)
    save_model(model, folder, dtype)
    return folder


ZEROED = tuple(
    f"{name}.weight" for name in ("k_proj", "o_proj", "down_proj", "norm", "embed_tokens")
)
"""Weights by which a wider model multiplies what is added."""


def widen(folder: Path, source: Path, name: str, dtype: torch.dtype, device: str = "cpu") -> Path:
    """Saves the model in `source`, of the Llama kind, in the shape `name`: with its own tokens, since what is added is
    multiplied by zero, and the times of the shape. Keeps vocabulary and positions."""
    own = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    small: Any = own.config
    sizes = {
        key: SHAPES[name][key]
        for key in SHAPES[name]
        if key not in ("vocab_size", "tie_word_embeddings")
    }
    share = small.hidden_size / sizes["hidden_size"]
    changes = {**small.to_dict(), **sizes, "rms_norm_eps": small.rms_norm_eps * share}
    torch.manual_seed(0)
    with torch.device(device):
        wide = LlamaForCausalLM(LlamaConfig(**changes))
    model: Any = wide
    group = sizes["num_attention_heads"] // sizes["num_key_value_heads"]
    own_group = small.num_attention_heads // small.num_key_value_heads
    heads = torch.arange(small.num_attention_heads)
    spots = heads // own_group * group + heads % own_group
    # A dimension of a head goes where a wider head has its frequency.
    size, spread = sizes["head_dim"], sizes["head_dim"] // small.head_dim
    halves = torch.arange(2)[:, None] * (size // 2) + torch.arange(0, size // 2, spread)
    queries = (spots[:, None] * size + halves.flatten()).flatten()
    keys = (torch.arange(small.num_key_value_heads)[:, None] * size + halves.flatten()).flatten()
    for key, weight in own.state_dict().items():
        given = weight * share**0.5 if "norm" in key else weight
        if key.endswith("q_proj.weight"):
            # Products are divided by the root of the head's size.
            given = given * spread**0.5
        kept = model.get_parameter(key).data
        if key.endswith(ZEROED):
            kept.zero_()
        rows = torch.arange(len(given))
        if key.endswith("q_proj.weight"):
            rows = queries
        elif key.endswith(("k_proj.weight", "v_proj.weight")):
            rows = keys
        given = given.to(kept)
        if given.dim() == 1:
            kept[: len(given)] = given
            continue
        columns = queries if key.endswith("o_proj.weight") else torch.arange(given.shape[1])
        kept[rows.to(device)[:, None], columns.to(device)] = given
    for layer in model.model.layers[small.num_hidden_layers :]:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    torch.nn.Module.to(wide, dtype)
    save_model(wide, folder, dtype)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / file, folder / file)
    return folder


def save_model(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """Writes the files of `save_pretrained`. It would hold the weights twice in host memory first, which takes a
    minute for 16 GB from a GPU."""
    config: Any = model.config
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    generation: Any = model.generation_config
    generation.save_pretrained(folder)
    tensors = dict(model.state_dict())
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[key] = {
            "dtype": SAFETENSORS_TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    largest = max(tensor.nbytes for tensor in tensors.values())
    staging = torch.empty(
        min(largest, STAGING_BYTES), dtype=torch.uint8, pin_memory=model.device.type == "cuda"
    )
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            for part in tensor.contiguous().view(-1).view(torch.uint8).split(len(staging)):
                staged = staging[: len(part)].copy_(part)
                file.write(staged.numpy().data)


def save_tokenizer(folder: Path, vocabulary_size: int) -> None:
    """Saves a tokenizer whose ids are bytes, one for each byte of a text, and then words, which no text becomes."""
    dice = random.Random(0)
    vocabulary = {"<end>": 0, "<pad>": 1}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    while len(vocabulary) < vocabulary_size:
        word = "".join(dice.choices(LETTERS, k=dice.randint(3, 8)))
        vocabulary.setdefault(word, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def quick_folder(names: Sequence[str], dtype: torch.dtype) -> Path | None:
    """Shared memory where it has room for these models of SHAPES, else None."""
    needed = sum(weights(SHAPES[name]) for name in names) * dtype.itemsize
    if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 1.2 * needed:
        return SHARED_MEMORY
    return None


def layer_weights(shape: dict[str, Any]) -> int:
    """The weights of a layer's products."""
    hidden, inner, size = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    return int(hidden * size * (2 * heads + 2 * kv_heads) + 3 * hidden * inner)


def weights(shape: dict[str, Any]) -> int:
    """The weights of a model, but those of its norms."""
    tables = 1 if shape["tie_word_embeddings"] else 2
    embeddings = tables * shape["vocab_size"] * shape["hidden_size"]
    return int(shape["num_hidden_layers"] * layer_weights(shape) + embeddings)


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
