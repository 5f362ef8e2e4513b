"""Train the demo model, or distil the draft model from it, on one GPU.

The step count is `--steps`, or is fixed during the warm-up from the speed measured so far so
that the cosine schedule ends within `--seconds` of the start.  Every log line is one JSON
object; losses are nats per token.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from data import Packer, consecutive_rows, load_stream
from modeling import build, load, parameter_count, save

ROW = 2048
SPEED_FROM, SPEED_TO = 20, 100  # steps between which the speed is measured
Loss = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def logits_of(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """[rows, row] ids to [rows * row, vocabulary] logits."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return model.lm_head(hidden).flatten(0, 1)


def make_loss(model: LlamaForCausalLM, teacher: LlamaForCausalLM | None, soft: float) -> Loss:
    """Returns (loss to minimise, plain cross-entropy) for a batch of shape [rows, row + 1]."""

    def loss(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            logits = logits_of(model, batch[:, :-1])
        hard = F.cross_entropy(logits.float(), batch[:, 1:].flatten())
        if teacher is None:
            return hard, hard.detach()
        with torch.no_grad():
            target = logits_of(teacher, batch[:, :-1]).float().softmax(-1)
        return soft * F.cross_entropy(logits.float(), target) + (1 - soft) * hard, hard.detach()

    return loss


@torch.no_grad()
def heldout_loss(model: LlamaForCausalLM, rows: torch.Tensor, batch: int) -> float:
    """Mean nats per token over rows of shape [rows, row + 1]."""
    total = 0.0
    for part in rows.split(batch):
        with torch.autocast("cuda", torch.bfloat16):
            logits = logits_of(model, part[:, :-1])
        total += F.cross_entropy(logits.float(), part[:, 1:].flatten(), reduction="sum").item()
    return total / rows[:, 1:].numel()


def make_optimizer(model: torch.nn.Module, rate: float) -> torch.optim.Optimizer:
    """AdamW with weight decay 0.1 on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)


def rate_at(step: int, steps: int | None, peak: float, warmup: int) -> float:
    """Linear warm-up, then a cosine to 1 % of the peak."""
    if steps is None or step < warmup:
        return peak * (step + 1) / warmup
    share = (step - warmup) / max(1, steps - warmup)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=["demo", "draft"])
    parser.add_argument("--data", type=Path, required=True, help="folder of train.bin.xz")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--teacher", type=Path, help="model folder to distil from")
    parser.add_argument("--soft", type=float, default=0.8, help="weight of the teacher's targets")
    parser.add_argument("--rows", type=int, default=64, help="rows of 2048 tokens a step")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=300, help="steps")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--checkpoint-seconds", type=float, default=120)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    started = time.monotonic()
    torch.set_float32_matmul_precision("high")
    model = build(args.model, args.seed).cuda().train()
    teacher = load(args.teacher, "cuda") if args.teacher else None
    packer = Packer(load_stream(args.data / "train.bin.xz").cuda(), ROW, args.seed)
    heldout = consecutive_rows(load_stream(args.data / "heldout.bin.xz").cuda(), ROW)
    optimizer = make_optimizer(model, args.rate)
    loss_of = make_loss(model, teacher, args.soft)
    if args.compile:
        loss_of = torch.compile(loss_of)

    log_file = (args.out / f"{args.model}-log.jsonl").open("w")

    def log(**values: float | int | str) -> None:
        line = json.dumps({**values, "seconds": round(time.monotonic() - started, 1)})
        print(line, flush=True)
        print(line, file=log_file, flush=True)

    log(model=args.model, parameters=parameter_count(model), seed=args.seed, rows=args.rows,
        rate=args.rate, device=torch.cuda.get_device_name(), torch=torch.__version__)  # fmt: skip
    steps, step, mark, saved = args.steps, 0, 0.0, time.monotonic()
    for batch in packer.batches(args.rows):
        if steps is None and step in (SPEED_FROM, SPEED_TO):
            torch.cuda.synchronize()
            if step == SPEED_TO:
                pace = (time.monotonic() - mark) / (SPEED_TO - SPEED_FROM)
                left = args.seconds - (time.monotonic() - started)
                steps = max(args.warmup + 1, SPEED_TO + int(0.97 * left / pace))
                log(steps=steps, tokens_per_second=int(args.rows * ROW / pace))
            mark = time.monotonic()
        if step == steps or time.monotonic() - started > args.seconds:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, steps, args.rate, args.warmup)
        loss, hard = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 100 == 0:
            log(step=step, tokens=step * args.rows * ROW, loss=round(hard.item(), 4),
                rate=optimizer.param_groups[0]["lr"])  # fmt: skip
        if step % 1000 == 0:
            log(step=step, heldout_loss=round(heldout_loss(model, heldout, 32), 4))
        if time.monotonic() - saved > args.checkpoint_seconds:
            save(model, args.out, shard="15MB")
            saved = time.monotonic()
    save(model, args.out, shard="15MB")
    log(step=step, heldout_loss=round(heldout_loss(model, heldout, 32), 4))


if __name__ == "__main__":
    main()
