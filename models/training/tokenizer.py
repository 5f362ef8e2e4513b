"""Train the byte-level BPE tokenizer, or encode the corpus with it.

`train` writes `tokenizer.json` and `tokenizer_config.json` into each folder given.  `encode`
writes `train.bin.xz` and `heldout.bin.xz`: little-endian uint16 token ids, every document
followed by `<|endoftext|>`, documents in a seeded random order.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
SPECIAL_TOKENS = [END, "<|pad|>", *(f"<|reserved_{i}|>" for i in range(6))]
SEED = 20


def texts(path: Path) -> Iterator[str]:
    with path.open() as lines:
        for line in lines:
            yield json.loads(line)["text"]


def train(corpus: Path, vocabulary: int, one_in: int) -> Tokenizer:
    """Learns merges from every `one_in`-th training document; ids 0..7 are the specials."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24,
        show_progress=False,
    )
    sample = (text for i, text in enumerate(texts(corpus / "train.jsonl")) if i % one_in == 0)
    tokenizer.train_from_iterator(sample, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "pad_token": "<|pad|>",
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def encode(tokenizer: Tokenizer, corpus: Path, out: Path) -> None:
    end = tokenizer.token_to_id(END)
    for split in ("train", "heldout"):
        documents = list(texts(corpus / f"{split}.jsonl"))
        random.Random(SEED).shuffle(documents)
        ids: list[np.ndarray] = []
        for first in range(0, len(documents), 256):
            for encoding in tokenizer.encode_batch(documents[first : first + 256]):
                ids.append(np.array([*encoding.ids, end], dtype="<u2"))
        stream = np.concatenate(ids)
        with lzma.open(out / f"{split}.bin.xz", "wb", preset=6) as file:
            file.write(stream.tobytes())
        size = sum(len(text.encode()) for text in documents)
        print(f"{split}: {len(documents)} documents, {size} bytes, {len(stream)} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["train", "encode"])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--vocabulary", type=int, default=6144)
    parser.add_argument("--one-in", type=int, default=3, help="share of documents for the merges")
    parser.add_argument("folders", type=Path, nargs="+", help="tokenizer folders (encode: the first)")
    args = parser.parse_args()
    if args.command == "train":
        tokenizer = train(args.corpus, args.vocabulary, args.one_in)
        for folder in args.folders:
            save(tokenizer, folder)
    else:
        tokenizer = Tokenizer.from_file(str(args.folders[0] / "tokenizer.json"))
        encode(tokenizer, args.corpus, args.corpus)


if __name__ == "__main__":
    main()
