"""Measures LoRA adapters: a step with them, streams while they load, and their placement against policies without it.

* `step`, `off`, `gaps`: see `_lora_steps.py`.
* `placement`: see `_lora_placement.py`.
"""

from __future__ import annotations

# gRPC reads the environment when it is first imported.
import trtmesh.chassis.environment  # noqa: F401  # isort: skip

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
from _lora_placement import placement
from _lora_steps import Bench
from _models import SHAPES
from _options import run_bench

PARTS = ("step", "off", "gaps", "placement")
DTYPES = ("float32", "bfloat16")


async def main(
    *,
    parts: Annotated[tuple[str, ...], PARTS] = PARTS,
    model: Annotated[str, SHAPES] = "100M",
    dtypes: Annotated[tuple[str, ...], DTYPES] = DTYPES[:1],
    tokens: int = 24,
    runs: int = 5,
    threads: int = 1,
    folder: Path | None = None,
    items: int = 8000,
) -> dict[str, Any]:
    """`tokens` of a sequence in each of the `runs`; `folder` keeps the model; `items` of a simulated trace."""
    figures: dict[str, Any] = {"threads": threads, "torch": torch.__version__}
    if of_steps := [part for part in parts if part != "placement"]:
        with nullcontext(folder) if folder else tempfile.TemporaryDirectory() as own:
            bench = Bench(model, Path(own), tokens=tokens, runs=runs, threads=threads)
            figures |= {
                part: {dtype: await bench.measure(part, dtype) for dtype in dtypes}
                for part in of_steps
            }
    if "placement" in parts:
        figures["placement"] = await placement(items)
    return figures


if __name__ == "__main__":
    run_bench(main)
