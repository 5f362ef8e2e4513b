"""Handoffs between simulated backends over real bytes; the tests play services and router."""

from __future__ import annotations

from itertools import product
from typing import Any, TypeVar

import numpy as np
import pytest
from engine.simulated.runs import Run, item, running
from trtmesh.chassis.errors import BackendFailed, HandoffFailed, QueueFull
from trtmesh.chassis.vocabulary import KvCache, Sampling
from trtmesh.engine.backend import Awaiting, HandedOver, Offered, PartFinal, Reserved
from trtmesh.engine.backends.simulated.kv_content import LAYERS, states_of
from trtmesh.engine.handoff.block_plan import copies
from trtmesh.v1 import generation_pb2 as pb

N = TypeVar("N", Reserved, Offered, HandedOver, Awaiting)

PROMPT = tuple(range(40, 140))
HANDOFF = pb.FINISH_REASON_HANDOFF


async def news(run: Run, kind: type[N], lease: str = "L") -> N:
    """The news of a lease, once it comes."""

    def found() -> list[N]:
        return [each for each in run.news if isinstance(each, kind) and each.lease_id == lease]

    await run.until(found)
    return found()[0]


async def reserve(run: Run, tokens: int, names: tuple[int, ...] = (), lease: str = "L") -> Reserved:
    run.backend.reserve(lease, tokens, names)
    return await news(run, Reserved, lease)


def parts(run: Run, lease: str = "L") -> list[PartFinal]:
    return [each for each in run.news if isinstance(each, PartFinal) and each.lease_id == lease]


def transfer(sender: Run, receiver: Run, offered: Offered, reserved: Reserved) -> None:
    """Copies what the sender has announced and the receiver lacks."""
    source, target = sender.backend.kv_memory(), receiver.backend.kv_memory()
    assert source
    assert target
    for part in parts(sender, offered.lease_id):
        layers = range(part.first_layer, part.first_layer + part.layers)
        for (here, one), (there, other) in product(
            enumerate(source.shards), enumerate(target.shards)
        ):
            size = one.tokens_per_block
            first = max(part.first_block * size, reserved.present_tokens)
            tokens = range(first, min((part.first_block + part.blocks) * size, offered.tokens))
            for copy in copies(one, other, tokens, layers):
                from_blocks = [offered.blocks[each] for each in copy.source_blocks]
                to_blocks = [reserved.blocks[each] for each in copy.target_blocks]
                for run in copy.runs:
                    data = np.empty((len(from_blocks), run.size), dtype=np.uint8)
                    source.read(here, from_blocks, (run.source, run.source + run.size), data)
                    span = run.target, run.target + run.size
                    target.write(there, to_blocks, span, data)


def write(run: Run, reserved: Reserved, tokens: tuple[int, ...]) -> None:
    """Writes the KV of tokens into the blocks of a lease."""
    content = run.backend._content
    states = content.by_block(states_of(0, tokens), len(reserved.blocks))
    content.write(reserved.blocks, states, range(LAYERS))


def assert_clean(run: Run) -> None:
    assert run.backend.stats().used_blocks == 0


async def prefill(sender: Run, **asked: Any) -> HandedOver:
    sender.backend.submit(item(1, **asked, sender_lease_id="L"))
    return await news(sender, HandedOver)


SHAPES: list[tuple[dict[str, int], dict[str, int]]] = [
    ({}, {}),
    ({"tokens_per_block": 16}, {"tokens_per_block": 32, "shards": 2}),
    ({"tokens_per_block": 32, "shards": 2}, {"tokens_per_block": 16}),
    ({"token_bytes": 256, "prefill_tokens_per_step": 7}, {"token_bytes": 256}),
]


