"""Measures the cost of a streamed token through the Triton door against the native API of the same router.

For 8, 64 and 256 streams at a 10 ms step: the services' CPU time per token by `ensemble`, by `tensorrt_llm_bls` and by
the native door, time to first token, and the ratio of the router's CPU between each model and the native door. The
client speaks tritonclient's messages over the mesh's client (tritonclient's own stream would be the bottleneck), keeps
responses as bytes and parses them after the run. Every text must equal the native one, or the run fails.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import partial

from _doors import DOORS, Door, Triton
from _load import together
from _options import run_bench, tell
from _stack import Stack, stack
from _turns import Figures, in_turn

STEP_MS = 10
MODELS = ("ensemble", "tensorrt_llm_bls")
BLS = Triton("tensorrt_llm_bls", ends_with_content=False)
ALL: dict[str, Door] = {**DOORS, "tensorrt_llm_bls": BLS}


async def measure(mesh: Stack, streams: int, max_tokens: int, runs: int) -> Figures:
    """Measures the doors in turn, so that drift of the machine affects all; medians of the runs."""
    texts = set[str]()

    async def turn(door: Door) -> Mapping[str, float]:
        own = await together(mesh, door, streams, max_tokens)
        texts.update(door.text(stream.messages) for stream in own.streams)
        messages = sum(len(stream.messages) for stream in own.streams)
        return {
            "services_cpu_us_per_token": own.services_us,
            **{f"{name}_cpu_us_per_token": each for name, each in own.cpu_us.items()},
            "client_cpu_us_per_token": own.client_us,
            "messages_per_token": messages / own.tokens,
            "ttft_p50_ms": statistics.median(own.first_ms()),
        }

    found = await in_turn({name: partial(turn, door) for name, door in ALL.items()}, runs)
    if len(texts) != 1:
        raise SystemExit("the doors gave different texts")
    figures = {name: each.medians() for name, each in found.items()}
    native = figures["native"]
    for own in (figures[model] for model in MODELS):
        router = own["router_cpu_us_per_token"] / native["router_cpu_us_per_token"]
        own["router_cpu_to_native"] = round(router, 2)
        own["ttft_added_ms"] = round(own["ttft_p50_ms"] - native["ttft_p50_ms"], 2)
    tell(f"{streams} streams", figures)
    return figures


async def main(
    *, streams: tuple[int, ...] = (8, 64, 256), tokens: int = 128, runs: int = 3
) -> Figures:
    results = {}
    with stack("--simulated-timing-step-ms", str(STEP_MS)) as mesh:
        for count in streams:
            results[str(count)] = await measure(mesh, count, tokens, runs)
    return {"step_ms": STEP_MS, "streams": results}


if __name__ == "__main__":
    run_bench(main)
