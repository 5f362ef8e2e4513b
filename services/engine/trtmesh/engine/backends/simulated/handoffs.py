"""Handoffs of real bytes: the KV of leases is written before it is announced, and checked before it is adopted."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from trtmesh.chassis.block_hashes import extend_names
from trtmesh.chassis.errors import BackendFailed
from trtmesh.engine.backends.simulated.engine import SimulatedHandoffs
from trtmesh.engine.backends.simulated.kv_content import LAYERS, KvContent, states_of
from trtmesh.engine.backends.simulated.sequence import SimulatedSequence
from trtmesh.engine.scheduling.blocks import NULL_BLOCK, Move
from trtmesh.engine.scheduling.handoffs import Sending
from trtmesh.engine.scheduling.leases import LeasedBlocks
from trtmesh.engine.scheduling.scheduler import Scheduler

NO_NAME = 0
"""Of a block that is not full."""


class WrittenHandoffs(SimulatedHandoffs):
    """The leases of both sides."""

    def __init__(self, scheduler: Scheduler[SimulatedSequence], content: KvContent) -> None:
        super().__init__(scheduler, layers=LAYERS)
        self._content = content

    def carry_out(self, moves: SequenceOf[Move]) -> None:
        self._content.carry_out(moves)

    # The receiver.

    def reserve(self, lease_id: str, tokens: int, block_hashes: SequenceOf[int]) -> None:
        super().reserve(lease_id, tokens, block_hashes)
        self._content.carry_out(self._scheduler.pool.take_moves())
        if leased := self._leases.get(lease_id):
            present = leased.present_tokens // self._content.tokens_per_block
            self._content.expect(leased.blocks[present:])

    def damage(self, lease_id: str) -> BackendFailed | None:
        """Finds blocks without the KV of the tokens of the sequence that is to adopt them."""
        sequence, leased = self.first_awaiting(lease_id), self._leases.get(lease_id)
        if sequence is None or leased is None:
            return None
        block = self._damaged_block(sequence, leased)
        if block is None:
            return None
        return BackendFailed(
            f"the KV in block {block} of lease {lease_id} is not that of the sequence's tokens"
        )

    def _damaged_block(self, sequence: SimulatedSequence, leased: LeasedBlocks) -> int | None:
        content, tokens = self._content, sequence.tokens[:-1]
        size = content.tokens_per_block
        names = extend_names([], sequence.root, tokens, size, len(tokens) // size)
        present, needed = leased.present_tokens // size, -(-len(tokens) // size)
        published = self._scheduler.pool.published
        for place, block in enumerate(leased.blocks[:present]):
            if place >= len(names) or published.find(names[place]) != block:
                return place
        received = leased.blocks[present:needed]
        damaged = content.damaged(received, states_of(sequence.root, tokens)[present * size :])
        if damaged is not None:
            return present + damaged
        if len(leased.blocks) < needed:
            return len(leased.blocks)
        content.name(received, names[present:])
        return None

    # The sender.

    def announce(
        self, sending: Iterable[Sending[SimulatedSequence]], layers: int | None = None
    ) -> None:
        """Writes the KV that is to be announced, unless it was written before."""
        sending = list(sending)
        for sequence, outgoing, last in sending:
            if self.outgoing.get(sequence.key) is outgoing:
                written = range(outgoing.layers, LAYERS if layers is None else layers)
                self._write(sequence, outgoing.announced, last, written)
        super().announce(sending, layers)

    def leave(self, sequence: SimulatedSequence, *, with_kv: bool) -> None:
        outgoing = self.outgoing.get(sequence.key)
        if outgoing and with_kv:
            last = self._scheduler.rules.blocks(len(sequence.tokens) - 1)
            self._write(sequence, outgoing.announced, last, range(outgoing.layers, LAYERS))
        super().leave(sequence, with_kv=with_kv)

    def _write(self, sequence: SimulatedSequence, first: int, last: int, layers: range) -> None:
        content, size = self._content, self._content.tokens_per_block
        if last <= first or not layers:
            return
        # Those of the last tokens may be new.
        content.carry_out(self._scheduler.pool.take_moves())
        tokens = sequence.tokens
        if sequence.states is None or len(sequence.states) < min(last * size, len(tokens)):
            sequence.states = states_of(sequence.root, tokens)
        full = min(last, len(tokens) // size)
        extend_names(sequence.hashes, sequence.root, tokens, size, full)
        names = [*sequence.hashes[first:full], *[NO_NAME] * (last - full)]
        blocks = sequence.blocks[first:last]
        missing = [
            place
            for place, block in enumerate(blocks)
            if block != NULL_BLOCK and not content.is_written(block, names[place])
        ]
        states = content.by_block(sequence.states[first * size :], len(blocks))
        content.write([blocks[place] for place in missing], states[missing], layers)
        if layers.stop == LAYERS:
            content.name(blocks[: full - first], sequence.hashes[first:full])