class TestPrefill:
    @pytest.mark.parametrize(("here", "there"), SHAPES)
    async def test_receiver_continues_on_the_senders_bytes(
        self, here: dict[str, int], there: dict[str, int]
    ) -> None:
        async with running(**here) as sender, running(**there) as receiver, running() as oracle:
            expected = await oracle.generate(item(1, 200, prompt=PROMPT))
            reserved = await reserve(receiver, len(PROMPT))
            handed = await prefill(sender, max_tokens=200, prompt=PROMPT)
            offered = await news(sender, Offered)
            assert (await sender.end(1)).reason == HANDOFF
            assert sender.tokens[1] == expected[:1] == [handed.last_token]
            assert (handed.content.tokens, handed.emitted_tokens) == (len(PROMPT), 1)
            transfer(sender, receiver, offered, reserved)
            sender.backend.drop("L")
            receiver.backend.submit(
                item(2, 200, prompt=PROMPT, emitted=(expected[0],), receiver_lease_id="L")
            )
            assert (await news(receiver, Awaiting)).content == handed.content
            receiver.backend.adopt("L")
            end = await receiver.end(2)
            assert end.reason == pb.FINISH_REASON_LENGTH
            assert end.cached_prompt_tokens == 0, "they came with the lease"
            assert receiver.tokens[2] == expected[1:]
            assert receiver.backend.stats().computed_prompt_tokens == 1
            assert_clean(sender)
            assert_clean(receiver)

    async def test_parts_cover_every_block_and_layer_in_order(self) -> None:
        async with running(prefill_tokens_per_step=40, tokens_per_block=16) as sender:
            await prefill(sender, max_tokens=9, prompt=PROMPT)
            spans = [
                (each.first_block, each.blocks, each.first_layer, each.layers)
                for each in parts(sender)
            ]
            chunks = [(0, 2), (2, 3), (5, 2)]
            assert spans == [(*chunk, layer, 1) for chunk in chunks for layer in range(4)]
            sender.backend.drop("L")

    async def test_parts_come_while_the_step_computes_later_layers(self) -> None:
        async with running(step_ms=40) as sender:
            sender.backend.submit(item(1, prompt=PROMPT, sender_lease_id="L"))
            await sender.until(lambda: parts(sender))
            assert len(parts(sender)) < 4
            assert 1 not in sender.tokens
            await news(sender, HandedOver)
            sender.backend.drop("L")

    async def test_regular_end_at_the_first_token_is_no_handoff(self) -> None:
        async with running() as sender:
            sender.backend.submit(item(1, 1, prompt=PROMPT, sender_lease_id="L"))
            assert (await sender.end(1)).reason == pb.FINISH_REASON_LENGTH
            assert not [each for each in sender.news if isinstance(each, HandedOver)]
            sender.backend.drop("L")
            assert_clean(sender)

    async def test_computed_blocks_of_an_earlier_prompt_are_offered_at_once(self) -> None:
        async with running() as sender, running() as receiver:
            await sender.generate(item(9, 1, prompt=PROMPT))
            reserved = await reserve(receiver, len(PROMPT))
            handed = await prefill(sender, max_tokens=9, prompt=PROMPT)
            assert next((each.first_block, each.blocks) for each in parts(sender)) == (0, 4)
            transfer(sender, receiver, await news(sender, Offered), reserved)
            await adopted(receiver, handed)
            sender.backend.drop("L")

    async def test_present_blocks_are_shared_and_not_transferred(self) -> None:
        async with running() as sender, running() as receiver:
            await receiver.generate(item(9, 1, prompt=PROMPT))
            names = tuple(receiver.stored)
            reserved = await reserve(receiver, len(PROMPT), names)
            assert reserved.present_tokens == 96
            handed = await prefill(sender, max_tokens=9, prompt=PROMPT)
            transfer(sender, receiver, await news(sender, Offered), reserved)
            await adopted(receiver, handed)
            sender.backend.drop("L")


async def adopted(receiver: Run, handed: HandedOver, lease: str = "L", key: int = 2) -> list[int]:
    """The tokens of the receiver for PROMPT."""
    assert handed.last_token is not None
    receiver.backend.submit(
        item(key, 9, prompt=PROMPT, emitted=(handed.last_token,), receiver_lease_id=lease)
    )
    await news(receiver, Awaiting, lease)
    receiver.backend.adopt(lease)
    end = await receiver.end(key)
    assert end.reason == pb.FINISH_REASON_LENGTH, end.error
    return receiver.tokens[key]


