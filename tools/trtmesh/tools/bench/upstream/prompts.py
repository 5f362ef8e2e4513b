"""The prompts of upstream's scripts, as token ids."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from pydantic import BaseModel
from trtmesh.chassis.errors import InvalidRequest
from trtmesh.tools.bench.record import Plan, Prompt
from trtmesh.tools.bench.workloads.files import read_whole
from trtmesh.tools.records import as_json, checked

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SEED = 420
"""Upstream's."""

HISTOGRAMS = {
    "example": (
        (((151, 175), 220), ((176, 200), 225), ((201, 225), 150), ((226, 250), 150), ((251, 275), 140)),
        (((6, 10), 76), ((11, 15), 210), ((16, 20), 174), ((21, 25), 130), ((26, 30), 152)),
    )
}  # fmt: skip
"""Of input and of output lengths: how many requests have a length between two, by key."""

Histogram = Sequence[tuple[tuple[int, int], int]]


class Entry(BaseModel):
    """Of a dataset."""

    input: str
    instruction: str
    output: str


def of_dataset(
    path: Path, tokenizer: Tokenizer, max_input_len: int, requests: int, tokens_per_word: float
) -> list[Plan]:
    """Of objects with `input`, `instruction` and `output`, whose words give the length of the answer; prompts that are
    too long are left out. Raises InvalidRequest."""
    entries = as_json(str(path), read_whole(path))
    if not isinstance(entries, list):
        raise InvalidRequest("must be a list", field=str(path))

    def prompts() -> Iterator[tuple[tuple[int, ...], int]]:
        for number, each in enumerate(entries):
            entry: Entry = checked(Entry, each, f"{path}: [{number}]")
            ids = tuple(tokenizer.encode(f"{entry.input} {entry.instruction}").ids)
            if 0 < len(ids) <= max_input_len:
                yield ids, max(1, int(len(entry.output.split(" ")) * tokens_per_word))

    return _plans(islice(prompts(), requests))


def of_normal_lengths(
    requests: int,
    max_input_len: int,
    inputs: tuple[int, int],
    outputs: tuple[int, int],
    highest_id: int,
) -> list[Plan]:
    """Random ids of lengths with a mean and a deviation; inputs that are too long are left out."""
    draw = Random(SEED)
    lengths = [_normal(draw, *inputs) for _ in range(requests)]
    kept = [length for length in lengths if length <= max_input_len]
    return _plans((_ids(draw, length, highest_id), _normal(draw, *outputs)) for length in kept)


def of_histograms(key: str, max_input_len: int, highest_id: int) -> list[Plan]:
    draw = Random(SEED)
    inputs, outputs = (_lengths(draw, each) for each in HISTOGRAMS[key])
    return _plans(
        (_ids(draw, length, highest_id), tokens)
        for length, tokens in zip(inputs, outputs, strict=False)
        if length <= max_input_len
    )


def _lengths(draw: Random, histogram: Histogram) -> list[int]:
    lengths = [draw.randint(*bounds) for bounds, count in histogram for _ in range(count)]
    draw.shuffle(lengths)
    return lengths


def _normal(draw: Random, mean: int, deviation: int) -> int:
    return max(1, math.ceil(draw.gauss(mean, deviation)))


def _ids(draw: Random, length: int, highest_id: int) -> tuple[int, ...]:
    return tuple(draw.choices(range(1, highest_id + 1), k=length))


def _plans(prompts: Iterable[tuple[tuple[int, ...], int]]) -> list[Plan]:
    return [
        Plan((Prompt(index, ids=ids, max_tokens=tokens, ignore_end_id=True),))
        for index, (ids, tokens) in enumerate(prompts)
    ]
