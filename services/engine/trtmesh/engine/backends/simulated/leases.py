"""Blocks of a simulated worker that belong to handoffs: reserved for KV, offered while it is computed, handed over."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from trtmesh.chassis.errors import BackendFailed, QueueFull
from trtmesh.engine.backend import (
    Awaiting,
    HandedOver,
    HandoffNews,
    HandoffState,
    Offered,
    PartFinal,
    Reserved,
)
from trtmesh.engine.backends.simulated.block_pool import BlockPool
from trtmesh.engine.backends.simulated.kv_content import LAYERS, KvContent, States, states_of
from trtmesh.engine.backends.simulated.sequence import Sequence
from trtmesh.engine.handoff.identity import content_of
from trtmesh.engine.kv_blocks import extend_names


@dataclass(frozen=True, slots=True)
class Holding:
    """Blocks of a lease, in the order of their tokens: shared ones by name, then private ones by number."""

    shared: list[int]
    private: list[int]


@dataclass(slots=True)
class _Offer:
    """A sequence under a sender's lease, and the blocks of its KV."""

    lease_id: str
    sequence: Sequence
    tokens: int
    """Tokens with KV at the handoff."""
    blocks: list[int]
    names: list[int]
    """Names of the full blocks."""
    states: States
    """By block."""
    announced: int = 0
    """Leading blocks in parts."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Blocks that this step completes."""

    offer: _Offer
    first: int
    end: int


