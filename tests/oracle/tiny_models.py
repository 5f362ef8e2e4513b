"""Tiny real models with random weights, saved as model directories with a small tokenizer.

The weights are drawn wide enough that the most likely token stands clear of the next, so rounding cannot decide.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY_SIZE = 320
END_ID = 0
PAD_ID = 1
POSITIONS = 512
WEIGHT_STD = 0.15
WINDOW = 8

SHAPE: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
GEMMA: Mapping[str, Any] = {**SHAPE, "query_pre_attn_scalar": 16, "sliding_window": WINDOW}
MOE: Mapping[str, Any] = {**SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2}
WITHOUT_HEAD_DIM = {key: value for key, value in SHAPE.items() if key != "head_dim"}
FULL_AND_SLIDING = ["sliding_attention", "full_attention"]

FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", SHAPE),
    "qwen2": ("qwen2", WITHOUT_HEAD_DIM),
    "qwen3": ("qwen3", SHAPE),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}),
    "mistral": ("mistral", {**SHAPE, "sliding_window": WINDOW}),
    "gemma2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 5.0}),
    "gemma3": ("gemma3_text", {**GEMMA, "layer_types": FULL_AND_SLIDING}),
    "phi": ("phi", {**WITHOUT_HEAD_DIM, "num_key_value_heads": 4}),
    "phi3": ("phi3", {**WITHOUT_HEAD_DIM, "sliding_window": None}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            **SHAPE,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 96,
            "mlp_only_layers": [],
        },
    ),
    "mixtral": ("mixtral", {**MOE, "sliding_window": None}),
    "gpt_oss": (
        "gpt_oss",
        {**MOE, "sliding_window": WINDOW, "layer_types": FULL_AND_SLIDING, "rope_parameters": None},
    ),
}
"""Model type and configuration by family."""

CORPUS = (
    "The quick brown fox jumps over the lazy dog. The dog does not mind; it is not quick.",
    "A request is cut into tokens, the tokens go to an engine, and text comes back as they do.",
)


def build(folder: Path, family: str = "llama", *, seed: int = 0, **changes: Any) -> Path:
    """Saves a model of `family` and a tokenizer in `folder`; `changes` override the configuration."""
    model_type, shape = FAMILIES[family]
    build_type(folder, model_type, seed=seed, **{**shape, **changes})
    return folder


def build_type(folder: Path, model_type: str, *, seed: int = 0, **values: Any) -> Path:
    """The same for any causal language model of transformers."""
    common = {
        "vocab_size": VOCABULARY_SIZE,
        "max_position_embeddings": POSITIONS,
        "initializer_range": WEIGHT_STD,
        "bos_token_id": END_ID,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
        "tie_word_embeddings": False,
    }
    given = {key: value for key, value in {**common, **values}.items() if value is not None}
    config = AutoConfig.for_model(model_type, **given)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        loader: Any = AutoModelForCausalLM
        model: PreTrainedModel = loader.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=WEIGHT_STD)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer like GPT-2's, Llama 3's and Qwen's, with at most VOCABULARY_SIZE ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def reference_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model as transformers runs it."""
    loader: Any = AutoModelForCausalLM
    model: PreTrainedModel = loader.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    torch.nn.Module.eval(model)
    return model


def greedy(model: PreTrainedModel, prompt: list[int], count: int, **arguments: Any) -> list[int]:
    """The ids of `generate` for `prompt` alone: at most `count`, an end id included."""
    ids = torch.tensor([prompt])
    generate: Any = model.generate
    arguments = {"eos_token_id": None, "pad_token_id": PAD_ID, **arguments}
    with torch.inference_mode():
        output = generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            **arguments,
        )
    generated: list[int] = output[0, len(prompt) :].tolist()
    return generated


def likeliest(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> list[int]:
    """The likeliest id at the place of each of `tokens`, after those before it. Where these are equal, they are the ids
    of `greedy`, by one forward."""
    forward: Any = model.forward
    with torch.inference_mode():
        logits = forward(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
    chosen: list[int] = logits[len(prompt) - 1 : -1].argmax(1).tolist()
    return chosen


def prompts(
    count: int, *, vocabulary_size: int = VOCABULARY_SIZE, seed: int = 1
) -> list[list[int]]:
    """Prompts of 1 to 40 random ids without special ids."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, 33, 5, 16, 17]
    lengths += torch.randint(1, 41, (max(0, count - 5),), generator=generator).tolist()
    return [
        torch.randint(2, vocabulary_size, (length,), generator=generator).tolist()
        for length in lengths[:count]
    ]
