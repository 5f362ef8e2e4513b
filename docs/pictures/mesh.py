"""Draws mesh.svg, the first picture of the README: services, streams and ports."""

from __future__ import annotations

from html import escape
from pathlib import Path

WIDTH, HEIGHT = 920, 400
INK, PALE, LINE = "#1f2933", "#f5f7fa", "#52606d"
CLIENT, ROUTER, TOKENIZER, ENGINE = "#e4e7eb", "#d3e4fd", "#d8f3dc", "#ffe8cc"

CAPTION = "One stream carries every sequence: commands down, one message per engine step up."

STYLE = f"""
text {{ font: 13px system-ui, sans-serif; fill: {INK}; text-anchor: middle }}
text.title {{ font-weight: 600; font-size: 15px }}
text.note {{ font-size: 12px; fill: {LINE} }}
text.left {{ text-anchor: start }}
path, line {{ stroke: {LINE}; stroke-width: 1.5; fill: none; marker-end: url(#arrow) }}
line.both, path.both {{ marker-start: url(#arrow) }}
path.handoff {{ stroke-dasharray: 5 4 }}
"""

ARROW = (
    '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
    f' orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" style="fill:{LINE};stroke:none;marker-end:none"/>'
    "</marker></defs>"
)


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{escape(words)}</text>'


def replicas(x: float, y: float, color: str, title: str, *notes: str) -> list[str]:
    """A stack of three sheets: a service scales by a number. `x`, `y` is the corner of the front sheet, 190 by 96."""
    sheets = [
        f'<rect x="{x + shift}" y="{y - shift}" width="190" height="96" rx="8" fill="{color}" stroke="{LINE}"/>'
        for shift in (12, 6, 0)
    ]
    lines = [text(x + 95, y + 48 + 18 * row, note, "note") for row, note in enumerate(notes)]
    return [*sheets, text(x + 95, y + 28, title, "title"), *lines]


def clients(x: float, y: float, title: str, note: str) -> list[str]:
    rect = f'<rect x="{x}" y="{y}" width="190" height="58" rx="8" fill="{CLIENT}" stroke="{LINE}"/>'
    return [rect, text(x + 95, y + 24, title, "title"), text(x + 95, y + 44, note, "note")]


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "") -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" class="{kind}"/>'


def mesh() -> str:
    """The whole picture as SVG."""
    parts = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PALE}"/>',
        *clients(24, 60, "gRPC clients", "trtmesh.v1 and KServe v2"),
        *clients(24, 160, "HTTP clients", "Triton generate, infer"),
        *clients(24, 260, "admins", "trtmesh top, workers, explain"),
        *replicas(352, 150, ROUTER, "router", "admission, placement,", "fan-out, migration"),
        *replicas(696, 60, TOKENIZER, "tokenizer", "text to ids, ids to text,", "stop texts"),
        *replicas(696, 250, ENGINE, "engine", "in-flight batching,", "paged KV cache, sampling"),
        line(216, 89, 348, 172, "both"),
        text(292, 112, "8001", "note"),
        line(216, 189, 348, 198, "both"),
        text(284, 184, "8000", "note"),
        line(216, 289, 348, 224, "both"),
        text(292, 270, "8003", "note"),
        line(558, 178, 690, 118, "both"),
        text(596, 116, "one stream each", "note"),
        line(558, 216, 690, 290, "both"),
        text(590, 292, "one stream each", "note"),
        text(447, 290, "Prometheus: 8002", "note"),
        text(447, 310, "each client connects to any router", "note"),
        text(460, 372, CAPTION, "note"),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        ' aria-label="Clients reach any router; each router keeps one stream to each tokenizer and each engine">'
        f"<style>{STYLE}</style>{ARROW}\n" + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(mesh(), encoding="utf-8")