class TestGarbage:
    @pytest.mark.parametrize("wrong", ["missing", "flipped", "of_other_tokens", "stale"])
    async def test_adopting_other_kv_fails_and_names_the_block(self, wrong: str) -> None:
        async with running() as sender, running() as receiver:
            if wrong == "stale":
                # The same blocks with the same tokens, freed since.
                reserved = await reserve(receiver, len(PROMPT), lease="old")
                sender.backend.submit(item(5, 9, prompt=PROMPT, sender_lease_id="old"))
                await news(sender, HandedOver, "old")
                transfer(sender, receiver, await news(sender, Offered, "old"), reserved)
                for run in (sender, receiver):
                    run.backend.drop("old")
            reserved = await reserve(receiver, len(PROMPT))
            prompt = PROMPT if wrong != "of_other_tokens" else (*PROMPT[:50], 1, *PROMPT[51:])
            await prefill(sender, max_tokens=9, prompt=prompt)
            if wrong != "stale":
                transfer(sender, receiver, await news(sender, Offered), reserved)
            memory = receiver.backend.kv_memory()
            assert memory
            block = reserved.blocks[1]
            size = memory.shards[0].block_bytes
            if wrong == "missing":
                memory.write(0, [block], (0, size), np.zeros((1, size), dtype=np.uint8))
            if wrong == "flipped":
                byte = np.zeros((1, 1), dtype=np.uint8)
                memory.read(0, [block], (70, 71), byte)
                memory.write(0, [block], (70, 71), byte ^ np.uint8(1))
            receiver.backend.submit(item(2, 9, prompt=PROMPT, emitted=(50,), receiver_lease_id="L"))
            receiver.backend.adopt("L")
            end = await receiver.end(2)
            assert isinstance(end.error, BackendFailed)
            position = 0 if wrong == "stale" else 1
            assert f"block {position} of lease L" in str(end.error)
            sender.backend.drop("L")
            assert_clean(receiver)

    async def test_shared_blocks_of_other_tokens_fail(self) -> None:
        async with running() as receiver:
            await receiver.generate(item(9, 1, prompt=PROMPT))
            await reserve(receiver, len(PROMPT), tuple(receiver.stored))
            receiver.backend.submit(
                item(2, 9, prompt=(1, *PROMPT[1:]), emitted=(50,), receiver_lease_id="L")
            )
            receiver.backend.adopt("L")
            end = await receiver.end(2)
            assert isinstance(end.error, BackendFailed)
            assert "block 0 of lease L" in str(end.error)


SIDES: list[dict[str, Any]] = [{"sender_lease_id": "L"}, {"receiver_lease_id": "L"}]


