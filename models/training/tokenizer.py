"""Train the byte-level BPE tokenizer, or encode the corpus with it.

`train` writes `tokenizer.json` and `tokenizer_config.json` into each folder given.  `encode`
writes `train-*.bin.xz` and `heldout-*.bin.xz`: little-endian uint16 token ids, every document
followed by `<|endoftext|>`, documents in a seeded random order.  With `--cut-every`, training
documents are encoded in pieces, as prompts are that end anywhere: otherwise a model knows a line
break only as the start of one token with the indentation, and fails on a prompt that ends in one.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
SPECIAL_TOKENS = [END, "<|pad|>", *(f"<|reserved_{i}|>" for i in range(6))]
SEED = 20
SHARD_DOCUMENTS = 8192


def documents(path: Path) -> Iterator[tuple[int, str]]:
    """(stage, text) pairs, see corpus.py."""
    with path.open() as lines:
        for line in lines:
            document = json.loads(line)
            yield document["stage"], document["text"]


def cut(text: str, every: int, rng: random.Random) -> list[str]:
    """Splits after about each `every` characters: anywhere, after a line break, or its indent."""
    at = {0, len(text)}
    for _ in range(len(text) // every):
        position = rng.randrange(len(text))
        kind = rng.random()
        if kind < 0.6:
            position = text.find("\n", position) + 1 or len(text)
        if kind < 0.3:
            while text[position : position + 1] == " ":
                position += 1
        at.add(position)
    return [text[first:last] for first, last in pairwise(sorted(at))]


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
    first_stage = (text for stage, text in documents(corpus / "train.jsonl") if stage == 1)
    sample = (text for i, text in enumerate(first_stage) if i % one_in == 0)
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


def encode(
    tokenizer: Tokenizer, corpus: Path, out: Path, shares: list[float], cut_every: int | None
) -> None:
    """Encodes the given share of each stage's training documents, and all held-out ones."""
    end = tokenizer.token_to_id(END)
    out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "heldout"):
        rng = random.Random(SEED)
        chosen = [
            text
            for stage, text in documents(corpus / f"{split}.jsonl")
            if split == "heldout" or rng.random() < shares[stage - 1]
        ]
        rng.shuffle(chosen)
        tokens = 0
        for shard, first in enumerate(range(0, len(chosen), SHARD_DOCUMENTS)):
            with lzma.open(out / f"{split}-{shard:02}.bin.xz", "wb") as file:
                for text in chosen[first : first + SHARD_DOCUMENTS]:
                    whole = split == "heldout" or not cut_every
                    pieces = [text] if whole else cut(text, cut_every or 0, rng)
                    ids = [i for piece in pieces for i in tokenizer.encode(piece).ids]
                    tokens += len(ids) + 1
                    file.write(np.array([*ids, end], dtype="<u2").tobytes())
        size = sum(len(text.encode()) for text in chosen)
        print(f"{split}: {len(chosen)} documents, {size} bytes, {tokens} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["train", "encode"])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--vocabulary", type=int, default=6144)
    parser.add_argument("--one-in", type=int, default=3, help="share of documents for the merges")
    parser.add_argument("--out", type=Path, help="folder for the token shards (encode)")
    parser.add_argument(
        "folders", type=Path, nargs="+", help="tokenizer folders (encode: the first)"
    )
    parser.add_argument("--shares", type=float, nargs=2, default=[1.0, 0.0], help="of each stage")
    parser.add_argument("--cut-every", type=int, help="characters between cuts, on average")
    args = parser.parse_args()
    if args.command == "train":
        tokenizer = train(args.corpus, args.vocabulary, args.one_in)
        for folder in args.folders:
            save(tokenizer, folder)
    else:
        tokenizer = Tokenizer.from_file(str(args.folders[0] / "tokenizer.json"))
        encode(tokenizer, args.corpus, args.out or args.corpus, args.shares, args.cut_every)


if __name__ == "__main__":
    main()
