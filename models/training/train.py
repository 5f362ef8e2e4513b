"""Train the demo model (or train it on, with `--init`), or distil the draft model, on one GPU.

The first `--short-share` of the steps attend over windows of 512 tokens (half of a step's time
goes to attention at 2048), the others over 2048.  The step count is `--steps`, or is fixed during
the warm-up from the speed of both kinds so that the schedule ends within `--seconds`.  With
`--state`, a run stops after `--pause-seconds` and the same command continues it later.  Every log
line is one JSON object; losses are nats per token.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch
from data import Packer, consecutive_rows, load_stream
from modeling import build, load, parameter_count, save
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

ROW, SHORT = 2048, 512
PROBES = {SHORT: (20, 50), ROW: (70, 100)}  # window: steps between which its speed is measured
Loss = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


def logits_of(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """[n, window] ids to [n * window, vocabulary] logits, with a bfloat16 residual stream."""
    embedded = model.model.embed_tokens(ids).to(torch.bfloat16)
    hidden = model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
    return model.lm_head(hidden).flatten(0, 1)


def make_loss(model: LlamaForCausalLM, teacher: LlamaForCausalLM | None, soft: float) -> Loss:
    """Returns (loss to minimise, plain cross-entropy) for a batch of shape [rows, row + 1]."""

    def loss(batch: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = batch[:, :-1].reshape(-1, window)
        with torch.autocast("cuda", torch.bfloat16):
            logits = logits_of(model, ids)
        hard = cross_entropy(logits.float(), batch[:, 1:].flatten())
        if teacher is None:
            return hard, hard.detach()
        with torch.no_grad():
            target = logits_of(teacher, ids).float().softmax(-1)
        return soft * cross_entropy(logits.float(), target) + (1 - soft) * hard, hard.detach()

    return loss


@torch.no_grad()
def heldout_loss(model: LlamaForCausalLM, rows: torch.Tensor, window: int) -> float:
    """Mean nats per token over rows of shape [rows, row + 1], cut into windows."""
    total = 0.0
    for part in rows.split(32):
        with torch.autocast("cuda", torch.bfloat16):
            logits = logits_of(model, part[:, :-1].reshape(-1, window))
        total += cross_entropy(logits.float(), part[:, 1:].flatten(), reduction="sum").item()
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


def window_at(step: int, steps: int | None, short_share: float) -> int:
    """Tokens a position may look back on; while the step count is open, both are probed."""
    short_until = PROBES[SHORT][1] if steps is None else short_share * steps
    return SHORT if step < short_until else ROW


class Log:
    """Prints JSON lines and appends them to a file; `seconds` count from the run's first start."""

    def __init__(self, path: Path, earlier: float) -> None:
        self._file = path.open("a")
        self._started = time.monotonic() - earlier

    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def __call__(self, **values: float | str) -> None:
        line = json.dumps({**values, "seconds": round(self.elapsed(), 1)})
        print(line, flush=True)
        print(line, file=self._file, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=["demo", "draft"])
    parser.add_argument("--data", type=Path, required=True, help="folder of the token shards")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init", type=Path, help="model folder to start from")
    parser.add_argument("--teacher", type=Path, help="model folder to distil from")
    parser.add_argument("--soft", type=float, default=0.8, help="weight of the teacher's targets")
    parser.add_argument("--rows", type=int, default=64, help="rows of 2048 tokens a step")
    parser.add_argument("--short-share", type=float, default=0.6)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=300, help="steps")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--state", type=Path, help="where a paused run is kept")
    parser.add_argument("--pause-seconds", type=float, default=math.inf)
    parser.add_argument("--checkpoint-seconds", type=float, default=120)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def main() -> None:
    started = time.monotonic()
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    model = load(args.init, "cuda", torch.float32) if args.init else build(args.model, args.seed)
    model.cuda().train()
    teacher = load(args.teacher, "cuda") if args.teacher else None
    packer = Packer(load_stream(args.data, "train").cuda(), ROW, args.seed)
    heldout = consecutive_rows(load_stream(args.data, "heldout").cuda(), ROW)
    optimizer = make_optimizer(model, args.rate)
    loss_of = make_loss(model, teacher, args.soft)
    if args.compile:
        loss_of = torch.compile(loss_of, dynamic=False)

    steps, step, earlier = args.steps, 0, 0.0
    if args.state and args.state.exists():
        state = torch.load(args.state, map_location="cuda")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        steps, step, earlier = state["steps"], state["step"], state["seconds"]
    log = Log(args.out / f"{args.model}-log.jsonl", earlier + time.monotonic() - started)
    log(model=args.model, parameters=parameter_count(model), seed=args.seed, rows=args.rows,
        rate=args.rate, device=torch.cuda.get_device_name(), torch=torch.__version__)  # fmt: skip
    mark, saved, pace = 0.0, time.monotonic(), dict.fromkeys(PROBES, 0.0)
    for batch in islice(packer.batches(args.rows), step, None):
        for probed, (first, last) in PROBES.items():
            if steps is None and step in (first, last):
                torch.cuda.synchronize()
                pace[probed] = (time.monotonic() - mark) / (last - first)
                mark = time.monotonic()
        if steps is None and step == PROBES[ROW][1]:
            mean = args.short_share * pace[SHORT] + (1 - args.short_share) * pace[ROW]
            steps = max(args.warmup + 1, step + int(0.97 * (args.seconds - log.elapsed()) / mean))
            log(steps=steps, tokens_per_second=int(args.rows * ROW / mean))
        window = window_at(step, steps, args.short_share)
        if step == steps or log.elapsed() > args.seconds:
            break
        if args.state and time.monotonic() - started > args.pause_seconds:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                        "steps": steps, "step": step, "seconds": log.elapsed()}, args.state)  # fmt: skip
            break
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, steps, args.rate, args.warmup)
        loss, hard = loss_of(batch, window)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 100 == 0:
            log(step=step, tokens=step * args.rows * ROW, loss=round(hard.item(), 4),
                rate=optimizer.param_groups[0]["lr"])  # fmt: skip
        if step % 1000 == 0:
            log(
                step=step,
                window=window,
                heldout_loss=round(heldout_loss(model, heldout, window), 4),
            )
        if time.monotonic() - saved > args.checkpoint_seconds:
            save(model, args.out, shard="15MB")
            saved = time.monotonic()
    save(model, args.out, shard="15MB")
    log(step=step, window=window, heldout_loss=round(heldout_loss(model, heldout, window), 4))


if __name__ == "__main__":
    main()
