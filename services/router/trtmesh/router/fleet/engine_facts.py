"""What an engine tells of itself, and what that means to this router."""

from __future__ import annotations

from trtmesh.router.placement.rates import Report
from trtmesh.v1 import engine_pb2 as pb


def mismatch_of(engine: pb.GetEngineResponse, fingerprint: str) -> str:
    """Why an engine cannot serve a router: its role, or a tokenizer that is not the one with `fingerprint` that the
    router encodes with; '' when it can."""
    if engine.role not in (pb.WORKER_ROLE_UNSPECIFIED, pb.WORKER_ROLE_MIXED):
        role = pb.WorkerRole.Name(engine.role).removeprefix("WORKER_ROLE_").lower()
        return f"its role is {role}, which takes a handoff that this release does not serve"
    theirs = engine.tokenizer_fingerprint
    if not theirs or not fingerprint or theirs == fingerprint:
        return ""
    return (
        f"its tokenizer has the fingerprint {theirs} but the mesh encodes with {fingerprint}; serve the same"
        " tokenizer files to both"
    )


def report_of(load: pb.Load, now: float) -> Report:
    """A load report that arrived at `now`."""
    return Report(
        at=now,
        busy_seconds=load.busy_seconds,
        step_count=load.step_count,
        running_sequences=load.running_sequences,
        waiting_sequences=load.waiting_sequences,
        pending_prompt_tokens=load.pending_prompt_tokens,
        computed_prompt_tokens=load.computed_prompt_tokens,
        used_blocks=load.used_blocks,
        total_blocks=load.total_blocks,
    )
