"""Masks that come late, at any step and for any row."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from random import Random
from typing import Any

from trtmesh.engine.backends.torch.guided.grammars import Matcher
from trtmesh.engine.backends.torch.sampling.continuation import Continuation
from trtmesh.engine.backends.torch.sampling.mask_time import Masks


class SomeLate:
    """Implements Masks: those of others, of which dice let some be late."""

    def __init__(
        self, own: Masks, seed: int, share: float = 0.4, *, all_may_be: bool = False
    ) -> None:
        self._own, self._dice, self._share = own, Random(seed), share
        self._all_may_be = all_may_be
        self.counts, self.begin_step, self.begin = own.counts, own.begin_step, own.begin
        self.close = own.close
        self.sat_out = 0

    def late(self, guided: Iterable[Continuation], *, alone: bool = True) -> set[int]:
        guided = list(guided)
        late = self._own.late(guided, alone=alone)
        more = {each.key for each in guided if self._dice.random() < self._share} - late
        if alone and not self._all_may_be and len(late) + len(more) == len(guided):
            more.pop()
        self.sat_out += len(more)
        return late | more


class Held:
    """Implements Matcher by another, and fills no mask before the event."""

    def __init__(self, own: Matcher, event: threading.Event) -> None:
        self._own, self.event = own, event
        self.mask_bytes, self.accept, self.forced = own.mask_bytes, own.accept, own.forced
        self.automaton = own.automaton

    def copy(self) -> Held:
        return Held(self._own.copy(), self.event)

    def fill(self, row: Any) -> str:
        assert self.event.wait(60), "nobody goes on without this mask"
        return self._own.fill(row)

    @property
    def may_end(self) -> bool:
        return self._own.may_end

    @property
    def problem(self) -> str:
        return self._own.problem
