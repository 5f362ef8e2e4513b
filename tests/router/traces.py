"""Traces for replays."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from trtmesh.tools.fleet_replay.trace import Arrival


def shared_prefixes(items: int = 600, prefixes: int = 24, blocks: int = 16) -> list[Arrival]:
    """Items at random times, each with one of several long prefixes and a random tail."""
    generator, arrivals, now = Random(5), [], 0.0
    for number in range(items):
        now += generator.expovariate(40)
        prefix = generator.randrange(prefixes)
        hashes = [prefix * 1000 + n for n in range(blocks)] + [10**6 + number]
        arrivals.append(Arrival(now, 32 * (blocks + 1) + 5, 20, 32, tuple(hashes)))
    return arrivals


def write_trace(file: Path, arrivals: list[Arrival]) -> Path:
    lines = [
        {
            "timestamp": a.seconds * 1000,
            "input_length": a.prompt_tokens,
            "output_length": a.new_tokens,
            "block_tokens": a.block_tokens,
            "hash_ids": list(a.blocks),
        }
        for a in arrivals
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def recorded_item(**known: Any) -> dict[str, Any]:
    """An item, as a recorder notes it."""
    fields = {"request_id": "r", "batch_index": 0, "model": "m", "arrival_time": 1.0}
    return {**fields, "error": "", "prompt_tokens": 9, "new_tokens": 3, **known}
