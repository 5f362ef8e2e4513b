"""The errors that routers see when a handoff fails."""

from __future__ import annotations

from trtmesh.chassis.errors import HandoffFailed
from trtmesh.engine.handoff.lease import Problem

_SENTENCES = {
    Problem.INCOMPATIBLE: "the KV cannot be used here",
    Problem.CHECKSUM: "a part of the KV arrived damaged",
    Problem.READ_FAILED: "a part of the KV could not be read",
    Problem.PEER_LOST: "the transfer ended before the KV was complete",
    Problem.WRONG_TOKENS: "the KV is that of other tokens than the submitted ones",
    Problem.PROTOCOL: "the other worker broke the handoff protocol",
    Problem.EXPIRED: "the lease was not renewed in time",
    Problem.COMPUTE: "the KV could not be computed",
}


def failure(problem: Problem, lease_id: str, detail: str = "") -> HandoffFailed:
    """The error of a handoff; `detail` names the cause."""
    sentence = f"lease {lease_id} failed: {_SENTENCES[problem]}"
    return HandoffFailed(f"{sentence}: {detail}" if detail else sentence)


def unknown(lease_id: str, field: str) -> HandoffFailed:
    """The error for a lease that has ended, or was never granted."""
    return HandoffFailed(
        "names a lease that is not held here; continue from the tokens", field=field, value=lease_id
    )
