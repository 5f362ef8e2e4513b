"""Measure a trained model on the held-out split, and sample from it greedily.

Prints one JSON object with the numbers and samples that the model cards quote.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from data import END_ID, consecutive_rows, load_stream
from modeling import load, parameter_count
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

ROW = 2048
PROMPTS = [
    "def fibonacci(n):",
    "class Stack:",
    "import json\n\ndef load_config(path):",
    "for i in range(",
    "with open(",
    "def binary_search(items, target):",
    "def read_lines(path):\n    with open(path",
    "class Point:\n    def __init__(self, x, y):\n",
    "if __name__ ==",
]


def token_bytes(tokenizer: Tokenizer) -> torch.Tensor:
    """UTF-8 bytes each id stands for, shape [vocabulary]; special tokens stand for none."""
    special = tokenizer.get_added_tokens_decoder()
    sizes = [
        0 if i in special else len(tokenizer.id_to_token(i) or "")
        for i in range(tokenizer.get_vocab_size())
    ]
    return torch.tensor(sizes)


@torch.no_grad()
def measure(
    model: LlamaForCausalLM,
    rows: torch.Tensor,
    sizes: torch.Tensor,
    target: LlamaForCausalLM | None,
) -> dict[str, float]:
    """Held-out figures over rows of shape [rows, row + 1]; with `target`, agreement with it."""
    nats = length = right = ends = ends_found = same = overlap = 0.0
    for part in rows.split(4):
        labels = part[:, 1:].flatten()
        logits = model(input_ids=part[:, :-1], use_cache=False).logits.flatten(0, 1).float()
        best = logits.argmax(-1)
        nats += cross_entropy(logits, labels, reduction="sum").item()
        length += sizes[labels].sum().item()
        right += (best == labels).sum().item()
        ends += (labels == END_ID).sum().item()
        ends_found += ((labels == END_ID) & (best == END_ID)).sum().item()
        if target is not None:
            other = target(input_ids=part[:, :-1], use_cache=False).logits.flatten(0, 1).float()
            same += (best == other.argmax(-1)).sum().item()
            overlap += torch.minimum(logits.softmax(-1), other.softmax(-1)).sum().item()
    count = rows[:, 1:].numel()
    figures = {
        "tokens": count,
        "bytes": length,
        "nats_per_token": nats / count,
        "perplexity": math.exp(nats / count),
        "bits_per_byte": nats / math.log(2) / length,
        "top1_accuracy": right / count,
        "document_ends_predicted": ends_found / ends,
    }
    if target is not None:
        figures["greedy_agreement"] = same / count
        figures["sampling_acceptance"] = overlap / count
    return figures


@torch.no_grad()
def complete(model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str, new_tokens: int) -> str:
    """The greedy completion (without the prompt), special tokens shown."""
    ids = torch.tensor([tokenizer.encode(prompt).ids], device=model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False
    )
    return tokenizer.decode(out[0, ids.shape[1] :].tolist(), skip_special_tokens=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--target", type=Path, help="model whose choices a draft should predict")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json, default the model's own")
    parser.add_argument(
        "--data", type=Path, help="folder of the token shards; without it, samples only"
    )
    parser.add_argument("--every", type=int, default=1, help="measure each n-th row of 2048 tokens")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    args = parser.parse_args()

    dtype: torch.dtype = getattr(torch, args.dtype)
    model = load(args.model, args.device, dtype)
    tokenizer = Tokenizer.from_file(str(args.tokenizer or args.model / "tokenizer.json"))
    report: dict[str, object] = {"parameters": parameter_count(model)}
    if args.data:
        stream = load_stream(args.data, "heldout").to(args.device)
        rows = consecutive_rows(stream, ROW)[:: args.every]
        target = load(args.target, args.device, dtype) if args.target else None
        report["heldout"] = measure(model, rows, token_bytes(tokenizer).to(args.device), target)
    report["samples"] = {p: complete(model, tokenizer, p, args.new_tokens) for p in PROMPTS}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
