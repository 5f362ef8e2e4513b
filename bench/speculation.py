"""Tokens a second of the torch engine with drafts, over those without, by batch, number of drafts and text.

The engine runs in this process, without the service. Modes take turns with the same prompts, and only steps in which
every sequence decodes count. Seconds are CPU time of this process, with one thread: other processes do not count. On a
GPU they are those that pass, and `--shape 1B` gives the demo model the times of that shape, see `_models.widen`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from inspect import getsource
from itertools import product
from pathlib import Path
from types import ModuleType

import torch
from _models import widen
from _options import run_bench, tell
from _torch_steps import Lab
from _turns import Figures, Values, in_turn
from tokenizers import Tokenizer
from trtmesh.chassis.vocabulary import GenerationConfig, Sampling, Stopping
from trtmesh.engine.backends.torch.drafts.lengths import AdaptiveLengths, Lengths, StepTime

MODELS = Path(__file__).parents[1] / "models"
CODE: tuple[ModuleType, ...] = (argparse, statistics, sys.modules["inspect"])
PROMPT_TOKENS = 256
NEW_TOKENS = 96
LEAST_PROMPTS = 8
OFF, ADAPTIVE = "off", "adaptive"


@dataclass(frozen=True, slots=True)
class FixedLengths:
    """Implements Lengths: always as many drafts as possible, up to a number."""

    drafts: int

    def waits(self, rows: int, rates: Sequence[float], most: Sequence[int]) -> bool:
        return True

    def choose(self, rows: int, rates: Sequence[float], most: Sequence[int]) -> list[int]:
        return [min(self.drafts, each) for each in most]

    def measured(self, step: StepTime) -> None:
        """Nothing is learned."""


class Drafting:
    """An engine that drafts in a given number, or not."""

    def __init__(self, drafts: str, threads: int, device: str, model: Path) -> None:
        """`drafts` and `device` as in the settings."""
        draft_model = MODELS / "demo-draft" if drafts == "model" else None
        self._lab = Lab(model, device, threads, drafts=drafts, draft_model=draft_model)
        assert self._lab.loaded.engine.drafting
        self._drafting = self._lab.loaded.engine.drafting

    def run(
        self, batches: list[list[list[int]]], lengths: Lengths | None, temperature: float
    ) -> Values:
        """Without `lengths` as a worker without drafts. Tokens a second while all decode, draft tokens for each of
        them, and the share of the drafts that is accepted."""
        self._lab.loaded.engine.drafting = self._drafting if lengths else None
        if lengths:
            self._drafting.lengths = lengths
        config = GenerationConfig(
            stopping=Stopping(max_tokens=NEW_TOKENS, ignore_end_id=True),
            sampling=Sampling(temperature=temperature, seed=1) if temperature else Sampling(),
        )
        counts = self._drafting.counts
        before = counts.draft_tokens, counts.accepted_tokens
        seconds, tokens = 0.0, 0
        for prompts in batches:
            for batch_index, prompt in enumerate(prompts):
                self._lab.add(prompt, batch_index, config)
            took, came = self._lab.decode(len(prompts))
            seconds, tokens = seconds + took, tokens + came
        drafts = counts.draft_tokens - before[0]
        accepted = (counts.accepted_tokens - before[1]) / (drafts or 1)
        return {"tokens_s": tokens / seconds, "draft_tokens": drafts / tokens, "accepted": accepted}


def demo(folder: Path, shape: str | None, device: str) -> Path:
    """The demo model, with the times of `shape` in bfloat16."""
    own = MODELS / "demo"
    return widen(folder, own, shape, torch.bfloat16, device) if shape else own


def text_of(kind: str) -> str:
    if kind == "code":
        return "\n".join(map(getsource, CODE))
    pages = (MODELS.parent / "docs").glob("*.md")
    return "\n".join(page.read_text(encoding="utf-8") for page in sorted(pages))


def prompts_of(kind: str, batch: int) -> list[list[list[int]]]:
    """Batches of windows of a text, evenly spread; small batches are several."""
    ids = Tokenizer.from_file(str(MODELS / "demo" / "tokenizer.json")).encode(text_of(kind)).ids
    step = (len(ids) - PROMPT_TOKENS) // 64
    count = max(batch, LEAST_PROMPTS)
    windows = [ids[at * step : at * step + PROMPT_TOKENS] for at in range(0, 64, 64 // count)]
    return [windows[first : first + batch] for first in range(0, count, batch)]


def modes(numbers: Sequence[int]) -> dict[str, Lengths | None]:
    fixed: dict[str, Lengths | None] = {str(each): FixedLengths(each) for each in numbers}
    # The adaptive rule learns over all rounds, as in a worker.
    return {OFF: None} | fixed | {ADAPTIVE: AdaptiveLengths()}


async def main(
    *,
    drafts: str = "ngram",
    batches: tuple[int, ...] = (1, 4, 16, 64),
    numbers: tuple[int, ...] = (2, 4, 8),
    texts: tuple[str, ...] = ("code", "chat"),
    temperatures: tuple[float, ...] = (0.0, 0.3, 1.0),
    rounds: int = 5,
    threads: int = 1,
    device: str = "cpu",
    shape: str | None = None,
) -> Figures:
    """`drafts` is their source, `shape` that of the demo model's times, one of _models.py."""
    with tempfile.TemporaryDirectory() as folder:
        engine = Drafting(drafts, threads, device, demo(Path(folder), shape, device))
    results = []
    for temperature, kind, batch in product(temperatures, texts, batches):
        prompts = prompts_of(kind, batch)
        turns = {
            name: partial(engine.run, prompts, lengths, temperature)
            for name, lengths in modes(numbers).items()
        }
        found = await in_turn(turns, rounds)
        for name, own in found.items():
            cell = {"temperature": temperature, "text": kind, "batch": batch, "drafts": name}
            over = own.over(found[OFF])["tokens_s"]
            results.append({**cell, **own.medians(3), "over_off": over})
            tell(name, results[-1])
    return {"drafts": drafts, "shape": shape, "results": results}


if __name__ == "__main__":
    run_bench(main)
