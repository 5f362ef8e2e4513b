"""Conservation of blocks and sequences under random operations of both sides of handoffs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
from engine.short_names import by_short_names
from engine.simulated.runs import item
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)
from trtmesh.chassis.errors import BackendFailed
from trtmesh.chassis.vocabulary import KvCache
from trtmesh.engine.backend import Awaiting, HandedOver, PartFinal, Reserved, SequenceEnd
from trtmesh.engine.backends.simulated.kv_content import LAYERS, states_of
from trtmesh.engine.backends.simulated.scheduler import Scheduler
from trtmesh.engine.backends.simulated.sequence import Sequence
from trtmesh.engine.backends.simulated.settings import SimulatedSettings
from trtmesh.engine.backends.simulated.tokens import TokenSource
from trtmesh.engine.handoff.identity import content_of
from trtmesh.engine.stopping import EndRule
from trtmesh.v1 import generation_pb2 as pb

BLOCKS, SIZE = 8, 4
SETTINGS = by_short_names(
    SimulatedSettings,
    total_blocks=BLOCKS,
    tokens_per_block=SIZE,
    shards=2,
    prefill_tokens_per_step=6,
    max_batch_size=3,
)
SOURCE = TokenSource(32, 126, 2, 0.0)


@dataclass
class Kept:
    """A receiver's lease, and the prompt of the sequence that is to adopt it."""

    lease: str
    prompt: tuple[int, ...]
    reserved: Reserved
    is_right: bool
    keys: tuple[int, ...] = ()


prompts = st.builds(
    lambda family, length: tuple(range(family, family + length)),
    st.integers(40, 43),
    st.integers(1, 14),
)
new_tokens = st.integers(1, 12)
numbers = st.integers(0, 20)


