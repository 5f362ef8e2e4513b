"""The tensors of every release, as `releases.json` has them: facts from the configurations of TensorRT-LLM's releases,
kept apart from the table of the code so that each checks the other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FACTS: Mapping[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
MODELS = tuple(FACTS)
RELEASES: Sequence[str] = FACTS["ensemble"]["releases"]


@dataclass(frozen=True)
class Tensor:
    """A tensor of a model as a release declares it."""

    name: str
    data_type: str
    """KServe's name; '' where the template's user chooses."""
    dims: tuple[int, ...]
    required: bool

    @property
    def is_scalar(self) -> bool:
        """Whether clients send a single value, whatever number the release allows."""
        return self.dims == (1,) or self.name in ONE_VALUE


ONE_VALUE = frozenset(
    {
        *("text_input", "decoder_text_input", "max_tokens"),
        *("QUERY", "DECODER_QUERY", "REQUEST_OUTPUT_LEN", "END_ID", "PAD_ID"),
    }
)
"""Inputs of one value that releases before v0.12 declare with any number."""


def releases_of(model: str) -> Sequence[str]:
    """The releases that have a model."""
    found: Sequence[str] = FACTS[model]["releases"]
    return found


@cache
def tensors(model: str, kind: str, release: str) -> Mapping[str, Tensor]:
    """The `inputs` or `outputs` of a model in a release."""
    found = {}
    for name, entries in FACTS[model][kind].items():
        for entry in entries:
            since, until, data_type, dims, *optional = entry.split(" ")
            if _index(since) <= _index(release) <= _index(until):
                found[name] = Tensor(
                    name,
                    data_type.replace("STRING", "BYTES"),
                    tuple(int(extent) for extent in dims.split(",")),
                    optional == ["required"],
                )
    return found


def _index(release: str) -> int:
    return RELEASES.index(release)
