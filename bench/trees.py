"""Compares this tree with another one: both serve at the same time, and the same load goes to them in turn.

Machines drift by a fifth between two runs, and hardly between two turns of a few seconds. Prints the CPU µs of all
services a token, starts included, in the middle of the streams, and of each service; with `--burst`, how many one-token
requests beside the streams are served a second. `--before` is the other tree, with an environment of its own in
`.venv`. `--traced 0.01` compares this tree without tracing with itself, tracing so many of the requests.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

from _collector import collector
from _doors import DOORS, Door
from _load import Stream, microseconds, together
from _options import run_bench
from _stack import Stack, stack
from _turns import Found, in_turn
from burst import ENGINE, beside

STARTED_SECONDS, ENDING_SECONDS = 0.7, 0.5
"""Of a turn of streams, outside its middle."""


async def turn_of_streams(mesh: Stack, door: Door, count: int, tokens: int) -> Mapping[str, float]:
    """CPU of a token in a turn of streams, and in its middle."""
    seconds, middle = tokens * 0.01 - STARTED_SECONDS - ENDING_SECONDS, dict[str, float]()

    async def watch(running: Sequence[Stream]) -> None:
        def messages() -> int:
            return sum(len(stream.messages) for stream in running)

        await asyncio.sleep(STARTED_SECONDS)
        before, already = mesh.cpu_seconds(), messages()
        await asyncio.sleep(seconds)
        used = microseconds(before, mesh.cpu_seconds(), messages() - already)
        middle["cpu_us_per_token_in_the_middle"] = sum(used.values())

    found = await together(mesh, door, count, tokens, meanwhile=watch if seconds > 0 else None)
    services = {f"{name}_us_per_token": used for name, used in found.cpu_us.items()}
    return {"cpu_us_per_token": found.services_us, **middle, **services}


async def turn_of_bursts(mesh: Stack, running: int, door: str, count: int) -> Mapping[str, float]:
    """A turn of bursts: the medians of three, after a first one."""
    async with beside(mesh.address, running, door) as disturbance:
        await disturbance.starts(64)
        gaps, rates = zip(*[await disturbance.starts(count) for _ in range(3)], strict=True)
    return {"requests_per_second": statistics.median(rates), "gap_ms": statistics.median(gaps)}


async def main(
    *,
    before: str = "",
    traced: float | None = None,
    door: Annotated[str, DOORS] = "native",
    streams: int = 64,
    tokens: int = 384,
    rounds: int = 12,
    burst: int = 0,
) -> dict[str, object]:
    """`before` is the folder of the other tree, `burst` has so many requests beside the streams."""
    if bool(before) is (traced is not None):
        raise SystemExit("trees.py compares with --before DIR, or with --traced RATIO")
    with ExitStack() as started:
        python = str(Path(before) / ".venv" / "bin" / "python") if before else sys.executable
        env = {} if traced is None else started.enter_context(collector(traced))
        other = started.enter_context(stack(*ENGINE, python=python))
        own = started.enter_context(stack(*ENGINE, env=env))
        turn = (
            partial(turn_of_bursts, running=streams, door=door, count=burst)
            if burst
            else partial(turn_of_streams, door=DOORS[door], count=streams, tokens=tokens)
        )
        sides = {"before": partial(turn, other), "now": partial(turn, own)}
        found = await in_turn(sides, rounds)
    named = {"door": door, "streams": streams, "rounds": rounds}
    if traced is not None:
        named["traced"] = traced
    return named | compared(found["before"], found["now"])


def compared(before: Found, now: Found) -> dict[str, object]:
    """Medians of both, and of the ratios of the pairs, which are in the order of the turns."""
    old, new, over = before.medians(1), now.medians(1), now.over(before)
    return {
        name: {
            "before": old[name],
            "now": new[name],
            "ratio": over[name],
            "mean_ratio": round(statistics.geometric_mean(ratios), 3),
        }
        for name, ratios in now.ratios(before).items()
    }


if __name__ == "__main__":
    run_bench(main)
