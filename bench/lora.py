"""Measures LoRA adapters: placement on adapters' homes against policies that do not know them.

* `placement`: see `_lora_placement.py`.
"""

from __future__ import annotations

# gRPC reads the environment when it is first imported.
import trtmesh.chassis.environment  # noqa: F401  # isort: skip

import argparse
import json

import uvloop
from _lora_placement import placement


def main(arguments: argparse.Namespace) -> None:
    figures = uvloop.run(placement(arguments.items))
    print(json.dumps({"placement": figures}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=8000, help="items of a simulated trace")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse())
