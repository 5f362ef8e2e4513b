"""Chooses workers: pure functions over an immutable snapshot, fed by load guard, rates and breaker."""

from trtmesh.router.placement.place import (
    Candidate,
    Decision,
    check_fields,
    check_length,
    longest_sequence,
    place,
    place_split,
)
from trtmesh.router.placement.policies import POLICIES
from trtmesh.router.placement.residency import AdapterNeed, Place, Residency, WorkerAdapters
from trtmesh.router.placement.snapshot import (
    KvFacts,
    Phase,
    PlacementQuery,
    Role,
    WorkerSnapshot,
)

__all__ = [
    "POLICIES",
    "AdapterNeed",
    "Candidate",
    "Decision",
    "KvFacts",
    "Phase",
    "Place",
    "PlacementQuery",
    "Residency",
    "Role",
    "WorkerAdapters",
    "WorkerSnapshot",
    "check_fields",
    "check_length",
    "longest_sequence",
    "place",
    "place_split",
]
