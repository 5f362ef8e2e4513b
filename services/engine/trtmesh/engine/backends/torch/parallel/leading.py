"""The device of the first rank, with commands for the others."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import TypeVar

from trtmesh.engine.backends.torch.compute.device import Compute, Forward
from trtmesh.engine.backends.torch.memory.kvcache import BlockTables
from trtmesh.engine.backends.torch.parallel import rank_commands
from trtmesh.engine.backends.torch.parallel.ranks import Ranks
from trtmesh.engine.backends.torch.sequence import Chunk
from trtmesh.engine.scheduling.blocks import Move

R = TypeVar("R")


class LeadingCompute:
    """Implements Compute. Tokens are chosen here alone. After a fault during a step the other ranks may wait for this
    rank, so the worker cannot compute any more: every further call raises the same error.
    """

    def __init__(
        self, own: Compute, tables: BlockTables, tokens_per_block: int, ranks: Ranks
    ) -> None:
        """`own` computes the part of this rank."""
        self._own = own
        self._tables = tables
        self._tokens_per_block = tokens_per_block
        self._ranks = ranks
        self._broken: Exception | None = None
        self.synchronize = own.synchronize
        self.awaits = own.awaits
        self.choose = own.choose
        self.verify = own.verify
        self.rank = own.rank
        self.release_memory = own.release_memory

    @property
    def captured_steps(self) -> int:
        return self._own.captured_steps

    @property
    def most_run_tokens(self) -> int | None:
        return self._own.most_run_tokens

    @property
    def may_follow(self) -> bool:
        return self._own.may_follow

    def move(self, moves: SequenceOf[Move]) -> None:
        if moves:
            self._together(rank_commands.move(moves), lambda: self._own.move(moves))

    def forward(
        self, chunks: SequenceOf[Chunk], written: Callable[[int], None] | None = None
    ) -> Forward:
        command = rank_commands.forward(chunks, self._tables, self._tokens_per_block)
        return self._together(command, lambda: self._own.forward(chunks, written))

    def follow(self, chunks: SequenceOf[Chunk], rows: SequenceOf[int]) -> Forward:
        command = rank_commands.follow(chunks, rows, self._tables, self._tokens_per_block)
        return self._together(command, lambda: self._own.follow(chunks, rows))

    def can_follow(self, chunk: Chunk) -> bool:
        # Commands of steps launched ahead tell rows alone.
        return False

    def check(self) -> None:
        self._together(rank_commands.check(), self._own.check)

    def _together(self, command: bytes, compute: Callable[[], R]) -> R:
        """Computes on all ranks."""
        if self._broken:
            raise self._broken
        try:
            self._ranks.tell(command)
            return compute()
        except Exception as error:
            self._broken = self._ranks.cause_of(error)
            if self._broken is error:
                raise
            raise self._broken from error
