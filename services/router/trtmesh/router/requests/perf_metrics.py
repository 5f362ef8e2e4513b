"""The metrics of an item from those of its sequences."""

from __future__ import annotations

from collections.abc import Sequence

from trtmesh.v1 import generation_pb2 as pb

SUMS = (
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
)
FIRST_TIMES = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns")


def combined(metrics: Sequence[pb.PerfMetrics]) -> pb.PerfMetrics | None:
    """The first times, the last time and the sums; None for no metrics. A time of 0 is not known."""
    if not metrics:
        return None
    whole = pb.PerfMetrics(last_token_time_ns=max(each.last_token_time_ns for each in metrics))
    for name in FIRST_TIMES:
        known = [getattr(each, name) for each in metrics if getattr(each, name)]
        setattr(whole, name, min(known, default=0))
    for name in SUMS:
        setattr(whole, name, sum(getattr(each, name) for each in metrics))
    if whole.total_draft_tokens:
        whole.acceptance_rate = whole.total_accepted_draft_tokens / whole.total_draft_tokens
    return whole
