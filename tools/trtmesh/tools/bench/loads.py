"""When requests are sent: pure functions from a load to planned times."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, count, repeat
from random import Random

from trtmesh.chassis.errors import SettingsError
from trtmesh.tools.bench.record import Load, Plan

KINDS = ("constant", "poisson", "gamma")
"""Of arrivals at a rate."""

_RAMP = re.compile(r"([\d.]+)\.\.([\d.]+)@([\d.]+)s?")


def planned(plans: Sequence[Plan], load: Load, seed: int) -> Sequence[Plan]:
    """The plans with the times of the load, which a closed loop has not. A later turn of a session has its delay in
    place of a time."""
    if load.kind == "closed":
        return [replace(plan, planned_s=None) for plan in plans]
    if load.kind == "trace":
        speed = float(load.shape["speed"])
        return [replace(plan, planned_s=_recorded_s(plan) / speed) for plan in plans]
    times = times_of(load, seed)
    return [replace(plan, planned_s=None if plan.turn else next(times)) for plan in plans]


def _recorded_s(plan: Plan) -> float:
    if plan.turn:
        return 0.0
    if plan.planned_s is None:
        raise SettingsError(
            "needs a workload with times, as traces are; give --rate or --concurrency",
            setting="--as-recorded",
        )
    return plan.planned_s


def times_of(load: Load, seed: int) -> Iterator[float]:
    """Seconds after the start, ascending and without end; equal for equal seeds."""
    assert load.rate is not None
    rate, draw = load.rate, Random(f"{seed} times")
    match load.kind:
        case "constant":
            return (number / rate for number in count())
        case "poisson" | "gamma":
            shape = float(load.shape.get("burstiness", 1.0))
            return accumulate(draw.gammavariate(shape, 1 / (rate * shape)) for _ in repeat(None))
        case "ramp":
            return _ramp(rate, load)
    raise ValueError(load.kind)


def _ramp(rate: float, load: Load) -> Iterator[float]:
    """The n-th request is sent when the integral of the rate is n; after the ramp the last rate is kept."""
    last, over_s = float(load.shape["to"]), float(load.shape["over_s"])
    slope, sent = (last - rate) / over_s, (rate + last) / 2 * over_s
    for number in count():
        if number > sent:
            yield over_s + (number - sent) / last
        else:
            # The smaller root, in the form that has no difference of near numbers.
            yield 2 * number / (rate + math.sqrt(max(0.0, rate * rate + 2 * slope * number)))


def read_ramp(text: str) -> Load:
    """`1..20@60s`, requests per second from the first to the last rate over the time. Raises SettingsError."""
    if (match := _RAMP.fullmatch(text)) is None:
        raise SettingsError(f"is {text!r} but must be like 1..20@60s", setting="--ramp")
    first, last, over_s = (_positive(each, "--ramp") for each in match.groups())
    return Load("ramp", rate=first, shape={"to": last, "over_s": over_s})


def read_numbers(text: str, setting: str) -> Sequence[float]:
    """Positive numbers with commas between."""
    return [_positive(each, setting) for each in text.split(",")]


def _positive(text: str, setting: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise SettingsError(f"has {text!r} but must have positive numbers", setting=setting)
    return number
