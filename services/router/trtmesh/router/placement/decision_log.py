"""The latest decisions, kept so that an operator can ask why an item went where it did."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from trtmesh.router.placement.decision import Decision


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """One decision and the item it was made for. `cause` is first, retry or migration."""

    request_id: str
    batch_index: int
    cause: str
    decision: Decision


class DecisionLog:
    """A ring of records. Snapshots are shared between the decisions of one moment, so that a record of a large fleet
    costs a few bytes for each worker."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._records: deque[DecisionRecord] = deque(maxlen=most)

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: DecisionRecord) -> None:
        self._records.append(record)

    def of_request(self, request_id: str) -> list[DecisionRecord]:
        """What was decided for the items of a request, in order; empty when it is not known any more."""
        return [record for record in self._records if record.request_id == request_id]
