"""Draws dashboard-*.png, the dashboards of deploy/monitoring over a running mesh, from what Prometheus has of it.

python docs/pictures/dashboards.py [http://localhost:9090] [seconds] [Unix time of the end]
"""

from __future__ import annotations

import json
import re
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import isfinite
from operator import itemgetter
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    EngFormatter,
    Formatter,
    PercentFormatter,
    ScalarFormatter,
)
from PIL import Image

HERE = Path(__file__).parent
DASHBOARDS = HERE.parents[1] / "deploy" / "monitoring" / "dashboards"
DAY = 86400
UNITS: Mapping[str, tuple[str, Callable[[], Formatter]]] = {
    "s": ("", partial(EngFormatter, "s")),
    "percentunit": ("", partial(PercentFormatter, 1)),
    "bytes": ("", partial(EngFormatter, "B")),
    "Bps": ("", partial(EngFormatter, "B/s")),
    "cps": ("a second", ScalarFormatter),
    "short": ("", ScalarFormatter),
}
"""What a title says of a unit, and how values are written."""
POINTS, MOST_LEGENDS = 120, 6
LEGEND_HEIGHT = 0.1
"""Of a row, in heights of a graph."""
CELL = 0.26
"""Inches of a cell of Grafana's grid."""


class Source:
    """A Prometheus, and the span to draw."""

    def __init__(self, url: str, seconds: float, end: str) -> None:
        self._url = url
        self.seconds = seconds
        self.end = float(end or self._ask("query", query="time()")["result"][0])

    def series(
        self, expression: str
    ) -> Iterator[tuple[Mapping[str, str], list[tuple[float, float]]]]:
        """The series of an expression by their labels."""
        span = {"start": self.end - self.seconds, "end": self.end, "step": self.seconds / POINTS}
        answer = self._ask("query_range", query=expression, **span)
        for each in answer["result"]:
            yield each["metric"], [(at, float(value)) for at, value in each["values"]]

    def _ask(self, path: str, **asked: object) -> Any:
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(asked)}"
        with urllib.request.urlopen(url) as response:  # noqa: S310 - the user names it
            return json.load(response)["data"]


def filled(expression: str, board: Mapping[str, Any]) -> str:
    """An expression with Grafana's variables filled in: everything, and the defaults."""
    values = {"job": ".*", "model": ".*", "__rate_interval": "20s"}
    for variable in board["templating"]["list"]:
        if variable["type"] == "custom":
            values[variable["name"]] = variable["current"]["value"]
    return re.sub(r"\$(\w+)", lambda name: values[name[1]], expression)


def draw(panel: Mapping[str, Any], axes: Axes, source: Source, board: Mapping[str, Any]) -> None:
    """A graph with its lines."""
    lines: list[tuple[float, str, list[tuple[float, float]]]] = []
    for target in panel["targets"]:
        for labels, points in source.series(filled(target["expr"], board)):
            legend = target["legendFormat"]
            for name, value in labels.items():
                legend = legend.replace(f"{{{{{name}}}}}", Path(value).name)
            top = max((value for _, value in points if isfinite(value)), default=0.0)
            lines.append((top, legend or "all", points))
    highest = max((top for top, _, _ in lines), default=0.0)
    defaults = panel["fieldConfig"]["defaults"]
    unit = defaults["unit"]
    # A long unit at each number would reach into the graph beside.
    said, formatter = UNITS.get(unit, (unit.removeprefix("suffix: "), ScalarFormatter))
    scale = 1.0
    if unit == "s" and highest > DAY:
        said, formatter, scale = "days", ScalarFormatter, 1 / DAY
    axes.yaxis.set_major_formatter(formatter())
    # The highest first, since the legend has not room for all.
    for _, legend, points in sorted(lines, key=itemgetter(0), reverse=True):
        ages = [at - source.end for at, _ in points]
        axes.plot(ages, [scale * value for _, value in points], linewidth=0.9, label=legend)
    for step in defaults.get("thresholds", {}).get("steps", ())[1:]:
        axes.axhline(step["value"], color="crimson", linewidth=0.8, linestyle="--")
    axes.set_title(
        ", ".join(filter(None, (panel["title"], said))), loc="left", fontsize=8, fontweight="bold"
    )
    axes.set_xlim(-source.seconds, 0)
    axes.xaxis.set_major_formatter(EngFormatter("s", sep=" "))
    axes.tick_params(labelsize=6)
    axes.grid(visible=True, linewidth=0.3)
    handles, legends = axes.get_legend_handles_labels()
    handles, legends = handles[:MOST_LEGENDS], legends[:MOST_LEGENDS]
    rows = -(-len(handles) // 2)
    # From zero, whose lines are seen, with room for the legend.
    top = (scale * highest or 1) / (0.9 - LEGEND_HEIGHT * rows)
    axes.set_ylim(-0.03 * top, top)
    if not handles:
        return
    axes.legend(
        handles,
        legends,
        ncols=2,
        fontsize=5.5,
        loc="upper left",
        framealpha=0.7,
    )


def picture(board: Mapping[str, Any], source: Source) -> Figure:
    """A dashboard, with its graphs at their places in Grafana's grid."""
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    figure = plt.figure(figsize=(24 * CELL * 1.7, (height + 2) * CELL))
    figure.suptitle(board["title"], fontsize=11, fontweight="bold", y=1 - 0.8 / (height + 2))
    for panel in board["panels"]:
        place = panel["gridPos"]
        left, top = place["x"] / 24, 1 - (place["y"] + 2) / (height + 2)
        if panel["type"] == "row":
            figure.text(0.01, top - 0.7 / (height + 2), panel["title"], fontsize=9, color="dimgray")
            continue
        size = (place["w"] / 24 - 0.05, (place["h"] - 2.2) / (height + 2))
        bottom = top - (place["h"] - 0.9) / (height + 2)
        draw(panel, figure.add_axes((left + 0.04, bottom, *size)), source, board)
    return figure


def main(url: str = "http://localhost:9090", seconds: str = "180", end: str = "") -> None:
    mpl.use("agg")
    source = Source(url, float(seconds), end)
    for path in sorted(DASHBOARDS.glob("*.json")):
        figure = picture(json.loads(path.read_text("utf-8")), source)
        file = HERE / f"dashboard-{path.stem}.png"
        figure.savefig(file, dpi=80)
        plt.close(figure)
        # A third of the size.
        Image.open(file).convert("RGB").quantize(64).save(file, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