class TestGroups:
    async def test_sequences_of_an_item_leave_before_the_first_token(self) -> None:
        sampling = Sampling(temperature=1.0, seed=3)
        async with running() as sender, running() as receiver, running() as oracle:
            oracle.backend.submit(item(keys=(1, 2, 3), prompt=PROMPT, sampling=sampling))
            for key in (1, 2, 3):
                await oracle.end(key)
            reserved = await reserve(receiver, len(PROMPT) - 1)
            sender.backend.submit(
                item(keys=(1, 2, 3), prompt=PROMPT, sampling=sampling, sender_lease_id="L")
            )
            handed = await news(sender, HandedOver)
            assert (handed.emitted_tokens, handed.last_token) == (0, None)
            assert [(await sender.end(key)).reason for key in (1, 2, 3)] == [HANDOFF] * 3
            assert not sender.tokens
            transfer(sender, receiver, await news(sender, Offered), reserved)
            sender.backend.drop("L")
            receiver.backend.submit(
                item(keys=(1, 2, 3), prompt=PROMPT, sampling=sampling, receiver_lease_id="L")
            )
            assert (await news(receiver, Awaiting)).content == handed.content
            receiver.backend.adopt("L")
            for key in (1, 2, 3):
                await receiver.end(key)
            assert receiver.tokens == oracle.tokens
            assert receiver.backend.stats().computed_prompt_tokens == 3, "the last token of each"

    @pytest.mark.parametrize("lease", ["sent", "received"])
    async def test_the_other_sequences_continue_after_the_end_of_the_first(
        self, lease: str
    ) -> None:
        async with running(prefill_tokens_per_step=1) as run:
            reserved = await reserve(run, len(PROMPT) - 1)
            write(run, reserved, PROMPT[:-1])
            side: dict[str, Any] = (
                {"sender_lease_id": "S"} if lease == "sent" else {"receiver_lease_id": "L"}
            )
            run.backend.submit(item(keys=(1, 2), prompt=PROMPT, **side))
            run.backend.stop([1], pb.FINISH_REASON_CANCELLED)
            assert (await run.end(1)).reason == pb.FINISH_REASON_CANCELLED
            run.backend.adopt("L")
            end = await run.end(2)
            assert end.reason == (HANDOFF if lease == "sent" else pb.FINISH_REASON_LENGTH)
            for each in "SL":
                run.backend.drop(each)
            assert_clean(run)

    async def test_stop_of_a_follower_leaves_the_others_to_adopt(self) -> None:
        async with running() as run:
            write(run, await reserve(run, len(PROMPT) - 1), PROMPT[:-1])
            run.backend.submit(item(keys=(1, 2), prompt=PROMPT, receiver_lease_id="L"))
            run.backend.stop([2], pb.FINISH_REASON_CANCELLED)
            run.backend.adopt("L")
            assert (await run.end(1)).reason == pb.FINISH_REASON_LENGTH

    @pytest.mark.parametrize("side", SIDES)
    async def test_stop_of_all_sequences_has_one_reason(self, side: dict[str, Any]) -> None:
        async with running(prefill_tokens_per_step=1) as run:
            await reserve(run, len(PROMPT))
            run.backend.submit(item(keys=(1, 2), prompt=PROMPT, **side))
            run.backend.stop([1, 2], pb.FINISH_REASON_CANCELLED)
            ends = [(await run.end(key)).reason for key in (1, 2)]
            assert ends == [pb.FINISH_REASON_CANCELLED] * 2
            run.backend.drop("L")