@dataclass(slots=True)
class Leases:
    """The leases of both sides. A sequence has its blocks before its handoff and after its adoption."""

    pool: BlockPool
    content: KvContent
    news: list[HandoffNews] = field(default_factory=list)
    _holdings: dict[str, Holding] = field(default_factory=dict)
    _awaiting: dict[str, Sequence] = field(default_factory=dict)
    _offers: dict[int, _Offer] = field(default_factory=dict)
    """By key of their sequence."""
    _chunks: list[_Chunk] = field(default_factory=list)
    _layer: int = 0
    """Next layer of the step."""

    @property
    def computes(self) -> bool:
        """Whether this step completes blocks of a lease."""
        return bool(self._chunks)

    def take_news(self) -> list[HandoffNews]:
        news, self.news = self.news, []
        return news

    # The receiver.

    def reserve(
        self, lease_id: str, tokens: int, names: SequenceOf[int], promised: int
    ) -> list[int]:
        """Allocates blocks, and leaves `promised` free ones; returns the names of evicted blocks."""
        size = self.content.tokens_per_block
        shared = list(names[: min(self.pool.match(names), tokens // size)])
        private = -(-tokens // size) - len(shared)
        if not self.pool.can_acquire(shared, private + promised):
            error = QueueFull(
                f"{private} KV blocks are needed for a handoff, and {self.pool.free_blocks} are free, of which"
                f" {promised} wait for sequences with KV"
            )
            self.news.append(Reserved(lease_id, error=error))
            return []
        fresh, evicted = self.pool.acquire(shared, private)
        self.content.expect(fresh)
        self._holdings[lease_id] = Holding(shared, fresh)
        blocks = tuple(self.pool.numbers(shared) + fresh)
        self.news.append(Reserved(lease_id, blocks, len(shared) * size))
        return evicted

    def wait(self, lease_id: str, sequence: Sequence) -> None:
        """Lets a sequence wait for the KV of all its tokens but the last."""
        self._awaiting[lease_id] = sequence
        content = content_of(sequence.root, sequence.tokens[:-1])
        self.news.append(Awaiting(lease_id, sequence.key, content))

    def forget(self, sequence: Sequence) -> None:
        """Ends the part of a sequence that waits for a lease, or is offered; a lease keeps its blocks."""
        self._offers.pop(sequence.key, None)
        if self._awaiting.get(sequence.receiver_lease_id) is sequence:
            del self._awaiting[sequence.receiver_lease_id]

    def adopt(self, lease_id: str) -> tuple[Sequence, Holding] | None:
        """The sequence that waits for a lease, and the blocks that it has from now on."""
        if lease_id not in self._holdings or lease_id not in self._awaiting:
            return None
        return self._awaiting.pop(lease_id), self._holdings.pop(lease_id)

    def check(self, lease_id: str, sequence: Sequence, holding: Holding) -> BackendFailed | None:
        """Finds blocks without the KV of the sequence's tokens."""
        tokens, size = sequence.tokens[:-1], self.content.tokens_per_block
        names = extend_names([], sequence.root, tokens, size, len(tokens) // size)
        present, needed = len(holding.shared), -(-len(tokens) // size)
        received = holding.private[: max(0, needed - present)]
        wrong = _first_difference(holding.shared, names)
        if wrong is None:
            states = states_of(sequence.root, tokens)[present * size :]
            damaged = self.content.damaged(received, states)
            wrong = None if damaged is None else present + damaged
        if wrong is None and present + len(received) < needed:
            wrong = present + len(received)
        if wrong is None:
            self.content.name(received, names[present:])
            return None
        return BackendFailed(
            f"the KV in block {wrong} of lease {lease_id} is not that of the sequence's tokens"
        )

    def state_of(self, _sequence: Sequence) -> HandoffState | None:
        """The state with which a handed over sequence ends: leases have none."""
        return None

    def close(self) -> None:
        """Frees what is kept for others."""

    def drop(self, lease_id: str) -> None:
        """Returns the blocks of a lease to the pool."""
        holding = self._holdings.pop(lease_id, None)
        if holding is not None:
            self.pool.release(holding.shared, holding.private)

    # The sender.

    def offer(self, lease_id: str, sequence: Sequence, tokens: int) -> None:
        """Offers the first `tokens` tokens of a sequence that has blocks for them."""
        size = self.content.tokens_per_block
        known = sequence.tokens[:tokens]
        names = extend_names([], sequence.root, known, size, tokens // size)
        blocks = self.pool.numbers(sequence.hashes[: sequence.shared_blocks]) + sequence.private
        del blocks[-(-tokens // size) :]
        states = self.content.by_block(states_of(sequence.root, known), len(blocks))
        offer = _Offer(lease_id, sequence, tokens, blocks, names, states)
        self._offers[sequence.key] = offer
        self.news.append(Offered(lease_id, sequence.key, tuple(blocks), tokens))

    def announce(self, sequence: Sequence, tokens: int) -> None:
        """Announces the KV of the first `tokens` tokens, which were computed before."""
        chunk = self._complete(self._offers[sequence.key], tokens)
        if chunk:
            self._write(chunk, range(LAYERS))

    def compute(self, sequence: Sequence, tokens: int) -> None:
        """The step computes the KV of the first `tokens` tokens, layer by layer."""
        chunk = self._complete(self._offers[sequence.key], tokens)
        if chunk:
            self._chunks.append(chunk)

    def finish_layer(self) -> int:
        """Announces the KV of the step's next layer; returns the number of layers left."""
        for chunk in self._chunks:
            if not chunk.offer.sequence.ended:
                self._write(chunk, range(self._layer, self._layer + 1))
        self._layer += 1
        return LAYERS - self._layer

    def finish_step(self) -> None:
        """Announces the KV of the step's other layers."""
        while self._chunks and self.finish_layer():
            pass
        self._chunks, self._layer = [], 0

    def commit(self, sequence: Sequence, holding: Holding, emitted_tokens: int) -> None:
        """Gives the blocks of a sequence to its lease, with the KV of all its tokens but the last."""
        offer = self._offers.pop(sequence.key)
        self._holdings[offer.lease_id] = holding
        length = sequence.rule.prompt_tokens + emitted_tokens
        self.news.append(
            HandedOver(
                offer.lease_id,
                sequence.key,
                tuple(offer.blocks),
                content_of(sequence.root, sequence.tokens[: length - 1]),
                emitted_tokens,
                sequence.tokens[length - 1] if emitted_tokens else None,
            )
        )

    def _complete(self, offer: _Offer, tokens: int) -> _Chunk | None:
        """The blocks that are complete with the KV of `tokens` tokens and in no part."""
        full = tokens // self.content.tokens_per_block
        end = len(offer.blocks) if tokens >= offer.tokens else full
        if end <= offer.announced:
            return None
        chunk = _Chunk(offer, offer.announced, end)
        offer.announced = end
        return chunk

    def _write(self, chunk: _Chunk, layers: range) -> None:
        """Writes KV unless a lease wrote it before, and announces it."""
        offer, content = chunk.offer, self.content
        names = offer.names + [0] * (len(offer.blocks) - len(offer.names))
        missing = [
            position
            for position in range(chunk.first, chunk.end)
            if not content.is_written(offer.blocks[position], names[position])
        ]
        content.write([offer.blocks[each] for each in missing], offer.states[missing], layers)
        if layers.stop == LAYERS:
            full = min(chunk.end, len(offer.names))
            content.name(offer.blocks[chunk.first : full], offer.names[chunk.first : full])
        blocks = chunk.end - chunk.first
        self.news.append(PartFinal(offer.lease_id, chunk.first, blocks, layers.start, len(layers)))


def _first_difference(shared: SequenceOf[int], names: SequenceOf[int]) -> int | None:
    """The position of the first shared block with another name than the sequence's."""
    for position, name in enumerate(shared):
        if position >= len(names) or names[position] != name:
            return position
    return None
