"""Draws the plots of bench/README.md: NAME.json, the last line of a benchmark's output, becomes NAME.svg beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

INK, GRID, PAPER = "#1f2933", "#cbd2d9", "#ffffff"
COLORS = ("#2f6fde", "#3aa76d", "#f0a030", "#9aa5b1")
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 720, 300, 60, 64, 44


@dataclass(frozen=True, slots=True)
class Chart:
    """Groups of bars. A bar is a stack of parts, bottom first; `bars` gives each group its bars by label."""

    title: str
    unit: str
    parts: Sequence[str]
    groups: Mapping[str, Mapping[str, Sequence[float]]]


def data_path(figures: Mapping[str, Any]) -> Chart:
    """CPU of a streamed token by service, beside a bare grpc.aio server in the same run."""
    services = ("router", "tokenizer", "engine")
    groups = {}
    for streams, paced in figures["streams"].items():
        mesh = [paced[f"{service}_us"] for service in services]
        floor = [0.0, 0.0, 0.0, paced["floor"]["services_us"]]
        groups[f"{streams} streams"] = {"trtmesh": [*mesh, 0.0], "floor": floor}
    parts = (*services, "a bare grpc.aio server")
    return Chart("CPU per streamed token at a 10 ms step", "µs", parts, groups)


def triton_door(figures: Mapping[str, Any]) -> Chart:
    """CPU of a streamed token by the model that the client calls."""
    services = ("router", "tokenizer", "engine")
    groups = {
        f"{streams} streams": {
            door.removeprefix("tensorrt_llm_"): [own[f"{s}_cpu_us_per_token"] for s in services]
            for door, own in doors.items()
        }
        for streams, doors in figures["streams"].items()
    }
    return Chart("CPU per streamed token by door at a 10 ms step", "µs", services, groups)


def router(figures: Mapping[str, Any]) -> Chart:
    """Share of the reusable prompt tokens that each policy reuses."""
    groups = {
        policy.replace("_of_two_routers", ", two routers"): {"": [100 * own["of_oracle"]]}
        for policy, own in figures["policies"].items()
    }
    return Chart("Prompt tokens reused, of those an oracle reuses", "%", ("reused",), groups)


CHARTS: Mapping[str, Callable[[Mapping[str, Any]], Chart]] = {
    "data_path": data_path,
    "triton_door": triton_door,
    "router": router,
}


def draw(chart: Chart) -> str:
    """The chart as SVG."""
    bars = [bar for group in chart.groups.values() for bar in group.values()]
    top = _round_up(max(map(sum, bars)))
    scale = (HEIGHT - TOP - BOTTOM) / top
    room = (WIDTH - LEFT - 20) / len(chart.groups)
    body = [_text(LEFT, 24, chart.title, "title"), *_legend(chart.parts), *_grid(chart, top, scale)]
    for place, (name, group) in enumerate(chart.groups.items()):
        left = LEFT + place * room
        body.append(_text(left + room / 2, HEIGHT - 8, name, "middle"))
        width = room * 0.8 / len(group)
        for number, (label, bar) in enumerate(group.items()):
            body += _bar(left + room * 0.1 + number * width, width, label, bar, scale)
    style = (
        f"text{{font:12px system-ui,sans-serif;fill:{INK}}}.title{{font-size:15px;font-weight:600}}"
        ".middle{text-anchor:middle}.end{text-anchor:end}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' aria-label="{escape(chart.title)}"><style>{style}</style>\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _bar(x: float, width: float, label: str, parts: Sequence[float], scale: float) -> list[str]:
    shapes, y = [], float(HEIGHT - BOTTOM)
    for part, color in zip(parts, COLORS, strict=False):
        if part:
            y -= part * scale
            box = f'x="{x + 3:.1f}" y="{y:.1f}" width="{width - 6:.1f}" height="{part * scale:.1f}"'
            shapes.append(f'<rect {box} fill="{color}"/>')
    middle = x + width / 2
    shapes.append(_text(middle, y - 4, f"{sum(parts):.3g}", "middle"))
    return [*shapes, _text(middle, HEIGHT - BOTTOM + 16, label, "middle")]


def _grid(chart: Chart, top: float, scale: float) -> list[str]:
    lines = []
    for quarter in range(5):
        value = top * quarter / 4
        y = HEIGHT - BOTTOM - value * scale
        lines.append(
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - 20}" y2="{y:.1f}" stroke="{GRID}"/>'
        )
        lines.append(_text(LEFT - 6, y + 4, f"{value:g} {chart.unit}", "end"))
    return lines


def _legend(parts: Sequence[str]) -> list[str]:
    shapes, x = [], float(LEFT)
    for part, color in zip(parts, COLORS, strict=False):
        shapes.append(f'<rect x="{x}" y="36" width="10" height="10" fill="{color}"/>')
        shapes.append(_text(x + 14, 45, part, ""))
        x += 30 + 7 * len(part)
    return shapes


def _round_up(value: float) -> float:
    """The next value that four grid lines divide well."""
    step = 1.0
    while 20 * step < value:
        step *= 2 if str(step)[0] in "15" else 2.5
    return 4 * step * -(-value // (4 * step))


def _text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(words)}</text>'


def main() -> None:
    for name, chart in CHARTS.items():
        figures = json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))
        (HERE / f"{name}.svg").write_text(draw(chart(figures)), encoding="utf-8")


if __name__ == "__main__":
    main()