class TestRunning:
    async def test_running_sequence_moves_at_its_next_token(self) -> None:
        async with running() as sender, running() as receiver, running() as oracle:
            expected = await oracle.generate(item(1, 400, prompt=PROMPT))
            sender.backend.submit(item(1, 400, prompt=PROMPT))
            await sender.until(lambda: len(sender.tokens.get(1, [])) >= 150)
            seen = len(sender.tokens[1])
            sender.backend.hand_over(1, "L")
            handed = await news(sender, HandedOver)
            offered = await news(sender, Offered)
            assert len(sender.tokens[1]) == handed.emitted_tokens == seen + 1
            assert handed.content.tokens == offered.tokens == len(PROMPT) + seen
            reserved = await reserve(receiver, offered.tokens)
            transfer(sender, receiver, offered, reserved)
            sender.backend.drop("L")
            emitted = tuple(sender.tokens[1])
            receiver.backend.submit(
                item(2, 400, prompt=PROMPT, emitted=emitted, receiver_lease_id="L")
            )
            receiver.backend.adopt("L")
            await receiver.end(2)
            assert sender.tokens[1] + receiver.tokens[2] == expected
            assert_clean(sender)

    async def test_later_steps_leave_the_kv_of_a_lease_alone(self) -> None:
        async with running(tokens_per_block=4) as run:
            run.backend.submit(item(1, 400, prompt=PROMPT))
            await run.until(lambda: len(run.tokens.get(1, [])) >= 20)
            run.backend.hand_over(1, "L")
            handed = await news(run, HandedOver)
            await run.generate(item(2, 5))
            states = states_of(0, [*PROMPT, *run.tokens[1]][: handed.content.tokens])
            assert run.backend._content.damaged(handed.blocks, states) is None
            run.backend.drop("L")

    async def test_parked_sequence_returns_to_its_own_worker(self) -> None:
        async with running() as run, running() as oracle:
            expected = await oracle.generate(item(1, 60, prompt=PROMPT))
            run.backend.submit(item(1, 60, prompt=PROMPT))
            await run.until(lambda: run.tokens.get(1))
            run.backend.hand_over(1, "out")
            handed = await news(run, HandedOver, "out")
            reserved = await reserve(run, handed.content.tokens, tuple(run.stored), "in")
            full = handed.content.tokens // 32
            assert reserved.blocks[:full] == handed.blocks[:full]
            transfer(run, run, await news(run, Offered, "out"), reserved)
            run.backend.drop("out")
            emitted = tuple(run.tokens[1])
            run.backend.submit(item(2, 60, prompt=PROMPT, emitted=emitted, receiver_lease_id="in"))
            run.backend.adopt("in")
            await run.end(2)
            assert run.tokens[1] + run.tokens[2] == expected

    @pytest.mark.parametrize("key", [1, 2])
    async def test_one_of_several_sequences_is_handed_over(self, key: int) -> None:
        async with running() as sender, running() as receiver, running() as oracle:
            expected: dict[int, list[int]] = {}
            for run in (oracle, sender):
                run.backend.submit(item(keys=(1, 2, 3), prompt=PROMPT, max_tokens=400))
                if run is oracle:
                    for each in (1, 2, 3):
                        await run.end(each)
                    expected = dict(run.tokens)
            await sender.until(lambda: all(sender.tokens.get(each) for each in (1, 2, 3)))
            sender.backend.hand_over(key, "L")
            handed = await news(sender, HandedOver)
            offered = await news(sender, Offered)
            reserved = await reserve(receiver, offered.tokens)
            transfer(sender, receiver, offered, reserved)
            sender.backend.drop("L")
            assert handed.emitted_tokens == len(sender.tokens[key])
            receiver.backend.submit(
                item(
                    9,
                    400,
                    prompt=PROMPT,
                    emitted=tuple(sender.tokens[key]),
                    receiver_lease_id="L",
                    sequence_index=key - 1,
                )
            )
            receiver.backend.adopt("L")
            await receiver.end(9)
            for each in {1, 2, 3} - {key}:
                await sender.end(each)
            sender.tokens[key] += receiver.tokens[9]
            assert dict(sender.tokens) == expected
            assert_clean(sender)

    @pytest.mark.parametrize("lease", ["", "other"])
    async def test_other_sequences_fail_to_be_handed_over(self, lease: str) -> None:
        """One that waits, and one that is handed over already."""
        async with running(prefill_tokens_per_step=1) as run:
            run.backend.submit(item(1, 99, prompt=PROMPT, sender_lease_id=lease))
            run.backend.hand_over(1, "L")
            assert isinstance((await run.end(1)).error, HandoffFailed)

    async def test_unknown_sequences_and_leases_are_ignored(self) -> None:
        async with running() as run:
            run.backend.hand_over(7, "L")
            run.backend.adopt("L")
            run.backend.drop("L")
            await run.generate(item(1))
            assert not run.news


class TestExits:
    @pytest.mark.parametrize("when", ["waiting", "computing", "committed"])
    async def test_stop_and_drop_free_a_senders_blocks(self, when: str) -> None:
        async with running(prefill_tokens_per_step=1 if when == "computing" else 100) as run:
            run.backend.submit(item(1, prompt=PROMPT, sender_lease_id="L"))
            if when == "computing":
                await run.until(lambda: parts(run))
            if when == "committed":
                await news(run, HandedOver)
            run.backend.stop([1], pb.FINISH_REASON_CANCELLED)
            run.backend.drop("L")
            await run.end(1)
            assert_clean(run)

    async def test_end_of_an_awaiting_sequence_leaves_the_blocks_to_the_lease(self) -> None:
        async with running() as run:
            await reserve(run, len(PROMPT))
            run.backend.submit(item(1, prompt=PROMPT, emitted=(9,), receiver_lease_id="L"))
            assert run.backend.stats().waiting_sequences == 0
            run.backend.stop([1], pb.FINISH_REASON_CANCELLED)
            await run.end(1)
            assert run.backend.stats().used_blocks == 4
            run.backend.adopt("L")
            run.backend.drop("L")
            assert_clean(run)

    async def test_leases_keep_their_blocks_from_others(self) -> None:
        async with running(total_blocks=4) as run:
            assert len((await reserve(run, 33)).blocks) == 2
            full = await reserve(run, 65, lease="M")
            assert isinstance(full.error, QueueFull)
            run.backend.submit(item(1, 1, prompt=PROMPT))
            run.backend.drop("L")
            await run.end(1)


