"""The load and the rates of a running mesh, by the metrics of its routers at two times."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from statistics import fmean

from prometheus_client.parser import text_string_to_metric_families
from trtmesh.chassis.errors import SettingsError
from trtmesh.tools.bench.server_metrics import read_pages
from trtmesh.tools.fleet_replay.trace import MOONCAKE_BLOCK_TOKENS, Arrival

OPTION = "--metrics"
PREFIX = "trtmesh_router_"
PROMPTS, ANSWERS = "prompt_tokens_per_item", "generated_tokens_per_item"
COUNTS = (f"{PROMPTS}_count", f"{ANSWERS}_count")

Page = Mapping[tuple[str, str, str], float]
"""Samples by name without prefix, model, and bound of the bucket or ''."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What placement has learned of a model's workers; None is not known."""

    prefill_tokens_per_second: float | None = None
    step_ms: float | None = None
    """Without its sequences."""
    step_ms_per_sequence: float | None = None
    sequences: float | None = None
    """Mean number of sequences in the steps seen."""


@dataclass(frozen=True, slots=True)
class LengthHistogram:
    """A histogram of tokens: counts by upper bound, each without the smaller ones, and the mean."""

    counts: Sequence[tuple[float, float]]
    mean: float

    def draw(self, number: int, dice: Random) -> list[int]:
        """So many lengths, evenly distributed in the logarithm within a bucket, of the same mean."""
        edges = [0.5, *(bound for bound, _ in self.counts)]
        spans = [(low, high if math.isfinite(high) else 2 * low) for low, high in pairwise(edges)]
        chosen = dice.choices(spans, [count for _, count in self.counts], k=number)
        drawn = [low * (high / low) ** dice.random() for low, high in chosen]
        return [max(1, round(each * self.mean / fmean(drawn))) for each in drawn]


@dataclass(frozen=True, slots=True)
class Observed:
    """The load of a model between two scrapes."""

    seconds: float
    items: int
    prompts: LengthHistogram
    answers: LengthHistogram

    def arrivals(self, number: int, seed: int) -> list[Arrival]:
        """Items as often, of such lengths, at random times. Nothing tells prefixes."""
        dice, now, found = Random(seed), 0.0, []
        lengths = zip(self.prompts.draw(number, dice), self.answers.draw(number, dice), strict=True)
        for prompt, answer in lengths:
            found.append(Arrival(now, prompt, answer, MOONCAKE_BLOCK_TOKENS, ()))
            now += dice.expovariate(self.items / self.seconds)
        return found


async def pages_of(urls: Sequence[str]) -> list[Page]:
    """The pages of routers now. Raises SettingsError."""
    return [page_of(text) for text in await read_pages(urls, OPTION)]


def rates_of(pages: Sequence[Page], model: str) -> Rates:
    """What the routers have learned, on average. Raises SettingsError."""
    learned = {key[1] for page in pages for key in page if key[0] == "learned_step_seconds"}
    model = _only(learned, model) if learned else model
    prompt_token = _mean(pages, "learned_prompt_token_seconds", model)
    return Rates(
        prompt_token and 1 / prompt_token,
        _mean(pages, "learned_step_seconds", model, 1000),
        _mean(pages, "learned_step_sequence_seconds", model, 1000),
        _mean(pages, "learned_step_sequences", model),
    )


def load_between(
    before: Sequence[Page], after: Sequence[Page], seconds: float, model: str
) -> Observed:
    """What the same routers served between two scrapes. Raises SettingsError."""
    grown: Counter[tuple[str, str, str]] = Counter()
    for old, new in zip(before, after, strict=True):
        if any(value < old.get(key, 0.0) for key, value in new.items() if key[0] in COUNTS):
            raise SettingsError(
                f"are of a router that restarted within {seconds:g} s; look again", setting=OPTION
            )
        grown.update({key: value - old.get(key, 0.0) for key, value in new.items()})
    served = {
        name for (key, name, _), value in grown.items() if key == f"{ANSWERS}_count" and value
    }
    if not served:
        raise SettingsError(
            f"show no item that ended in {seconds:g} s; watch longer (--watch), or give a trace",
            setting=OPTION,
        )
    model = _only(served, model)
    if not grown[f"{PROMPTS}_count", model, ""]:
        raise SettingsError(
            f"show no item that began in {seconds:g} s; watch longer (--watch), or give a trace",
            setting=OPTION,
        )
    items = grown[f"{ANSWERS}_count", model, ""]
    return Observed(
        seconds, items, _lengths(grown, PROMPTS, model), _lengths(grown, ANSWERS, model)
    )


def _only(models: Collection[str], asked: str) -> str:
    if asked in models or (not asked and len(models) == 1):
        return asked or next(iter(models))
    raise SettingsError(f"must be one of {', '.join(sorted(models))}", setting="--model")


def page_of(text: str) -> Page:
    """Raises SettingsError for what is no router's page."""
    try:
        samples = [
            each for family in text_string_to_metric_families(text) for each in family.samples
        ]
    except ValueError as error:
        raise SettingsError(f"is no page of metrics: {error}", setting=OPTION) from error
    found = {
        (name.removeprefix(PREFIX), labels.get("model", ""), labels.get("le", "")): value
        for name, labels, value, *_ in samples
        if name.startswith(PREFIX)
    }
    if not found:
        raise SettingsError("is no page of a router", setting=OPTION)
    return found


def _lengths(grown: Page, name: str, model: str) -> LengthHistogram:
    """The buckets without the smaller ones in them."""
    sums = sorted(
        (float(bound), value)
        for (metric, of, bound), value in grown.items()
        if metric == f"{name}_bucket" and of == model
    )
    counts = [(bound, value - less) for (_, less), (bound, value) in pairwise([(0.0, 0.0), *sums])]
    mean = grown[f"{name}_sum", model, ""] / grown[f"{name}_count", model, ""]
    return LengthHistogram(counts, mean)


def _mean(pages: Sequence[Page], name: str, model: str, scale: float = 1) -> float | None:
    known = [value for page in pages if (value := page.get((name, model, ""))) is not None]
    return scale * fmean(known) if known else None
