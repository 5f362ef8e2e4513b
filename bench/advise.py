"""Measures how close the forecasts of `trtmesh advise` are, and its advice, on real meshes of simulated engines.

1. A mesh of two engines serves the load once; its router learns the rates of the workers.
2. `trtmesh advise` takes these rates from its metrics, and says how many engines the load needs at twice the rate.
3. A mesh of so many engines serves it, over real sockets; the forecast is compared with what `bench serve` measured.

Steps are long, so that what else runs on the machine decides little; compare the medians.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from _options import run_bench, tell
from _stack import Announcement, routers, simulated_fleet

STEP_MS, STEP_MS_PER_SEQUENCE, PREFILL_RATE = 40, 2, 3000
ENGINE = (
    *("--simulated-timing-step-ms", str(STEP_MS)),
    *("--simulated-timing-step-ms-per-sequence", str(STEP_MS_PER_SEQUENCE)),
    *("--simulated-timing-prefill-tokens-per-second", str(PREFILL_RATE)),
    *("--simulated-timing-prefill-tokens-per-step", "2048"),
)
GOAL = ("--slo", "ttft:2500 tpot:90", "--attainment", "0.95")


def write_trace(file: Path, items: int, rate: float) -> Path:
    """Prompts with one of eight beginnings of 512 tokens, at random times."""
    dice, now, lines = Random(7), 0.0, []
    for number in range(items):
        own = dice.randint(0, 1500)
        lines.append(
            {
                "timestamp": now * 1000,
                "input_length": 512 + own,
                "output_length": dice.randint(16, 96),
                "hash_ids": [
                    dice.randrange(8),
                    *range(1000 + 8 * number, 1000 + 8 * number + own // 512),
                ],
            }
        )
        now += dice.expovariate(rate)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@contextmanager
def mesh(engines: int) -> Iterator[Announcement]:
    """Runs so many engines behind a router and a tokenizer: the router."""
    with (
        simulated_fleet(engines, *ENGINE) as (addresses, _),
        routers(addresses, ready=engines, tokenizer=True) as (router, _),
    ):
        yield router


def trtmesh(*arguments: str) -> str:
    command = [sys.executable, "-m", "trtmesh.cli", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout


def serve(router: Announcement, trace: Path, speed: float, record: Path) -> None:
    target = f"grpc://{router['address']}"
    load = ("--workload", str(trace), "--as-recorded", "--speed", str(speed), "--no-echo")
    trtmesh("bench", "serve", target, *load, "--record", str(record))


def advise(router: Announcement, trace: Path, rate: float, *flags: str) -> dict[str, Any]:
    metrics = ("--metrics", f"http://127.0.0.1:{router['metrics_port']}/metrics")
    said = trtmesh("advise", str(trace), *GOAL, *metrics, "--rate", str(rate), "--json", *flags)
    advice: dict[str, Any] = json.loads(said)
    return advice


def main(*, items: int = 240, rate: float = 2.0) -> dict[str, Any]:
    """`items` of the trace, `rate` of the two engines that are watched; the mesh to advise on has twice that."""
    with TemporaryDirectory() as folder:
        trace = write_trace(Path(folder) / "trace.jsonl", items, rate)
        record = Path(folder) / "run.jsonl"
        with mesh(2) as watched:
            serve(watched, trace, 1.0, record)
            advice = advise(watched, trace, 2 * rate)
            best = advice["fleets"][0]
            mixed = next(each for each in advice["fleets"] if each["counts"]["mixed"])
            engines = mixed["counts"]["mixed"]
            tell("advised, and served by", [best["engines"], mixed["engines"]])
            with mesh(engines) as served:
                serve(served, trace, 2.0, record)
            flags = ("--engines", str(engines), "--check", str(record))
            checked = advise(watched, trace, 2 * rate, *flags)
    return {
        "assumptions": advice["assumptions"],
        "advised": [each["engines"] for each in advice["fleets"]],
        "checks": checked["checks"],
        "doubts": checked["doubts"],
    }


if __name__ == "__main__":
    run_bench(main)
