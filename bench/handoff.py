"""Measures disaggregated prefill: gaps of chats beside long prompts, hidden transfers, bytes, and the crossover.

Parts: `simulated` and `torch` run the same traffic on one prefill and two decode workers, and on three workers without
roles and with chunked prefill, in turns. `bytes` is the bench handoff_bytes. `crossover` compares the conditional
choice with the fixed ones on a simulated fleet.
"""

from __future__ import annotations

from typing import Annotated, Any

from _handoff_crossover import crossover
from _handoff_traffic import Setup, Traffic, compare
from _options import run_bench
from _stack import MODEL_DIR
from handoff_bytes import bench as measure_bytes

PARTS = ("simulated", "torch", "bytes", "crossover")
BYTES, BYTE_ROUNDS = 256 * 2**20, 7


def simulated_setups(token_bytes: int) -> list[Setup]:
    """Steps like those of an 8B model on a large GPU."""

    def flags(chunk: int) -> tuple[str, ...]:
        return (
            *("--backend", "simulated", "--simulated-timing-step-ms", "8"),
            *("--simulated-timing-step-ms-per-sequence", "0.1"),
            *("--simulated-timing-prefill-tokens-per-second", "20000"),
            *("--simulated-timing-prefill-tokens-per-step", str(chunk)),
            *("--simulated-kv-cache-token-bytes", str(token_bytes)),
        )

    return [
        Setup("disaggregated", flags(2048), roles=True),
        Setup("aggregated, chunks of 2048", flags(2048)),
        Setup("aggregated, chunks of 512", flags(512)),
    ]


def torch_setups() -> list[Setup]:
    """The demo model; the workers share the cores, so a prefill slows the steps of all."""

    def flags(chunk: int) -> tuple[str, ...]:
        return (
            *("--backend", "torch", "--model-dir", str(MODEL_DIR), "--torch-threads", "1"),
            *("--torch-batching-max-step-tokens", str(chunk)),
        )

    return [
        Setup("disaggregated", flags(512), roles=True),
        Setup("aggregated, chunks of 512", flags(512)),
        Setup("aggregated, chunks of 128", flags(128)),
    ]


TORCH_TRAFFIC = Traffic(
    chats=8,
    chat_tokens=64,
    chat_new_tokens=100,
    prompts=16,
    prompt_tokens=(700, 1800),
    prompt_new_tokens=32,
    prompts_per_second=0.5,
    highest_id=6000,
)


async def main(
    *,
    parts: Annotated[tuple[str, ...], PARTS] = PARTS,
    rounds: int = 3,
    token_bytes: int = 1024,
) -> dict[str, Any]:
    """`rounds` are the runs of each fleet, `token_bytes` the KV of a token on simulated workers."""
    result: dict[str, Any] = {}
    if "simulated" in parts:
        setups = simulated_setups(token_bytes)
        result["simulated"] = await compare(setups, Traffic(), rounds)
    if "torch" in parts:
        result["torch"] = await compare(torch_setups(), TORCH_TRAFFIC, rounds)
    if "bytes" in parts:
        result["bytes"] = await measure_bytes(BYTES, BYTE_ROUNDS)
    if "crossover" in parts:
        result["crossover"] = crossover()
    return result


if __name__ == "__main__":
    run_bench(main)