class TestRoom:
    async def test_adopted_sequences_start_before_others(self) -> None:
        async with running(max_batch_size=1) as run, running() as sender:
            reserved = await reserve(run, len(PROMPT))
            handed = await prefill(sender, max_tokens=9, prompt=PROMPT)
            transfer(sender, run, await news(sender, Offered), reserved)
            sender.backend.drop("L")
            run.backend.submit(item(8, 100))
            run.backend.submit(item(9, 1))
            await run.until(lambda: run.tokens.get(8))
            await adopted(run, handed)
            await run.end(9)
            assert list(run.ends) == [8, 2, 9]

    async def test_sequences_with_kv_do_not_block_each_other(self) -> None:
        """Each of three adopted sequences holds a third of the pool, and needs more than that."""
        async with running(total_blocks=12, tokens_per_block=32) as run, running() as sender:
            leases = [str(number) for number in range(3)]
            for lease in leases:
                key = 10 + int(lease)
                prompt = (key, *PROMPT[1:])
                reserved = await reserve(run, len(PROMPT), lease=lease)
                sender.backend.submit(item(key, 99, prompt=prompt, sender_lease_id=lease))
                await news(sender, HandedOver, lease)
                transfer(sender, run, await news(sender, Offered, lease), reserved)
                sender.backend.drop(lease)
                emitted = tuple(sender.tokens[key])
                submission = item(key, 99, prompt=prompt, emitted=emitted, receiver_lease_id=lease)
                run.backend.submit(submission)
            for lease in leases:
                run.backend.adopt(lease)
            for lease in leases:
                end = await run.end(10 + int(lease))
                assert end.reason == pb.FINISH_REASON_LENGTH
            computed = run.backend.stats().computed_prompt_tokens
            assert computed < 3 * 101, "KV without room to grow went back to the pool"

    async def test_room_of_a_stopped_sequence_with_kv_can_be_reserved(self) -> None:
        async with running(max_batch_size=1, total_blocks=12) as run:
            write(run, await reserve(run, len(PROMPT)), PROMPT)
            run.backend.submit(item(8, 30))
            await run.until(lambda: run.tokens.get(8))
            run.backend.submit(item(2, 200, prompt=PROMPT, emitted=(9,), receiver_lease_id="L"))
            run.backend.adopt("L")
            assert (await reserve(run, 64, lease="M")).error
            run.backend.stop([2], pb.FINISH_REASON_CANCELLED)
            assert not (await reserve(run, 11 * 32, lease="N")).error
            run.backend.drop("N")

    async def test_kv_without_reuse_is_adopted_and_not_published(self) -> None:
        kv_cache = KvCache(reuse=False)
        async with running() as sender, running() as receiver:
            reserved = await reserve(receiver, len(PROMPT))
            handed = await prefill(sender, prompt=PROMPT, kv_cache=kv_cache)
            transfer(sender, receiver, await news(sender, Offered), reserved)
            sender.backend.drop("L")
            emitted = (handed.last_token or 0,)
            receiver.backend.submit(
                item(2, prompt=PROMPT, emitted=emitted, kv_cache=kv_cache, receiver_lease_id="L")
            )
            receiver.backend.adopt("L")
            assert (await receiver.end(2)).reason == pb.FINISH_REASON_LENGTH
            assert not sender.stored
            assert not receiver.stored
