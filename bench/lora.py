"""Measures LoRA adapters: a step with them, streams while they load, and their placement against policies without it.

* `step`, `off`, `gaps`: see `_lora_steps.py`.
* `placement`: see `_lora_placement.py`.
"""

from __future__ import annotations

# gRPC reads the environment when it is first imported.
import trtmesh.chassis.environment  # noqa: F401  # isort: skip

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import uvloop
from _lora_placement import placement
from _lora_steps import Bench
from _models import SHAPES

PARTS = ("step", "off", "gaps", "placement")


def main(arguments: argparse.Namespace) -> None:
    figures: dict[str, Any] = {"threads": arguments.threads, "torch": torch.__version__}
    if of_steps := [part for part in arguments.parts if part != "placement"]:
        figures |= steps(arguments, of_steps)
    if "placement" in arguments.parts:
        figures["placement"] = uvloop.run(placement(arguments.items))
    print(json.dumps(figures))


def steps(arguments: argparse.Namespace, parts: Sequence[str]) -> dict[str, Any]:
    """The parts that need a model and its workers."""
    figures: dict[str, Any] = {part: {} for part in parts}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(arguments, arguments.folder or Path(folder))
        for part in parts:
            for dtype in arguments.dtypes:
                try:
                    figures[part][dtype] = getattr(bench, part)(dtype)
                finally:
                    bench.end()
    return figures


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--model", choices=list(SHAPES), default="100M")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    parser.add_argument("--tokens", type=int, default=24, help="new tokens of each sequence")
    parser.add_argument("--runs", type=int, default=5, help="counted rounds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keeps the models for other runs")
    parser.add_argument("--items", type=int, default=8000, help="items of a simulated trace")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse())
