"""Compares this tree with another one: both serve at the same time, and the same load goes to them in turn.

Machines drift by a fifth between two runs, and hardly between two turns of a few seconds. Prints the CPU µs of all
services a token, starts included, in the middle of the streams, and of each service; with `--burst`, how many one-token
requests beside the streams are served a second. `--before` is the other tree, with an environment of its own in
`.venv`.
"""

from __future__ import annotations

# gRPC reads the environment when it is first imported.
import trtmesh.chassis.environment  # noqa: F401  # isort: skip

import argparse
import asyncio
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from _doors import DOORS, Door
from _stack import Stack, stack
from burst import ENGINE, beside
from trtmesh.chassis.grpc.client import ClientConnection, connected

STARTED_SECONDS, ENDING_SECONDS = 0.7, 0.5
"""Of a turn of streams, outside its middle."""
PROMPT = "def fibonacci(n):\n    "


@dataclass(slots=True)
class Found:
    """Figures of a tree, one of each turn."""

    whole: list[float] = field(default_factory=list)
    services: dict[str, list[float]] = field(default_factory=dict)
    """Of `whole`, by name."""
    middle: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


class Streams:
    """Streams of one turn."""

    def __init__(self, mesh: Stack, door: Door, count: int, tokens: int) -> None:
        self._mesh, self._door, self._count, self._tokens = mesh, door, count, tokens
        self._messages = 0

    async def run(self, found: Found) -> None:
        async with connected(self._mesh.address, 2**26, 30.0) as connection:
            before = self._mesh.cpu_seconds()
            async with asyncio.TaskGroup() as group:
                for _ in range(self._count):
                    group.create_task(self._one(connection))
                seconds = self._tokens * 0.01 - STARTED_SECONDS - ENDING_SECONDS
                if seconds > 0:
                    found.middle.append(await self._middle(seconds))
            # What the services clean up belongs to the turn.
            await asyncio.sleep(0.1)
            used = _microseconds(before, self._mesh.cpu_seconds())
        tokens = self._count * self._tokens
        for name, microseconds in used.items():
            found.services.setdefault(name, []).append(microseconds / tokens)
        found.whole.append(sum(used.values()) / tokens)

    async def _one(self, connection: ClientConnection) -> None:
        call, messages = connection.open(self._door.method), []
        try:
            await call.write(self._door.request(PROMPT, self._tokens))
            call.half_close()
            async for message in call:
                messages.append(message)
                self._messages += 1
        finally:
            call.cancel()
        self._door.check(messages, self._tokens)

    async def _middle(self, seconds: float) -> float:
        await asyncio.sleep(STARTED_SECONDS)
        before, messages = self._mesh.cpu_seconds(), self._messages
        await asyncio.sleep(seconds)
        used = _microseconds(before, self._mesh.cpu_seconds())
        return sum(used.values()) / (self._messages - messages)


def _microseconds(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: (after[name] - before[name]) * 1e6 for name in after}


async def burst(mesh: Stack, streams: int, door: str, count: int, found: Found) -> None:
    """A turn of bursts: the medians of three, after a first one."""
    async with beside(mesh.address, streams, door) as disturbance:
        await disturbance.starts(64)
        gaps, rates = zip(*[await disturbance.starts(count) for _ in range(3)], strict=True)
        found.gaps.append(statistics.median(gaps))
        found.rates.append(statistics.median(rates))


async def main(arguments: argparse.Namespace) -> None:
    python = str(Path(arguments.before) / ".venv" / "bin" / "python")
    door, streams = DOORS[arguments.door], arguments.streams
    before, now = Found(), Found()
    with stack(*ENGINE, python=python) as other, stack(*ENGINE) as own:
        pairs = [(other, before), (own, now)]
        for mesh, _ in pairs:
            await Streams(mesh, door, streams, 64).run(Found())
        for _ in range(arguments.rounds):
            for mesh, found in pairs:
                if arguments.burst:
                    await burst(mesh, streams, arguments.door, arguments.burst, found)
                else:
                    await Streams(mesh, door, streams, arguments.tokens).run(found)
            pairs.reverse()
    named = {"door": arguments.door, "streams": streams, "rounds": arguments.rounds}
    print(json.dumps(named | compared(before, now)))


def compared(before: Found, now: Found) -> dict[str, object]:
    """Medians of both, and of the ratios of the pairs, which are in the order of the turns."""
    figures = {
        "cpu_us_per_token": (before.whole, now.whole),
        "cpu_us_per_token_in_the_middle": (before.middle, now.middle),
        **{f"{each}_us_per_token": (before.services[each], now.services[each]) for each in now.services},
        "requests_per_second": (before.rates, now.rates),
        "gap_ms": (before.gaps, now.gaps),
    }  # fmt: skip
    return {name: _ratio(old, new) for name, (old, new) in figures.items() if old}


def _ratio(before: list[float], now: list[float]) -> dict[str, float]:
    # Threads that end take their time from the account: a figure may not be positive.
    pairs = zip(before, now, strict=True)
    ratios = [after / earlier for earlier, after in pairs if min(after, earlier) > 0]
    return {
        "before": round(statistics.median(before), 1),
        "now": round(statistics.median(now), 1),
        "ratio": round(statistics.median(ratios), 3),
        "mean_ratio": round(statistics.geometric_mean(ratios), 3),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", required=True, help="folder of the other tree")
    parser.add_argument("--door", choices=[*DOORS], default="native")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=12, help="turns of each tree")
    parser.add_argument("--burst", type=int, default=0, help="requests of a burst beside streams")
    return parser.parse_args()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(parse()))
