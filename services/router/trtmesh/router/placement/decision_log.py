"""Keeps the latest decisions for operators."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from trtmesh.router.placement.decision import Decision


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """A decision with the item. `cause` is first, retry or migration."""

    request_id: str
    batch_index: int
    cause: str
    decision: Decision


class DecisionLog:
    """A ring of records. Simultaneous decisions share snapshots, so a record costs a few bytes per worker."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._records: deque[DecisionRecord] = deque(maxlen=most)

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: DecisionRecord) -> None:
        self._records.append(record)

    def of_request(self, request_id: str) -> list[DecisionRecord]:
        """Decisions for the items of a request, in order; empty once forgotten."""
        return [record for record in self._records if record.request_id == request_id]
