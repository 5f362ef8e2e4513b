"""`trtmesh replay`: compares policies on recorded traffic."""

from __future__ import annotations

import json as json_module
import statistics
from collections.abc import Sequence
from enum import Enum
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from trtmesh.chassis.errors import TrtmeshError
from trtmesh.cli.output import put, say, say_error
from trtmesh.cli.session import FAILED, USAGE
from trtmesh.cli.tables import add_row, new_table, print_tables

if TYPE_CHECKING:
    from trtmesh.tools.fleet_replay.fleet_model import ReplayResult


def _finite(value: float) -> float:
    if not isfinite(value):
        raise typer.BadParameter(f"{value} is not finite")
    return value


class SplitChoice(Enum):
    """Values of `router.handoff.enabled`."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


def replay(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Records of routers (router.record.file) or Mooncake traces, merged by time; - for standard input."
        ),
    ],
    policy: Annotated[
        list[str] | None, typer.Option(help="Policy to try; repeatable. Without it all are tried.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=4096, help="Workers of the fleet.")] = 4,
    prefill_tokens_per_second: Annotated[
        float, typer.Option(min=1.0, help="Prompt tokens per second of a worker.", callback=_finite)
    ] = 8000.0,
    step_ms: Annotated[
        float, typer.Option(min=0.001, help="Time of a step.", callback=_finite)
    ] = 10.0,
    cache_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of KV in a worker's pool.")
    ] = 500_000,
    adapter_slots: Annotated[
        int, typer.Option(min=1, help="Adapters that a worker has ready to run.")
    ] = 16,
    host_adapters: Annotated[
        int, typer.Option(min=1, help="Adapters in a worker's memory, ready ones included.")
    ] = 64,
    adapter_load_ms: Annotated[
        float, typer.Option(min=0.0, help="Time to deliver an adapter.", callback=_finite)
    ] = 500.0,
    prefill: Annotated[
        int, typer.Option(min=0, help="Workers of role prefill; the others decode.")
    ] = 0,
    split: Annotated[
        SplitChoice, typer.Option(help="When a prefill worker computes the prompt.")
    ] = SplitChoice.AUTO,
    speed: Annotated[
        float,
        typer.Option(
            min=0.001, help="Arrival rate relative to the recorded one.", callback=_finite
        ),
    ] = 1.0,
    *,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """Replay recorded traffic over a simulated fleet, with the mesh's own placement and scheduler; compare policies.

    Not simulated: waits between siblings, slow start, the breaker, limits of admission, sequences beyond an item's
    first, lost or unequal workers. Compare policies with each other, not milliseconds with a real fleet. With --json
    one policy per line. Adapter loads and copies to the device are per 1,000 items.

    Exit status: 0 done, 1 the file cannot be read, 2 wrong usage.
    """
    # Loaded here: no other command needs the router's and the engine's code.
    from dataclasses import replace

    from trtmesh.router.placement import POLICIES
    from trtmesh.router.placement.settings import HandoffSettings
    from trtmesh.tools.fleet_replay.fleet_model import FleetModel
    from trtmesh.tools.fleet_replay.simulation import replay as run
    from trtmesh.tools.fleet_replay.trace import read_trace

    for name in policy or ():
        if name not in POLICIES:
            say_error(f"--policy is {name!r} but must be one of {', '.join(sorted(POLICIES))}")
            raise typer.Exit(USAGE)
    if prefill >= workers:
        say_error(f"--prefill is {prefill} but must be less than --workers, {workers}")
        raise typer.Exit(USAGE)
    try:
        arrivals = [replace(a, seconds=a.seconds / speed) for a in read_trace(*files)]
    except TrtmeshError as error:
        say_error(str(error))
        raise typer.Exit(FAILED) from error
    if guessed := sum(arrival.guessed for arrival in arrivals):
        say(
            f"{guessed} of {len(arrivals)} items have unknown lengths; the mean of the others is taken"
        )
    fleet = FleetModel(
        workers=workers,
        prefill_tokens_per_second=prefill_tokens_per_second,
        step_seconds=step_ms / 1000,
        cache_tokens=cache_tokens,
        adapter_slots=adapter_slots,
        host_adapters=host_adapters,
        delivery_seconds=adapter_load_ms / 1000,
        prefill_workers=prefill,
        decode_workers=workers - prefill if prefill else 0,
        handoff=HandoffSettings(enabled=split.value),
    )
    outcomes = [run(arrivals, name, fleet) for name in policy or POLICIES]
    if json:
        for outcome in outcomes:
            put(json_module.dumps(figures(outcome)))
    else:
        _print_table(outcomes)


def figures(outcome: ReplayResult) -> dict[str, Any]:
    """The figures of one policy; times in milliseconds."""
    return {
        "policy": outcome.policy,
        "items": outcome.items,
        "hit_rate": round(outcome.hit_rate, 4),
        "best_hit_rate": round(outcome.reusable_tokens / outcome.prompt_tokens, 4),
        "balance": round(outcome.balance, 3),
        "ttft_p50_ms": _percentile(outcome.first_token_seconds, 50),
        "ttft_p99_ms": _percentile(outcome.first_token_seconds, 99),
        "latency_p50_ms": _percentile(outcome.end_seconds, 50),
        "latency_p99_ms": _percentile(outcome.end_seconds, 99),
        "gap_p99_ms": _percentile(outcome.gap_seconds, 99),
        **({"split": round(outcome.handoffs / outcome.items, 3)} if outcome.has_roles else {}),
        **_adapter_figures(outcome),
    }


def _adapter_figures(outcome: ReplayResult) -> dict[str, Any]:
    """Loads of adapters per 1,000 items; nothing for a trace without adapters."""
    if not outcome.adapter_items:
        return {}
    loads = {"adapter_loads": outcome.adapter_deliveries, "adapter_copies": outcome.adapter_copies}
    return {name: round(1000 * count / outcome.items, 1) for name, count in loads.items()}


def _percentile(values: Sequence[float], percent: int) -> float:
    if len(values) < 2:
        return round(sum(values) * 1000, 1)
    return round(statistics.quantiles(values, n=100, method="inclusive")[percent - 1] * 1000, 1)


def _print_table(outcomes: Sequence[ReplayResult]) -> None:
    rows = [figures(outcome) for outcome in outcomes]
    table = new_table(*(name.replace("_", "\n") for name in rows[0]))
    for row in rows:
        add_row(table, *row.values())
    print_tables(table)