class Handoffs(RuleBasedStateMachine):
    """One worker; the rules play its service, and peers that bring right or wrong KV."""

    sent = Bundle("sent")
    kept = Bundle("kept")

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(SETTINGS)
        self.names = 0
        self.sequences: dict[int, Sequence] = {}
        self.ends: dict[int, SequenceEnd] = {}
        self.news: list[object] = []
        self.prompt_tokens: int | None = None
        """Of the step under way."""

    def submit(
        self,
        prompt: tuple[int, ...],
        new: int,
        count: int = 1,
        emitted: int = 0,
        *,
        reuse: bool = True,
        sender: str = "",
        receiver: str = "",
    ) -> tuple[int, ...]:
        keys = tuple(range(len(self.sequences), len(self.sequences) + count))
        submission = item(
            prompt=prompt[: len(prompt) - emitted],
            emitted=prompt[len(prompt) - emitted :],
            keys=keys,
            kv_cache=KvCache(reuse=reuse),
            sender_lease_id=sender,
            receiver_lease_id=receiver,
        )
        limit = min(len(prompt) + new, BLOCKS * SIZE + 1)
        end_rule = EndRule(submission.config.stopping, (2,), len(prompt) - emitted, limit)
        sequences = [Sequence(submission, index, end_rule, SOURCE, SIZE) for index in range(count)]
        self.sequences |= zip(keys, sequences, strict=True)
        self.scheduler.add(sequences)
        self.collect()
        return keys

    def collect(self) -> None:
        output = self.scheduler.leftover()
        if output:
            self.note(output.ends, output.handoffs)

    def pick(self, number: int) -> int | None:
        """The key of a live sequence."""
        live = [key for key in self.sequences if key not in self.ends]
        return live[number % len(live)] if live else None

    def note(self, ends: list[SequenceEnd], news: SequenceOf[object]) -> None:
        for end in ends:
            assert end.key not in self.ends
            self.ends[end.key] = end
        self.news += news
        for each in news:
            if isinstance(each, HandedOver):
                tokens = self.sequences[each.key].tokens[: each.content.tokens]
                assert self.scheduler.content.damaged(each.blocks, states_of(0, tokens)) is None

    def name(self) -> str:
        self.names += 1
        return f"lease-{self.names}"

    @rule(prompt=prompts, new=new_tokens, count=st.integers(1, 2), reuse=st.booleans())
    def start(self, prompt: tuple[int, ...], new: int, count: int, reuse: bool) -> None:
        self.submit(prompt, new, count, reuse=reuse)

    @rule(target=sent, prompt=prompts, new=new_tokens, count=st.integers(1, 3), reuse=st.booleans())
    def start_offered(self, prompt: tuple[int, ...], new: int, count: int, reuse: bool) -> object:
        lease = self.name()
        return lease, self.submit(prompt, new, count, reuse=reuse, sender=lease)

    @rule(target=sent, number=numbers)
    def hand_over(self, number: int) -> object:
        key = self.pick(number)
        if key is None:
            return multiple()
        lease = self.name()
        self.scheduler.hand_over(key, lease)
        self.collect()
        return lease, (key,)

    @rule(target=kept, prompt=prompts, is_right=st.booleans(), surplus=st.integers(0, 5))
    def reserve(self, prompt: tuple[int, ...], is_right: bool, surplus: int) -> object:
        lease, tokens = self.name(), len(prompt) - 1
        names = (self.sequences and next(reversed(self.sequences.values())).hashes) or []
        mine = Sequence(item(prompt=prompt), 0, _rule(prompt), SOURCE, SIZE).names(tokens)
        shared = [name for name, other in zip(mine, names, strict=False) if name == other]
        self.scheduler.reserve(lease, tokens + surplus, shared)
        self.collect()
        reserved = self.news[-1]
        assert isinstance(reserved, Reserved)
        if reserved.error:
            return multiple()
        present = reserved.present_tokens // SIZE
        states = states_of(0, prompt[:-1])[reserved.present_tokens :]
        blocks = reserved.blocks[present : -(-tokens // SIZE)]
        if not blocks:
            is_right = True
        elif is_right:
            content = self.scheduler.content
            content.write(blocks, content.by_block(states, len(blocks)), range(LAYERS))
        return Kept(lease, prompt, reserved, is_right)

    @rule(target=kept, kept=consumes(kept), new=new_tokens, count=st.integers(1, 3))
    def bind(self, kept: Kept, new: int, count: int) -> object:
        if kept.keys:
            return kept
        kept.keys = self.submit(kept.prompt, new, count, receiver=kept.lease)
        awaiting = self.news[-1]
        assert isinstance(awaiting, Awaiting)
        assert awaiting.content == content_of(0, kept.prompt[:-1])
        return kept

    @rule(kept=consumes(kept))
    def adopt(self, kept: Kept) -> None:
        waits = bool(kept.keys) and kept.keys[0] not in self.ends
        self.scheduler.adopt(kept.lease)
        self.collect()
        if waits:
            end = self.ends.get(kept.keys[0])
            assert (end is None) == kept.is_right
            assert end is None or isinstance(end.error, BackendFailed)
        else:
            self.scheduler.leases.drop(kept.lease)

    @rule(kept=consumes(kept))
    def drop_received(self, kept: Kept) -> None:
        self.scheduler.stop(list(kept.keys), pb.FINISH_REASON_CANCELLED)
        self.scheduler.leases.drop(kept.lease)
        self.collect()

    @rule(sent=consumes(sent))
    def drop_sent(self, sent: tuple[str, tuple[int, ...]]) -> None:
        lease, keys = sent
        self.scheduler.stop(list(keys), pb.FINISH_REASON_CANCELLED)
        self.scheduler.leases.drop(lease)
        self.collect()
        assert set(keys) <= set(self.ends)

    @rule(number=numbers)
    def stop(self, number: int) -> None:
        key = self.pick(number)
        if key is not None:
            self.scheduler.stop([key], pb.FINISH_REASON_CANCELLED)
            self.collect()
            assert key in self.ends

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.begin()
            self.finish()

    @precondition(lambda self: self.prompt_tokens is None)
    @rule()
    def begin(self) -> None:
        if self.prompt_tokens is None:
            self.prompt_tokens = self.scheduler.begin()
            if self.scheduler.leases.computes:
                self.scheduler.leases.finish_layer()

    @precondition(lambda self: self.prompt_tokens is not None)
    @rule()
    def finish(self) -> None:
        assert self.prompt_tokens is not None
        output = self.scheduler.finish(self.prompt_tokens)
        self.prompt_tokens = None
        self.note(output.ends, output.handoffs)

    @invariant()
    def every_block_has_the_owners_that_hold_it(self) -> None:
        pool, leases = self.scheduler.pool, self.scheduler.leases
        live = [each for key, each in self.sequences.items() if key not in self.ends]
        holdings = [(each.hashes[: each.shared_blocks], each.private) for each in live]
        holdings += [(each.shared, each.private) for each in leases._holdings.values()]
        private = [block for _, blocks in holdings for block in blocks]
        published = list(pool._numbers.values())
        fresh = range(pool._next, BLOCKS + 1)
        assert sorted([*private, *published, *pool._free, *fresh]) == list(range(1, BLOCKS + 1))
        held = Counter(name for names, _ in holdings for name in names)
        assert held == +Counter(pool._references)
        assert set(pool._idle) == {name for name, count in pool._references.items() if not count}

    @invariant()
    def pending_tokens_are_computed_here(self) -> None:
        """Those whose KV a sequence waits for are not among them."""
        live = [each for key, each in self.sequences.items() if key not in self.ends]
        pending = sum(each.prefill_left for each in live if not each.waits)
        assert self.scheduler.pending_prompt_tokens == pending

    @invariant()
    def free_blocks_have_no_content(self) -> None:
        memory = self.scheduler.content.memory
        for shard in range(2):
            rows = memory.memory(shard).rows[self.scheduler.pool._free]
            assert np.isin(rows, (0, 0xFD)).all()

    def teardown(self) -> None:
        """Once no lease is held, every sequence ends by itself, and nothing is left."""
        scheduler = self.scheduler
        waiting = [key for key, each in self.sequences.items() if each.waits]
        scheduler.stop(waiting, pb.FINISH_REASON_CANCELLED)
        for number in range(self.names + 1):
            scheduler.leases.drop(f"lease-{number}")
        for _ in range(len(self.sequences) * 40):
            if not scheduler.has_work:
                break
            self.step(1)
            for each in self.news:
                if isinstance(each, HandedOver):
                    scheduler.leases.drop(each.lease_id)
        self.collect()
        assert set(self.ends) == set(self.sequences)
        assert scheduler.pool.used_blocks == scheduler.waiting_sequences == 0
        assert scheduler.running_sequences == scheduler.awaiting_sequences == 0
        assert scheduler.pending_prompt_tokens == 0
        self.parts_are_complete()

    def parts_are_complete(self) -> None:
        for each in self.news:
            if isinstance(each, HandedOver):
                parts = [
                    part
                    for part in self.news
                    if isinstance(part, PartFinal) and part.lease_id == each.lease_id
                ]
                covered = [
                    (block, layer)
                    for part in parts
                    for block in range(part.first_block, part.first_block + part.blocks)
                    for layer in range(part.first_layer, part.first_layer + part.layers)
                ]
                assert len(covered) == len(set(covered)) == len(each.blocks) * LAYERS


def _rule(prompt: tuple[int, ...]) -> EndRule:
    return EndRule(item().config.stopping, (2,), len(prompt), len(prompt) + 1)


TestHandoffs = Handoffs.TestCase
TestHandoffs.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
