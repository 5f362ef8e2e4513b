"""Whether a sequence can start, so that all that has started can go on."""

from __future__ import annotations

from collections.abc import Iterable

from trtmesh.engine.backends.torch.memory.block_tables import BlockTables
from trtmesh.engine.backends.torch.memory.blocks import BlockPool, Prefix
from trtmesh.engine.backends.torch.scheduling.rules import SchedulingRules
from trtmesh.engine.backends.torch.scheduling.sequence import Sequence


class Room:
    """Places in the batch and blocks of the pool, less what is kept for those that have started and for their mates."""

    def __init__(self, pool: BlockPool, tables: BlockTables, rules: SchedulingRules) -> None:
        self._pool = pool
        self._tables = tables
        self._rules = rules

    def suffices(self, sequence: Sequence, prefix: Prefix, running: Iterable[Sequence]) -> bool:
        """Whether there is room for a waiting sequence that begins with `prefix`, and for its mates."""
        awaited = {each.key: each for mate in running for each in _missing(mate)}
        awaited |= {each.key: each for each in _missing(sequence)}
        awaited.pop(sequence.key, None)
        if 1 + len(awaited) > self._tables.free_slots:
            return False
        needed = self._needs(sequence, len(prefix.blocks))
        for each in awaited.values():
            # The prompt is that of a mate.
            shared = min(each.prompt_tokens, each.most_reusable)
            needed += self._needs(each, shared // self._rules.tokens_per_block)
        needed += sum(map(self._rules.growth, running))
        return self._pool.can_allocate(needed, beside=prefix)

    def _needs(self, sequence: Sequence, shared: int) -> int:
        """Blocks that must be free for a sequence to start with `shared` ones."""
        blocks = self._rules.blocks(len(sequence.tokens))
        to_come = self._rules.blocks_to_come(sequence, blocks) if self._rules.never_pause else 0
        return blocks - shared + to_come


def _missing(sequence: Sequence) -> list[Sequence]:
    """Mates that wait."""
    return [each for each in sequence.mates if each.slot < 0]
