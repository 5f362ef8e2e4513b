"""Where an item goes: pure functions over an immutable snapshot, and what keeps the snapshot current, which is the load
guard, the learned rates and the breaker of each worker; and the record of what was decided."""

from trtmesh.router.placement.decision import Candidate, Decision
from trtmesh.router.placement.place import check_fields, place
from trtmesh.router.placement.policies import POLICIES
from trtmesh.router.placement.snapshot import PlacementQuery, WorkerSnapshot

__all__ = [
    "POLICIES",
    "Candidate",
    "Decision",
    "PlacementQuery",
    "WorkerSnapshot",
    "check_fields",
    "place",
]
