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
from searches import examples
from trtmesh.chassis.block_hashes import extend_names
from trtmesh.chassis.errors import BackendFailed
from trtmesh.chassis.stopping import EndRule
from trtmesh.chassis.vocabulary import KvCache
from trtmesh.engine.backend import Awaiting, HandedOver, PartFinal, Reserved, SequenceEnd
from trtmesh.engine.backends.simulated.backend import SimulatedBackend
from trtmesh.engine.backends.simulated.kv_content import LAYERS, states_of
from trtmesh.engine.backends.simulated.sequence import SimulatedSequence, sequences_of
from trtmesh.engine.backends.simulated.settings import SimulatedSettings
from trtmesh.engine.handoff.identity import content_of
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
        backend = SimulatedBackend(SETTINGS)
        self.engine, self.content = backend._engine, backend._content
        self.names = 0
        self.sequences: dict[int, SimulatedSequence] = {}
        self.ends: dict[int, SequenceEnd] = {}
        self.news: list[object] = []
        self.handed_over: dict[str, HandedOver] = {}
        self.is_under_way = False
        """Whether a step is."""

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
        sequences = sequences_of(submission, end_rule, None)
        self.sequences |= {key: each for each in sequences for key in each.keys}
        self.engine.add(sequences)
        self.collect()
        return keys

    def collect(self) -> None:
        output = self.engine.leftover()
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
                self.handed_over[each.lease_id] = each

    def check_empty(self, blocks: SequenceOf[int]) -> None:
        """Nothing is left of what the blocks held before."""
        memory = self.content.memory
        for shard in range(2):
            assert np.isin(memory.memory(shard).rows[list(blocks)], (0, 0xFD)).all()

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
        self.engine.hand_over(key, lease)
        self.collect()
        return lease, (key,)

    @rule(target=kept, prompt=prompts, is_right=st.booleans(), surplus=st.integers(0, 5))
    def reserve(self, prompt: tuple[int, ...], is_right: bool, surplus: int) -> object:
        lease, tokens = self.name(), len(prompt) - 1
        names = (self.sequences and next(reversed(self.sequences.values())).hashes) or []
        mine = extend_names([], 0, prompt, SIZE, tokens // SIZE)
        shared = [name for name, other in zip(mine, names, strict=False) if name == other]
        self.engine.reserve(lease, tokens + surplus, shared)
        self.collect()
        reserved = self.news[-1]
        assert isinstance(reserved, Reserved)
        if reserved.error:
            return multiple()
        present = reserved.present_tokens // SIZE
        self.check_empty(reserved.blocks[present:])
        states = states_of(0, prompt[:-1])[reserved.present_tokens :]
        blocks = reserved.blocks[present : -(-tokens // SIZE)]
        if not blocks:
            is_right = True
        elif is_right:
            content = self.content
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
        self.engine.adopt(kept.lease)
        self.collect()
        if waits:
            end = self.ends.get(kept.keys[0])
            assert (end is None) == kept.is_right
            assert end is None or isinstance(end.error, BackendFailed)
        else:
            self.engine.drop(kept.lease)

    @rule(kept=consumes(kept))
    def drop_received(self, kept: Kept) -> None:
        self.engine.stop(list(kept.keys), pb.FINISH_REASON_CANCELLED)
        self.engine.drop(kept.lease)
        self.collect()

    @rule(sent=consumes(sent))
    def drop_sent(self, sent: tuple[str, tuple[int, ...]]) -> None:
        lease, keys = sent
        self.engine.stop(list(keys), pb.FINISH_REASON_CANCELLED)
        self.engine.drop(lease)
        self.collect()
        assert set(keys) <= set(self.ends)

    @rule(number=numbers)
    def stop(self, number: int) -> None:
        key = self.pick(number)
        if key is not None:
            self.engine.stop([key], pb.FINISH_REASON_CANCELLED)
            self.collect()
            assert key in self.ends

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.begin()
            self.finish()

    @precondition(lambda self: not self.is_under_way)
    @rule()
    def begin(self) -> None:
        if not self.is_under_way:
            self.is_under_way = True
            self.engine.begin()
            if self.engine.computes_sent_kv:
                self.engine.finish_layer()

    @precondition(lambda self: self.is_under_way)
    @rule()
    def finish(self) -> None:
        assert self.is_under_way
        output = self.engine.finish()
        self.is_under_way = False
        self.note(output.ends, output.handoffs)

    @invariant()
    def every_block_has_the_owners_that_hold_it(self) -> None:
        scheduler, leases = self.engine.scheduler, self.engine.handoffs._leases
        holders = [each.blocks for each in scheduler.sequences]
        holders += [each.blocks for each in leases.values()]
        held = Counter(block for blocks in holders for block in blocks)
        assert held == Counter(scheduler.pool._references)
        assert scheduler.pool.used_blocks == len(held)

    @invariant()
    def blocks_of_leases_keep_their_content(self) -> None:
        for lease in self.handed_over.keys() & self.engine.handoffs._leases.keys():
            each = self.handed_over[lease]
            tokens = self.sequences[each.key].tokens[: each.content.tokens]
            assert self.content.damaged(each.blocks, states_of(0, tokens)) is None

    @invariant()
    def pending_tokens_are_computed_here(self) -> None:
        """Those whose KV a sequence waits for are not among them."""
        scheduler = self.engine.scheduler
        pending = sum(each.pending_prompt_tokens for each in scheduler.sequences)
        assert scheduler.pending_prompt_tokens == pending

    def teardown(self) -> None:
        """Once no lease is held, every sequence ends by itself, and nothing is left."""
        engine = self.engine
        waiting = [each.key for each in engine.scheduler.sequences if each.receiver_lease]
        engine.stop(waiting, pb.FINISH_REASON_CANCELLED)
        for number in range(self.names + 1):
            engine.drop(f"lease-{number}")
        for _ in range(len(self.sequences) * 40):
            if not engine.has_work:
                break
            self.step(1)
            for each in self.news:
                if isinstance(each, HandedOver):
                    engine.drop(each.lease_id)
        self.collect()
        assert set(self.ends) == set(self.sequences)
        scheduler = engine.scheduler
        assert scheduler.pool.used_blocks == scheduler.present_sequences == 0
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


TestHandoffs = Handoffs.TestCase
TestHandoffs.settings = settings(
    max_examples=examples(50, soak=100), stateful_step_count=40, deadline=None
)
