"""Train a LoRA adapter of the demo model and write it as a PEFT directory.

The base stays frozen; every linear of a layer gets A [rank, in] and B [out, rank], and computes
x W' + (alpha / rank) x A' B'.  Prints the held-out loss of the base and of the adapter, in nats per
token and float32, and greedy samples of both; log lines are JSON objects.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from data import Packer, consecutive_rows, load_stream
from evaluate import complete
from modeling import load
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from torch.nn.functional import cross_entropy
from train import Log, logits_of, rate_at
from transformers import LlamaForCausalLM

ROW = 1024
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPTS = [
    "def fibonacci(n):\n",
    "def load_config(path, default=None):\n",
    "class Stack:\n",
    "import pytest\n\n",
    "def binary_search(items, target):\n",
]


class LoraLinear(nn.Module):
    """A frozen linear with a low-rank update; B starts at zero."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base
        self.scale = alpha / rank
        self.a = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.b = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.a, a=5**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (x @ self.a.T @ self.b.T) * self.scale


def adapt(model: LlamaForCausalLM, rank: int, alpha: float) -> dict[str, LoraLinear]:
    """Freezes the model and wraps its linears; returns them by their name in the base."""
    model.requires_grad_(requires_grad=False)
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.endswith(TARGETS)
    }
    wrapped = {name: LoraLinear(linear, rank, alpha) for name, linear in found.items()}
    for name, module in wrapped.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, module)
    return wrapped


def save(adapter: dict[str, LoraLinear], folder: Path, rank: int, alpha: float) -> None:
    """Writes adapter_config.json and bfloat16 adapter_model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, module in adapter.items():
        for side, values in (("A", module.a), ("B", module.b)):
            key = f"base_model.model.{name}.lora_{side}.weight"
            tensors[key] = values.detach().to(torch.bfloat16).cpu().contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "base_model_name_or_path": "models/demo",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": list(TARGETS),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


@torch.no_grad()
def heldout_loss(model: LlamaForCausalLM, rows: torch.Tensor) -> float:
    """Mean nats per token over rows of shape [rows, row + 1], in the model's own precision."""
    total = 0.0
    for part in rows.split(32):
        logits = model(input_ids=part[:, :-1], use_cache=False).logits.flatten(0, 1)
        total += cross_entropy(logits.float(), part[:, 1:].flatten(), reduction="sum").item()
    return total / rows[:, 1:].numel()


def report(model: LlamaForCausalLM, rows: torch.Tensor, tokenizer: Tokenizer) -> dict[str, object]:
    return {
        "heldout_tokens": rows[:, 1:].numel(),
        "heldout_loss": round(heldout_loss(model, rows), 4),
        "samples": {prompt: complete(model, tokenizer, prompt, 96) for prompt in PROMPTS},
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, default=Path(__file__).parents[1] / "demo")
    parser.add_argument("--data", type=Path, required=True, help="folder of the token shards")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--alpha", type=float, default=32)
    parser.add_argument("--rows", type=int, default=32, help="rows of 1024 tokens a step")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=20)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(args.seed)
    tokenizer = Tokenizer.from_file(str(args.base / "tokenizer.json"))
    model = load(args.base, "cuda", torch.float32)
    packer = Packer(load_stream(args.data, "train").cuda(), ROW, args.seed)
    heldout = consecutive_rows(load_stream(args.data, "heldout").cuda(), ROW)
    log = Log(args.out / "log.jsonl", 0.0)
    log(of="base", report=json.dumps(report(model, heldout, tokenizer)))

    adapter = adapt(model, args.rank, args.alpha)
    parameters = [p for module in adapter.values() for p in (module.a, module.b)]
    optimizer = torch.optim.AdamW(parameters, lr=args.rate, betas=(0.9, 0.95), weight_decay=0.01)
    for step, batch in zip(range(args.steps), packer.batches(args.rows), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, args.steps, args.rate, 100)
        with torch.autocast("cuda", torch.bfloat16):
            logits = logits_of(model, batch[:, :-1])
        loss = cross_entropy(logits.float(), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 100 == 0:
            log(step=step + 1, loss=round(loss.item(), 4))
    save(adapter, args.out, args.rank, args.alpha)
    for module in adapter.values():
        # The figures are those of the shipped weights, not of the float32 ones behind them.
        module.a.data, module.b.data = (x.data.bfloat16().float() for x in (module.a, module.b))
    log(of="adapter", report=json.dumps(report(model, heldout, tokenizer)))


if __name__ == "__main__":
    main()
