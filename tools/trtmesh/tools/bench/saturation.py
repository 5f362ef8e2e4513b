"""Whether a server fell behind its load, and where more load stops to pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from trtmesh.tools.bench.pools import Values
from trtmesh.tools.bench.record import Answer

SLICES = 10

LEAST_ANSWERS = 10 * SLICES

STEADY_RISE = 0.6
"""Least Kendall's tau of a rise: of ten values without a trend one series in a hundred reaches it."""

LEAST_GROWTH = 1.5
"""Of the last third over the first. A load that just fills up rises too, by less."""


@dataclass(frozen=True, slots=True)
class Saturation:
    """How the load under way and the first tokens went over a run."""

    users_per_s: float
    """Growth of the requests under way."""
    is_behind: bool
    """Both rose steadily to the end: the queue grows as long as this load lasts."""


def saturation(answers: Sequence[Answer]) -> Saturation | None:
    """None for too few answers to see a trend."""
    seen = sorted((each for each in answers if each.arrivals_s), key=lambda each: each.planned_s)
    if len(seen) < LEAST_ANSWERS:
        return None
    # From the first plan to the last one: behind it the queue only empties.
    edges = np.linspace(seen[0].planned_s, seen[-1].planned_s, SLICES + 1)
    if edges[0] == edges[-1]:
        return None
    users = users_between(answers, edges)
    first = np.array([each.arrivals_s[0] - each.planned_s for each in seen]) * 1000
    medians = np.array([np.median(part) for part in np.array_split(first, SLICES)])
    middles = (edges[:-1] + edges[1:]) / 2
    growth = float(np.polyfit(middles, users, 1)[0])
    return Saturation(growth, _rises(users) and _rises(medians))


def users_between(answers: Sequence[Answer], edges: Values) -> Values:
    """Mean number of requests that were due and not over, between each edge and the next."""
    begins = np.array([each.planned_s for each in answers])
    ends = np.array([each.ended_s for each in answers])
    # Time that requests had spent by an edge; its growth is the number under way.
    spent = np.array([(np.clip(edge, begins, ends) - begins).sum() for edge in edges])
    return np.asarray(np.diff(spent) / np.diff(edges))


def _rises(values: Values) -> bool:
    third = len(values) // 3
    grew = values[-third:].mean() >= LEAST_GROWTH * max(values[:third].mean(), 1e-9)
    return bool(grew) and kendall_tau(values) >= STEADY_RISE


def kendall_tau(values: Values) -> float:
    """1 for values that only rise, -1 for values that only fall."""
    later, earlier = np.tril_indices(len(values), -1)
    return float(np.sign(values[later] - values[earlier]).mean())


def knee(points: Sequence[tuple[float, float]]) -> int | None:
    """The number of the point of (throughput, latency) that bends most, by Kneedle: farthest below the line from the
    first to the last. None for less than three points, or a curve that bends nowhere."""
    if len(points) < 3:
        return None
    order = sorted(range(len(points)), key=lambda number: points[number][::-1])
    x, y = np.array([points[number] for number in order]).T
    # Beyond its capacity a server often does less: more latency for no more throughput.
    x = np.maximum.accumulate(x)
    if x[-1] <= x[0] or y[-1] <= y[0]:
        return None
    below = (x - x[0]) / (x[-1] - x[0]) - (y - y[0]) / (y[-1] - y[0])
    best = int(below.argmax())
    return order[best] if below[best] > 1e-9 else None
