"""The load of a foreign engine, and what it proves of the engine's progress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from trtmesh.engine.backends.foreign.contract import LoadRecord


class _Rank(Protocol):
    @property
    def num_running_reqs(self) -> int: ...
    @property
    def num_waiting_reqs(self) -> int: ...
    @property
    def token_usage(self) -> float: ...
    @property
    def max_total_num_tokens(self) -> int: ...
    @property
    def num_waiting_uncached_tokens(self) -> int: ...


class _Loads(Protocol):
    @property
    def loads(self) -> Sequence[_Rank]: ...


def record_of(answer: _Loads) -> LoadRecord:
    """The load of all ranks together, as vLLM's and SGLang's GetLoads tell it."""
    ranks = answer.loads
    return LoadRecord(
        running=sum(rank.num_running_reqs for rank in ranks),
        waiting=sum(rank.num_waiting_reqs for rank in ranks),
        used_share=sum(rank.token_usage for rank in ranks) / max(1, len(ranks)),
        cache_tokens=sum(rank.max_total_num_tokens for rank in ranks),
        waiting_prompt_tokens=sum(rank.num_waiting_uncached_tokens for rank in ranks),
    )


class EngineLoad:
    """The newest record, and the steps that the records prove.

    A frozen engine goes on answering with the same figures. So a change of what it runs, or of the memory in use,
    counts as a step, beside each delivery of own tokens. Its queue, which grows before a frozen engine, does not count.
    """

    def __init__(self) -> None:
        self.record: LoadRecord | None = None
        self.steps = 0

    def take(self, record: LoadRecord) -> None:
        before, self.record = self.record, record
        if before is None or (record.running, record.used_share) != (
            before.running,
            before.used_share,
        ):
            self.steps += 1

    def counts(self, own: int) -> tuple[int, int]:
        """Running and waiting sequences, with `own` live ones of this process among them."""
        if self.record is None:
            return own, 0
        waiting = self.record.waiting
        return max(self.record.running, own - waiting), waiting
