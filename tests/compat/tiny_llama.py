"""A computed model with a tokenizer like Llama 2's."""

from __future__ import annotations

from pathlib import Path

from oracle import tiny_models
from tokenizer.tokenizers_zoo import ids_of, llama2_bpe, save_model_dir

TOKENIZER = llama2_bpe()
BEGIN, END, PAD = ids_of(TOKENIZER, "<s>", "</s>", "<pad>")
VOCABULARY_SIZE = TOKENIZER.get_vocab_size()
WIDTH = int(tiny_models.SHAPE["hidden_size"])


def build(folder: Path) -> Path:
    ids = {"bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PAD}
    tiny_models.build(folder, "llama", vocab_size=VOCABULARY_SIZE, **ids)
    return save_model_dir(TOKENIZER, folder)


def engine_flags(folder: Path) -> tuple[str, ...]:
    return (
        *("--model-dir", str(folder), "--torch-dtype", "float32", "--torch-threads", "1"),
        *("--torch-kv-cache-tokens", "4096"),
    )
