"""Draws docs/pictures/hedge.svg: every token of streams that a worker's freeze meets, without second copies and with
them. Run it by hand: `python bench/_hedge_picture.py`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from _doors import Native
from _load import Stream, connections
from _stack import fleet

STREAMS, SHOWN, TOKENS, STEP_MS = 18, 6, 240, 20
FREEZE_AFTER, FREEZE_SECONDS = 1.5, 2.0
BEFORE, AFTER = 0.4, 0.6
"""Seconds shown around the freeze."""
ENGINE = ("--backend", "simulated", "--simulated-timing-step-ms", str(STEP_MS))
DOOR = Native()

WIDTH, LEFT, TOP, ROW, BETWEEN = 920, 30, 66, 15, 44
INK, PALE, FROZEN, COLORS = "#1f2933", "#f5f7fa", "#fbd5d5", ("#9aa5b1", "#2f6fde")
STYLE = (
    f"text {{ font: 13px system-ui, sans-serif; fill: {INK} }} text.title {{ font-weight: 600 }}"
)

Rows = Sequence[Sequence[float]]
"""Times of the tokens of each stream, from the freeze on."""


async def run(*flags: str) -> Rows:
    """The streams that waited longest."""
    with fleet([ENGINE] * 3, *flags) as mesh:
        streams = [Stream() for _ in range(STREAMS)]
        async with connections(mesh.address, 2) as both, asyncio.TaskGroup() as group:
            for number, stream in enumerate(streams):
                request = DOOR.request([number + 10] * 32, TOKENS, text=False, ignore_end_id=True)
                group.create_task(stream.receive(both[number % 2], DOOR, request))
            await asyncio.sleep(FREEZE_AFTER)
            pid = mesh.engine_pids[0]
            os.kill(pid, signal.SIGSTOP)
            frozen_at = asyncio.get_running_loop().time()
            try:
                await asyncio.sleep(FREEZE_SECONDS)
            finally:
                os.kill(pid, signal.SIGCONT)
    for stream in streams:
        DOOR.check(stream.messages, TOKENS)
    rows = [[at - frozen_at for at in stream.arrivals(DOOR)] for stream in streams]
    return sorted(rows, key=longest_gap)[-SHOWN:]


def longest_gap(row: Sequence[float]) -> float:
    """Within what is shown."""
    shown = [at for at in row if -BEFORE < at < FREEZE_SECONDS + AFTER]
    return max((b - a for a, b in pairwise(shown)), default=0.0)


def panel(rows: Rows, top: float, title: str, color: str) -> list[str]:
    """The rows of one run, a tick for each token."""
    scale = (WIDTH - 2 * LEFT) / (BEFORE + FREEZE_SECONDS + AFTER)

    def x(at: float) -> float:
        return LEFT + (at + BEFORE) * scale

    worst = max(map(longest_gap, rows))
    height = SHOWN * ROW
    parts = [
        f'<text x="{LEFT}" y="{top - 10}" class="title">{title}: longest gap {worst * 1000:.0f} ms</text>',
        f'<rect x="{x(0):.1f}" y="{top}" width="{FREEZE_SECONDS * scale:.1f}" height="{height}" fill="{FROZEN}"/>',
    ]
    for number, row in enumerate(rows):
        y = top + number * ROW + 2
        ticks = "".join(
            f"M{x(at):.1f} {y}v{ROW - 4}" for at in row if -BEFORE < at < FREEZE_SECONDS + AFTER
        )
        parts.append(f'<path d="{ticks}" stroke="{color}" stroke-width="1.4"/>')
    return parts


def drawn(plain: Rows, hedged: Rows) -> str:
    second = TOP + SHOWN * ROW + BETWEEN
    height = second + SHOWN * ROW + 24
    frozen = f"the worker of all six is frozen for {FREEZE_SECONDS:g} s (red)"
    caption = f"Each tick is a token, each row a stream; {frozen}."
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">',
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="{PALE}"/>',
        f'<text x="{LEFT}" y="24">{caption}</text>',
        *panel(plain, TOP, "One copy of each stream", COLORS[0]),
        *panel(hedged, second, "With hedging", COLORS[1]),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


async def main() -> None:
    plain, hedged = await run(), await run("--hedge-share", "0.02")
    picture = Path(__file__).parent.parent / "docs" / "pictures" / "hedge.svg"
    picture.write_text(drawn(plain, hedged), encoding="utf-8")
    for rows in (plain, hedged):
        print([round(longest_gap(row), 3) for row in rows])


if __name__ == "__main__":
    asyncio.run(main())
