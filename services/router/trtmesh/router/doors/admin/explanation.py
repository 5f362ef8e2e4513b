"""Decisions as an operator reads them."""

from __future__ import annotations

from trtmesh.router.placement.decision import Candidate
from trtmesh.router.placement.decision_log import DecisionRecord
from trtmesh.v1 import router_admin_pb2 as pb


def describe_decision(record: DecisionRecord) -> pb.Placement:
    """The record as Explain answers it, best candidate first."""
    decision = record.decision
    ranked = sorted(decision.candidates, key=lambda c: (bool(c.excluded_by), c.score))
    return pb.Placement(
        batch_index=record.batch_index,
        policy=decision.policy,
        worker=decision.chosen.worker,
        candidates=map(_describe, ranked),
        cause=record.cause,
        prompt_tokens=decision.query.prompt_tokens,
        regret_tokens=decision.regret_tokens,
    )


def _describe(candidate: Candidate) -> pb.PlacementCandidate:
    worker = candidate.worker
    return pb.PlacementCandidate(
        worker=worker.worker or worker.address,
        score=candidate.score,
        excluded_by=candidate.excluded_by,
        cached_tokens=candidate.cached_tokens,
        sequences=worker.sequences,
        wait_seconds=worker.wait_seconds,
        prefill_seconds=worker.prefill_seconds,
        step_seconds=worker.step_seconds,
    )
