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
from inspect import getsource
from itertools import count, product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from _models import widen
from _torch_steps import decode, decode_ahead
from tokenizers import Tokenizer
from trtmesh.chassis.vocabulary import GenerationConfig, Sampling, Stopping
from trtmesh.engine.admission import admit
from trtmesh.engine.backend import Submission
from trtmesh.engine.backends.torch.drafts.lengths import AdaptiveLengths, Lengths, StepTime
from trtmesh.engine.backends.torch.loading import Loaded, load_engine
from trtmesh.engine.backends.torch.model.weights import weight_files
from trtmesh.engine.backends.torch.sampling.token_rules import TokenRules
from trtmesh.engine.backends.torch.sequence import sequences_of
from trtmesh.engine.backends.torch.settings import TorchSettings

MODELS = Path(__file__).parents[1] / "models"
CODE: tuple[ModuleType, ...] = (argparse, statistics, sys.modules["inspect"])
PROMPT_TOKENS = 256
NEW_TOKENS = 96
LEAST_PROMPTS = 8
OFF, ADAPTIVE = "off", "adaptive"


@dataclass(slots=True)
class Measured:
    """A run of a batch."""

    rate: float
    """Tokens a second while all decode."""
    drafts: float
    """Draft tokens for each emitted token."""
    accepted: float
    """Share of the draft tokens."""


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


class Lab:
    """A loaded engine that drafts in a given number."""

    def __init__(self, drafts: str, threads: int, device: str, model: Path) -> None:
        """`drafts` and `device` as in the settings."""
        self.decode = decode if device == "cpu" else decode_ahead
        settings = TorchSettings.model_validate(
            {
                "device": device,
                "drafts": drafts,
                "draft_model": MODELS / "demo-draft" if drafts == "model" else None,
                "threads": threads,
                "kv_cache": {"prefix_reuse": False},
                "limits": {"max_batch_size": 64},
            }
        )
        self.loaded: Loaded = load_engine(model, weight_files(model), settings)
        assert self.loaded.engine.drafting
        self.drafting = self.loaded.engine.drafting
        self.keys = count()

    def run(
        self, batches: list[list[list[int]]], lengths: Lengths | None, temperature: float
    ) -> Measured:
        """Without `lengths` as a worker without drafts."""
        self.loaded.engine.drafting = self.drafting if lengths else None
        if lengths:
            self.drafting.lengths = lengths
        counts = self.drafting.counts
        before = counts.draft_tokens, counts.accepted_tokens
        seconds, tokens = 0.0, 0
        for prompts in batches:
            for batch_index, prompt in enumerate(prompts):
                self._add(prompt, batch_index, temperature)
            took, came = self.decode(self.loaded.engine, len(prompts))
            seconds, tokens = seconds + took, tokens + came
        drafts = counts.draft_tokens - before[0]
        accepted = counts.accepted_tokens - before[1]
        return Measured(tokens / seconds, drafts / tokens, accepted / (drafts or 1))

    def _add(self, prompt: list[int], batch_index: int, temperature: float) -> None:
        config = GenerationConfig(
            stopping=Stopping(max_tokens=NEW_TOKENS, ignore_end_id=True),
            sampling=Sampling(temperature=temperature, seed=1) if temperature else Sampling(),
        )
        item = Submission((next(self.keys),), "", batch_index, 0, prompt, 0, config)
        rule = admit(item, self.loaded.info)
        sequences = sequences_of(item, item.keys, rule, TokenRules(config))
        self.loaded.engine.add(item.keys, sequences)


def demo(folder: Path, shape: str | None, device: str) -> Path:
    """The demo model, with the times of `shape` in bfloat16."""
    own = MODELS / "demo"
    return widen(folder, own, shape, torch.bfloat16, device) if shape else own


def texts(kind: str) -> str:
    if kind == "code":
        return "\n".join(map(getsource, CODE))
    pages = (MODELS.parent / "docs").glob("*.md")
    return "\n".join(page.read_text(encoding="utf-8") for page in sorted(pages))


def prompts_of(kind: str, batch: int) -> list[list[list[int]]]:
    """Batches of windows of a text, evenly spread; small batches are several."""
    ids = Tokenizer.from_file(str(MODELS / "demo" / "tokenizer.json")).encode(texts(kind)).ids
    step = (len(ids) - PROMPT_TOKENS) // 64
    count = max(batch, LEAST_PROMPTS)
    windows = [ids[at * step : at * step + PROMPT_TOKENS] for at in range(0, 64, 64 // count)]
    return [windows[first : first + batch] for first in range(0, count, batch)]


def modes(numbers: list[int]) -> dict[str, Lengths | None]:
    fixed: dict[str, Lengths | None] = {str(each): FixedLengths(each) for each in numbers}
    # The adaptive rule learns over all rounds, as in a worker.
    return {OFF: None} | fixed | {ADAPTIVE: AdaptiveLengths()}


def main(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafts", default="ngram", help="the source")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--numbers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--texts", nargs="+", default=["code", "chat"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.3, 1.0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", help="of the demo model's times, one of _models.py")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = demo(Path(folder), options.shape, options.device)
        lab = Lab(options.drafts, options.threads, options.device, model)
    results = []
    for temperature, kind, batch in product(options.temperatures, options.texts, options.batches):
        batches = prompts_of(kind, batch)
        runs: dict[str, list[Measured]] = {}
        compared = modes(options.numbers)
        for _ in range(options.rounds + 1):
            for name, lengths in compared.items():
                found = lab.run(batches, lengths, temperature)
                runs.setdefault(name, []).append(found)
        # The first round warms up.
        kept = {name: found[1:] for name, found in runs.items()}
        for name, rounds in kept.items():
            pairs = zip(rounds, kept[OFF], strict=True)
            results.append(
                {
                    "temperature": temperature,
                    "text": kind,
                    "batch": batch,
                    "drafts": name,
                    "tokens_s": round(statistics.median(each.rate for each in rounds), 1),
                    "over_off": round(statistics.median(a.rate / b.rate for a, b in pairs), 3),
                    "draft_tokens": round(rounds[-1].drafts, 2),
                    "accepted": round(rounds[-1].accepted, 3),
                }
            )
            print(results[-1], file=sys.stderr)
    return {"drafts": options.drafts, "shape": options.shape, "results": results}
