"""Log-probabilities as vLLM's and SGLang's contracts send them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from trtmesh.engine.backend import TopLogProbs


class _Top(Protocol):
    @property
    def values(self) -> Sequence[float]: ...
    @property
    def token_ids(self) -> Sequence[int]: ...


def top_of(positions: Iterable[_Top], most: int) -> list[TopLogProbs]:
    """The most likely ids of each position. The chosen one may stand first, however unlikely it was."""
    return [most_likely(zip(each.token_ids, each.values, strict=True), most) for each in positions]


def most_likely(pairs: Iterable[tuple[int, float]], most: int) -> TopLogProbs:
    return sorted(pairs, key=lambda pair: -pair[1])[:most]


def asked_top(most: int) -> int:
    """How many alternatives to ask for: the chosen id may take the place of one."""
    return most + 1 if most else 0
