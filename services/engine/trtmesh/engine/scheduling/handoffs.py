"""BlockHandoffs of KV to and from other workers, between the steps of an engine and while a step writes KV."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Generic

from trtmesh.chassis.errors import HandoffFailed, QueueFull
from trtmesh.engine.backend import Awaiting, HandedOver, HandoffNews, Offered, PartFinal, Reserved
from trtmesh.engine.handoff.identity import content_of
from trtmesh.engine.scheduling.blocks import NULL_BLOCK
from trtmesh.engine.scheduling.leases import LeasedBlocks, Outgoing
from trtmesh.engine.scheduling.scheduler import Scheduler
from trtmesh.engine.scheduling.sequence import Chunk, S, ScheduledSequence

Sending = tuple[S, Outgoing, int]
"""A sequence, and the leading blocks without a later write."""


class BlockHandoffs(Generic[S]):
    """The blocks of leases, and the sequences that leave or await KV.

    The blocks of a sequence are announced in runs: each run has the blocks completed by a chunk, and the first run the
    reused blocks too. A run is announced in groups of layers, as the KV is written.
    """

    def __init__(self, scheduler: Scheduler[S], *, layers: int, layers_per_part: int) -> None:
        self.news: list[HandoffNews] = []
        self.outgoing: dict[int, Outgoing] = {}
        """By the keys of the sequences."""
        self._scheduler = scheduler
        self._layers = layers
        self._group = layers_per_part
        self._leases: dict[str, LeasedBlocks] = {}
        self._awaiting: dict[str, list[S]] = {}

    def take_news(self) -> list[HandoffNews]:
        news, self.news = self.news, []
        return news

    def reserve(self, lease_id: str, tokens: int, block_hashes: SequenceOf[int]) -> None:
        """The caller carries out the moves of the pool before the answer is delivered."""
        leased = self._scheduler.reserve(tokens, block_hashes)
        if leased is None:
            error = QueueFull(
                f"has no room for the KV of {tokens} tokens beside its sequences; try another worker",
                field="the KV cache",
            )
            self.news.append(Reserved(lease_id, error=error))
            return
        self._leases[lease_id] = leased
        self.news.append(Reserved(lease_id, tuple(leased.blocks), leased.present_tokens))

    def drop(self, lease_id: str) -> list[S]:
        """Frees the blocks of a lease; returns the waiting sequences."""
        leased = self._leases.pop(lease_id, None)
        if leased:
            self._scheduler.pool.release(leased.blocks)
        return self._living(self._awaiting.pop(lease_id, []))

    def expect(self, lease_id: str, sequences: SequenceOf[S]) -> bool:
        """Lets the sequences of an item wait for the KV of a lease. Returns False for an unknown lease."""
        if lease_id not in self._leases:
            return False
        self._awaiting[lease_id] = list(sequences)
        first = self.first_awaiting(lease_id)
        if first and first.is_prepared:
            self.report_awaiting(first)
        return True

    def first_awaiting(self, lease_id: str) -> S | None:
        """The first waiting sequence of a lease, the future owner of the blocks."""
        return next(iter(self._living(self._awaiting.get(lease_id, []))), None)

    def report_awaiting(self, sequence: S) -> None:
        """Names the content awaited by a sequence with a complete prompt."""
        content = content_of(sequence.root, sequence.tokens[:-1])
        self.news.append(Awaiting(sequence.receiver_lease, sequence.key, content))

    def adopt(self, lease_id: str) -> None:
        """Lets the waiting sequences of a lease start, the first with the blocks."""
        sequences = self._living(self._awaiting.pop(lease_id, []))
        if not sequences:
            return
        for each in sequences:
            each.leader = sequences[0] if each is not sequences[0] else None
        self._scheduler.adopt(sequences[0], self._leases.pop(lease_id))
        for each in sequences[1:]:
            self._scheduler.ready(each)

    def sending(self, chunks: Iterable[Chunk[S]]) -> list[Sending[S]]:
        """The sequences among `chunks` with a handoff; the first chunk offers their blocks. Raises HandoffFailed where
        a chunk would write to announced blocks again."""
        return [
            self._sent_with(chunk, outgoing)
            for chunk in chunks
            if (outgoing := chunk.sequence.outgoing) and outgoing.is_pinned
        ]

    def _sent_with(self, chunk: Chunk[S], outgoing: Outgoing) -> Sending[S]:
        rules, sequence = self._scheduler.rules, chunk.sequence
        if not outgoing.is_offered:
            first = max(rules.sent_from(sequence), sequence.num_dropped)
            self._offer(sequence, outgoing, first, outgoing.tokens)
        if outgoing.is_announced_from(chunk.start, rules.tokens_per_block):
            raise HandoffFailed("a part of the KV was announced before its computation failed")
        # A guided sequence that sits out computes its last token again.
        is_guided = sequence.config.guided_decoding is not None
        if chunk.completes and not is_guided:
            return sequence, outgoing, rules.blocks(outgoing.tokens)
        end = chunk.start + chunk.count - (chunk.completes and is_guided)
        return sequence, outgoing, end // rules.tokens_per_block

    def announce(self, sending: Iterable[Sending[S]], layers: int | None = None) -> None:
        """Announces complete blocks once the first `layers` layers are written, by default all."""
        for sequence, outgoing, last in sending:
            # After the end of the sequence, the blocks may have other owners.
            if self.outgoing.get(sequence.key) is outgoing:
                self._announce(outgoing, last, self._layers if layers is None else layers)

    def _announce(self, outgoing: Outgoing, last: int, written: int) -> None:
        first, blocks = outgoing.announced, last - outgoing.announced
        while blocks > 0 and outgoing.layers < self._layers:
            end = min(outgoing.layers + self._group, self._layers)
            if end > written:
                return
            part = PartFinal(
                outgoing.lease_id, first, blocks, outgoing.layers, end - outgoing.layers
            )
            self.news.append(part)
            outgoing.layers = end
        outgoing.announced = max(first, last)
        outgoing.layers = 0

    def leave(self, sequence: S, *, with_kv: bool) -> None:
        """Forgets an ending sequence. With `with_kv`, the blocks pass to the lease."""
        outgoing = self.outgoing.pop(sequence.key, None)
        if outgoing is None or not with_kv:
            return
        rules, tokens = self._scheduler.rules, sequence.tokens[:-1]
        if not outgoing.is_offered:
            self._offer(sequence, outgoing, sequence.num_dropped, len(tokens))
        self._announce(outgoing, rules.blocks(len(tokens)), self._layers)
        blocks = _sent_blocks(sequence, outgoing.first, rules.blocks(len(tokens)))
        self._scheduler.pool.hold(blocks)
        self._leases[outgoing.lease_id] = LeasedBlocks(blocks)
        emitted = sequence.generated_tokens
        self.news.append(
            HandedOver(
                outgoing.lease_id,
                sequence.key,
                tuple(blocks),
                content_of(sequence.root, tokens),
                emitted,
                sequence.tokens[-1] if emitted else None,
            )
        )

    def _offer(self, sequence: S, outgoing: Outgoing, first: int, tokens: int) -> None:
        """Offers the blocks of a sequence from `first` on; no receiver needs earlier blocks."""
        outgoing.is_offered = True
        outgoing.first = outgoing.announced = first
        blocks = _sent_blocks(sequence, first, self._scheduler.rules.blocks(tokens))
        self.news.append(Offered(outgoing.lease_id, sequence.key, tuple(blocks), tokens))

    def _living(self, sequences: Iterable[S]) -> list[S]:
        return [each for each in sequences if each.lives]


def _sent_blocks(sequence: ScheduledSequence, first: int, last: int) -> list[int]:
    return [NULL_BLOCK] * first + sequence.blocks[first:last]
