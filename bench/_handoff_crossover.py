"""The crossover of conditional disaggregation: `auto` against `always` and `never`, over prompt lengths and loads.

The router's own placement runs on a simulated fleet of equal workers (`trtmesh.tools.fleet_replay`), one trace for each
cell of the grid and the same for every choice. The cost of an item is its time to the first token plus the times
between its tokens, that is, the time to its last token: a split shortens one part at the price of the other, so that
either part alone could be improved by always, or never, splitting. Mean and 99th percentile of the cost are compared
with the best fixed choice of the same cell.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

from trtmesh.router.placement.settings import HandoffSettings
from trtmesh.tools.fleet_replay.fleet_model import FleetModel, ReplayResult
from trtmesh.tools.fleet_replay.simulation import replay
from trtmesh.tools.fleet_replay.trace import Arrival

Choice = Literal["auto", "always", "never"]
CHOICES: tuple[Choice, ...] = ("auto", "always", "never")

PROMPT_TOKENS = (32, 128, 512, 2048, 8192, 16384)
LOADS = (0.05, 0.2, 0.35, 0.5, 0.65)
"""Prompt tokens per second, relative to what all workers together compute; without one of three it is two thirds."""
ITEMS = 1500
NEW_TOKENS = (32, 224)
CHAT_TOKENS, CHATS = 256, 0.7
"""Prompt of a chat, and the share of chats in mixed traffic."""

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    """A prompt length and a load; `mixed` traffic has chats beside the prompts."""

    prompt_tokens: int
    load: float
    mixed: bool


def cells() -> Iterator[Cell]:
    for mixed in (False, True):
        for prompt_tokens in PROMPT_TOKENS:
            for load in LOADS:
                yield Cell(prompt_tokens, load, mixed)


def trace(cell: Cell, fleet: FleetModel, items: int, seed: int) -> list[Arrival]:
    """Poisson arrivals; no steps so fast that decoding alone would overload the fleet."""
    dice, now, arrivals = Random(seed), 0.0, []
    mean = cell.prompt_tokens
    if cell.mixed:
        mean = round(CHATS * CHAT_TOKENS + (1 - CHATS) * cell.prompt_tokens)
    by_prefill = cell.load * fleet.workers * fleet.prefill_tokens_per_second / mean
    rate = min(by_prefill, cell.load * decode_rate(fleet))
    for number in range(items):
        now += dice.expovariate(rate)
        chat = cell.mixed and dice.random() < CHATS
        tokens = CHAT_TOKENS if chat else cell.prompt_tokens
        tokens = max(1, round(tokens * dice.uniform(0.75, 1.25)))
        arrivals.append(Arrival(now, tokens, dice.randint(*NEW_TOKENS), 32, (number,)))
    return arrivals


def decode_rate(fleet: FleetModel) -> float:
    """Items per second that the workers for decoding carry with half of their largest batch."""
    batch = fleet.max_batch_size / 2
    step = fleet.step_seconds + fleet.step_seconds_per_sequence * batch
    return (fleet.workers - fleet.prefill_workers) * batch / step / statistics.fmean(NEW_TOKENS)


def run(cell: Cell, fleet: FleetModel, policy: str, items: int, seed: int) -> dict[str, Figures]:
    """The figures of each choice in a cell, in milliseconds."""
    arrivals = trace(cell, fleet, items, seed)
    return {
        choice: figures(
            replay(arrivals, policy, replace(fleet, handoff=HandoffSettings(enabled=choice)))
        )
        for choice in CHOICES
    }


def figures(outcome: ReplayResult) -> Figures:
    return {
        "mean_ms": _ms(statistics.fmean(outcome.end_seconds)),
        "p99_ms": _ms(_p99(outcome.end_seconds)),
        "ttft_mean_ms": _ms(statistics.fmean(outcome.first_token_seconds)),
        "ttft_p99_ms": _ms(_p99(outcome.first_token_seconds)),
        "gap_mean_ms": _ms(statistics.fmean(outcome.gap_seconds)),
        "gap_p99_ms": _ms(_p99(outcome.gap_seconds)),
        "split": round(outcome.handoffs / outcome.items, 3),
    }


def crossover(
    fleet: FleetModel | None = None, policy: str = "auto", items: int = ITEMS, seed: int = 1
) -> Figures:
    """The grid, and how much worse than the best fixed choice `auto` is anywhere."""
    fleet = fleet or FleetModel(workers=3, prefill_workers=1, decode_workers=2)
    grid, worst = [], {"mean_ms": 0.0, "p99_ms": 0.0}
    for cell in cells():
        found = run(cell, fleet, policy, items, seed)
        ratios = {
            name: found["auto"][name] / min(found["always"][name], found["never"][name])
            for name in worst
        }
        worst = {name: max(worst[name], ratio) for name, ratio in ratios.items()}
        grid.append(
            {
                "prompt_tokens": cell.prompt_tokens,
                "load": cell.load,
                "mixed": cell.mixed,
                **found,
                "ratio": {name: round(ratio, 3) for name, ratio in ratios.items()},
            }
        )
    return {
        "grid": grid,
        "worst_mean_ratio": round(worst["mean_ms"], 3),
        "worst_p99_ratio": round(worst["p99_ms"], 3),
    }


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)
