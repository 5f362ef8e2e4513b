"""Measures the cost of a streamed token through the Triton door against the native API of the same router.

For 8, 64 and 256 streams at a 10 ms step: the services' CPU time per token by `ensemble`, by `tensorrt_llm_bls` and by
the native door, time to first token, and the ratio of the router's CPU between each model and the native door. The
client speaks tritonclient's messages over the mesh's client (tritonclient's own stream would be the bottleneck), keeps
responses as bytes and parses them after the run. Every text must equal the native one, or the run fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence

from _doors import DOORS, Door, Triton
from _load import Figures, Together, run_bench, together
from _stack import Stack, stack

STEP_MS = 10
MODELS = ("ensemble", "tensorrt_llm_bls")
BLS = Triton("tensorrt_llm_bls", ends_with_content=False)
ALL: dict[str, Door] = {**DOORS, "tensorrt_llm_bls": BLS}


async def measure(mesh: Stack, streams: int, max_tokens: int, runs: int) -> Figures:
    """Measures the doors in turn, so that drift of the machine affects all; medians of the runs."""
    results: dict[str, list[Together]] = {name: [] for name in ALL}
    for _ in range(runs):
        for name, door in ALL.items():
            results[name].append(await together(mesh, door, streams, max_tokens))
    texts = {
        each.door.text(stream.messages)
        for every in results.values()
        for each in every
        for stream in each.streams
    }
    if len(texts) != 1:
        raise SystemExit("the doors gave different texts")
    figures = {name: median(every) for name, every in results.items()}
    native = figures["native"]
    for own in (figures[model] for model in MODELS):
        router = own["cpu_us_per_token"]["router"] / native["cpu_us_per_token"]["router"]
        own["router_cpu_to_native"] = round(router, 2)
        own["ttft_added_ms"] = round(own["ttft_p50_ms"] - native["ttft_p50_ms"], 2)
    print(f"{streams} streams: {json.dumps(figures)}", file=sys.stderr)
    return figures


def median(results: Sequence[Together]) -> Figures:
    """The run with the median CPU of the services, rounded."""
    middle = sorted(results, key=lambda each: each.services_us)[len(results) // 2]
    cpu = {**middle.cpu_us, "client": middle.client_us}
    messages = sum(len(stream.messages) for stream in middle.streams)
    firsts = statistics.median(statistics.median(each.first_ms()) for each in results)
    return {
        "services_cpu_us_per_token": round(middle.services_us, 1),
        "cpu_us_per_token": {name: round(each, 1) for name, each in cpu.items()},
        "messages_per_token": round(messages / middle.tokens, 2),
        "ttft_p50_ms": round(firsts, 2),
    }


async def main(arguments: argparse.Namespace) -> None:
    results = {}
    with stack("--simulated-timing-step-ms", str(STEP_MS)) as mesh:
        for door in ALL.values():
            await together(mesh, door, 32, 32)
        for streams in arguments.streams:
            results[str(streams)] = await measure(mesh, streams, arguments.tokens, arguments.runs)
    print(json.dumps({"step_ms": STEP_MS, "streams": results}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="*", default=[8, 64, 256])
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each stream")
    parser.add_argument("--runs", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    run_bench(main(parse()))
