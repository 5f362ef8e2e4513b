"""Values of a measure, and how they are distributed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from trtmesh.tools.bench.measures import Measure
from trtmesh.tools.bench.record import Answer

PERCENTS = (1, 5, 10, 25, 50, 75, 90, 95, 99)

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of a measure's values; percentiles are interpolated linearly, as numpy does."""

    count: int
    sum: float
    avg: float
    std: float
    min: float
    max: float
    percentiles: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Pool:
    """A measure's values in ascending order, each with the number of the answer that it is of."""

    values: Values
    owners: NDArray[np.intp]

    def distribution(self) -> Distribution | None:
        """None without values."""
        if not self.values.size:
            return None
        percentiles = np.percentile(self.values, PERCENTS)
        return Distribution(
            self.values.size,
            float(self.values.sum()),
            float(self.values.mean()),
            float(self.values.std()),
            float(self.values[0]),
            float(self.values[-1]),
            dict(zip(PERCENTS, map(float, percentiles), strict=True)),
        )


def pool(measure: Measure, answers: Sequence[Answer]) -> Pool:
    """The values of the answers that are ok."""
    of_each = [measure.of(answer) if answer.ok else () for answer in answers]
    values = np.array([value for own in of_each for value in own], dtype=np.float64)
    owners = np.repeat(np.arange(len(answers)), [len(own) for own in of_each])
    order = np.argsort(values, kind="stable")
    return Pool(values[order], owners[order])
