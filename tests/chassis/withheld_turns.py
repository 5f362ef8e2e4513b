"""Turns at the word of a test."""

from __future__ import annotations

import math
from collections.abc import Hashable

from trtmesh.chassis.fair.turns import ParseScheduler, Work


class WithheldTurns(ParseScheduler):
    """Has all work wait until the test gives it a turn."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Work] = []

    def take(self, work: Work, origin: Hashable = "") -> bool:
        self.asked.append(work)
        return True

    def give(self) -> None:
        """Does all work that waits."""
        asked, self.asked = self.asked, []
        for work in asked:
            while work.go_on(math.inf):
                pass
            work.completed()
