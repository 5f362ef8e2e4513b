"""Handoffs between engine services over real sockets: every end of a lease leaves nothing."""

from __future__ import annotations

from typing import Any

import pytest
from engine.handoff.pairs import (
    LIFE_MS,
    PROMPT,
    SLOW,
    Pair,
    attach,
    lease,
    oracle,
    pair,
    prefill,
    release,
    renew,
    reserve,
)
from engine_streams import eventually, router_stream, stop, submit
from trtmesh.engine.handoff import fetch_server
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import kv_transfer_pb2 as transfer

STEP_MS = 1000
"""Of a sender whose steps are longer than anything else."""
CANCELLED, HANDOFF = pb.FINISH_REASON_CANCELLED, pb.FINISH_REASON_HANDOFF


def continuation(
    handle: int, receiver_lease: str, token: int = 50, prompt: tuple[int, ...] = PROMPT
) -> epb.EngineCommand:
    return submit(
        handle, 20, prompt=(*prompt, token), emitted_tokens=1, receiver_lease_id=receiver_lease
    )


async def reason(both: Pair, handle: int = 1, *, at_sender: bool = False) -> str:
    """The error's reason, or the name of the reason, of a sequence's end."""
    stream = both.sender.stream if at_sender else both.receiver.stream
    end = (await stream.end(handle)).end
    assert end
    return end.error.reason or pb.FinishReason.Name(end.reason)


class TestWholeHandoffs:
    @pytest.mark.parametrize(
        ("sender", "receiver"),
        [
            ({}, {}),
            ({"tokens_per_block": 16}, {"tokens_per_block": 32, "shards": 2}),
            ({"tokens_per_block": 32, "shards": 2}, {"tokens_per_block": 16}),
            ({"prefill_tokens_per_step": 7}, {}),
        ],
    )
    @pytest.mark.parametrize("transport", ["grpc", "shared_memory", "nixl"])
    async def test_receiver_continues_the_sequence(
        self, sender: dict[str, Any], receiver: dict[str, Any], transport: str
    ) -> None:
        if transport == "nixl":
            pytest.importorskip("nixl_cu12")
        expected = await oracle()
        async with pair(sender, receiver, {"transports": (transport,)}) as both:
            assert await both.hand_over() == expected
            await both.settled()
            assert both.sender.sent.consumed == both.receiver.received.consumed == 1
            assert both.sender.sent.bytes >= both.receiver.received.bytes > 0

    async def test_present_blocks_are_not_transferred(self) -> None:
        expected = await oracle()
        async with pair() as both:
            await both.receiver.stream.send(submit(9, 1, prompt=PROMPT))
            await both.receiver.stream.end(9)
            hashes = [
                hash_
                for event in both.receiver.stream.kv_events
                for e in event.events
                for hash_ in e.stored.block_hashes
            ]
            assert hashes
            receiver_lease = lease()
            assert await both.reserve(receiver_lease, block_hashes=hashes) == 96
            descriptor = await both.prefill(1, lease())
            await both.attach(receiver_lease, descriptor)
            first = await both.sender.stream.end(1)
            await both.receiver.stream.send(continuation(1, receiver_lease, first.token_ids[0]))
            rest = await both.receiver.stream.end(1)
            assert first.token_ids + rest.token_ids == expected
            whole = both.sender.sent.bytes
            assert both.receiver.received.bytes == whole

    async def test_running_sequence_is_handed_over(self) -> None:
        expected = await oracle(max_tokens=50)
        # Steps last longer than a command travels.
        async with pair({"step_ms": 200}) as both:
            sender_lease, receiver_lease = lease(), lease()
            sender, receiver = both.sender.stream, both.receiver.stream
            await both.reserve(receiver_lease, tokens=160)
            await sender.send(submit(1, 50, prompt=PROMPT))
            await sender.until(lambda: 1 in sender.received)
            command = transfer.HandOverCommand(
                handle=1, lease_id=sender_lease, expires_in_ms=LIFE_MS
            )
            await sender.send(epb.EngineCommand(hand_over=command))
            first = await sender.end(1)
            assert first.end
            assert first.end.reason == HANDOFF
            descriptor = first.end.handoff
            descriptor.address = both.sender.engine.address
            assert descriptor.emitted_tokens == len(first.token_ids)
            assert descriptor.computed_tokens == len(PROMPT) + len(first.token_ids) - 1
            assert descriptor.first_token_id == first.token_ids[-1]
            await both.attach(receiver_lease, descriptor)
            await receiver.send(
                submit(
                    1,
                    50,
                    prompt=(*PROMPT, *first.token_ids),
                    emitted_tokens=len(first.token_ids),
                    receiver_lease_id=receiver_lease,
                )
            )
            rest = await receiver.end(1)
            assert first.token_ids + rest.token_ids == expected

    async def test_sequences_of_an_item_share_the_prompts_lease(self) -> None:
        config = pb.GenerationConfig()
        config.sampling.num_return_sequences = 3
        config.sampling.temperature = 1
        config.sampling.seed = 9
        async with pair() as both:
            receiver_lease = lease()
            await both.reserve(receiver_lease)
            await both.attach(receiver_lease, await both.prefill(1, lease(), config=config))
            ends = await both.sender.stream.ends([1, 2, 3])
            for each in ends.values():
                assert each.end
                assert each.end.reason == HANDOFF
                assert each.end.handoff.block_ids
                assert each.token_ids == []
            await both.receiver.stream.send(
                submit(1, 20, prompt=PROMPT, config=config, receiver_lease_id=receiver_lease)
            )
            outputs = await both.receiver.stream.ends([1, 2, 3])
            assert all(len(each.token_ids) == 20 for each in outputs.values())

    async def test_two_hundred_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # All dial at once, and nobody renews a lease, on whatever machine.
        monkeypatch.setattr(fetch_server, "OPEN_SECONDS", 120.0)
        long_ms = 600_000
        prompts = {handle: tuple(range(40, 90 + handle % 30)) for handle in range(200)}
        async with pair(handoff={"dial_seconds": 60}) as both:
            streams = both.sender.stream, both.receiver.stream
            leases = {handle: (lease(), lease()) for handle in prompts}
            await streams[1].send(
                *(
                    reserve(leases[each][1], len(prompts[each]), expires_in_ms=long_ms)
                    for each in prompts
                )
            )
            await streams[1].until(lambda: len(streams[1].blocks_reserved) == len(prompts))
            await streams[0].send(
                *(
                    prefill(each, leases[each][0], prompts[each], lease_expires_in_ms=long_ms)
                    for each in prompts
                )
            )
            await streams[0].until(lambda: len(streams[0].handoffs_offered) == len(prompts))
            for handle, descriptor in streams[0].handoffs_offered.items():
                descriptor.address = both.sender.engine.address
                await streams[1].send(attach(leases[handle][1], descriptor))
            firsts = await streams[0].ends(prompts)
            await streams[1].send(
                *(
                    continuation(each, leases[each][1], firsts[each].token_ids[0], prompts[each])
                    for each in prompts
                )
            )
            rests = await streams[1].ends(prompts)
            assert {each.end.error.message for each in rests.values() if each.end} == {""}
            assert {len(each.token_ids) for each in rests.values()} == {19}
            await both.settled()
            assert both.sender.sent.consumed == both.receiver.received.consumed == len(prompts)

    async def test_memory_of_messages_is_free_while_the_sequence_runs(self) -> None:
        async with pair() as both:
            _, receiver_lease = await both.attached()
            (handoff,) = both.receiver.handoffs.received.all()
            first = await both.sender.stream.end(1)
            await both.receiver.stream.send(continuation(1, receiver_lease, first.token_ids[0]))
            await eventually(lambda: both.receiver.received.consumed)
            assert handoff._transfer
            assert handoff._transfer._parts
            assert all(streamed is None for _, streamed, _ in handoff._transfer._parts)
            del handoff

    async def test_context_only_lease_outlives_its_stream(self) -> None:
        config = pb.GenerationConfig()
        config.handoff.phase = pb.GENERATION_PHASE_CONTEXT_ONLY
        async with pair(sender={"step_ms": STEP_MS}) as both:
            async with router_stream(both.sender.engine.address, router="first") as stream:
                await stream.send(prefill(1, lease(), config=config))
                first = await stream.end(1)
                assert first.end
                descriptor = first.end.handoff
            # All of its life, though the prefill took longer than what is missing.
            assert descriptor.expires_in_ms > LIFE_MS - STEP_MS
            await eventually(lambda: both.sender.engine.service.metrics.open_streams == 1)
            assert both.sender.sent.held == 1
            receiver_lease = lease()
            await both.reserve(receiver_lease)
            descriptor.address = both.sender.engine.address
            await both.attach(receiver_lease, descriptor)
            await both.receiver.stream.send(continuation(1, receiver_lease, first.token_ids[0]))
            rest = await both.receiver.stream.end(1)
            assert first.token_ids + rest.token_ids == await oracle()


class TestEndsOfTheReceiver:
    async def test_release_of_a_reservation(self) -> None:
        async with pair() as both:
            receiver_lease = lease()
            await both.reserve(receiver_lease)
            assert both.receiver.backend.stats().used_blocks == 4
            await both.receiver.stream.send(release(receiver_lease))
            await both.settled()
            assert both.receiver.received.released == 1

    async def test_release_before_the_answer(self) -> None:
        async with pair() as both:
            receiver_lease = lease()
            await both.receiver.stream.send(reserve(receiver_lease, 100), release(receiver_lease))
            await eventually(lambda: both.receiver.received.released == 1)

    async def test_release_during_the_fetch(self) -> None:
        async with pair(SLOW) as both:
            sender_lease, receiver_lease = await both.attached()
            await both.receiver.stream.send(release(receiver_lease))
            # The sender ends with the fetch.
            assert await reason(both, at_sender=True) == "HANDOFF_FAILED"
            assert sender_lease not in both.sender.stream.handoffs_failed

    async def test_stop_of_the_waiting_sequence(self) -> None:
        async with pair(SLOW) as both:
            sender_lease, receiver_lease = await both.attached()
            await both.receiver.stream.send(continuation(1, receiver_lease), stop(1))
            assert await reason(both) == "FINISH_REASON_STOPPED"
            await both.sender.stream.send(release(sender_lease))
            await both.sender.stream.end(1)

    async def test_deadline_of_the_waiting_sequence(self) -> None:
        async with pair(SLOW) as both:
            sender_lease, receiver_lease = await both.attached()
            command = continuation(1, receiver_lease)
            command.submit.timeout_ms = 50
            await both.receiver.stream.send(command)
            assert await reason(both) == "FINISH_REASON_CANCELLED"
            await both.sender.stream.send(release(sender_lease))
            await both.sender.stream.end(1)

    async def test_expiry_is_reported(self) -> None:
        async with pair() as both:
            receiver_lease = lease()
            await both.reserve(receiver_lease, expires_in_ms=20)
            assert (await both.receiver.failed(receiver_lease)).reason == "HANDOFF_FAILED"
            await both.settled()
            assert both.receiver.received.expired == 1

    async def test_expiry_ends_the_waiting_sequence(self) -> None:
        async with pair() as both:
            receiver_lease = lease()
            await both.reserve(receiver_lease)
            await both.receiver.stream.send(
                continuation(1, receiver_lease), renew(receiver_lease, expires_in_ms=20)
            )
            assert await reason(both) == "HANDOFF_FAILED"
            assert not both.receiver.stream.handoffs_failed

    async def test_renewed_lease_lives_on(self) -> None:
        async with pair() as both:
            renewed, other = lease(), lease()
            stream = both.receiver.stream
            # In a message: no pause of this process lies between them.
            await stream.send(
                reserve(renewed, len(PROMPT), expires_in_ms=100),
                renew(renewed),
                reserve(other, len(PROMPT), expires_in_ms=100),
            )
            await both.receiver.failed(other)
            assert both.receiver.received.held == 1
            assert list(stream.handoffs_failed) == [other]
            await stream.send(release(renewed))

    async def test_renewal_sets_the_end_of_a_granted_lease(self) -> None:
        async with pair() as both:
            receiver_lease = lease()
            await both.reserve(receiver_lease)
            await both.receiver.stream.send(renew(receiver_lease, expires_in_ms=20))
            assert (await both.receiver.failed(receiver_lease)).reason == "HANDOFF_FAILED"
            await both.settled()
            assert both.receiver.received.expired == 1

    async def test_end_of_the_stream(self) -> None:
        async with pair(SLOW) as both:
            async with router_stream(both.receiver.engine.address) as stream:
                sender_lease, receiver_lease = lease(), lease()
                await stream.send(reserve(receiver_lease, 100))
                await stream.until(lambda: stream.blocks_reserved)
                descriptor = await both.prefill(1, sender_lease)
                await stream.send(attach(receiver_lease, descriptor))
                await stream.send(continuation(1, receiver_lease))
                await eventually(lambda: both.receiver.engine.service.metrics.live_sequences)
                await eventually(lambda: both.sender.fetches(sender_lease))
            await both.receiver.settled()
            assert await reason(both, at_sender=True) == "HANDOFF_FAILED"

    async def test_wrong_tokens(self) -> None:
        async with pair() as both:
            _, receiver_lease = await both.attached()
            other = (*PROMPT[:-1], 1)
            await both.receiver.stream.send(continuation(1, receiver_lease, prompt=other))
            assert await reason(both) == "HANDOFF_FAILED"
            await both.sender.stream.end(1)

    async def test_full_pool_refuses(self) -> None:
        async with pair(receiver={"total_blocks": 3}) as both:
            await both.receiver.stream.send(reserve(lease(), 100))
            await both.receiver.stream.until(lambda: both.receiver.stream.blocks_reserved)
            (answer,) = both.receiver.stream.blocks_reserved
            assert answer.error.reason == "QUEUE_FULL"
            assert answer.error.worker

    async def test_submit_with_an_unknown_lease_fails(self) -> None:
        async with pair() as both:
            await both.receiver.stream.send(continuation(1, lease()))
            assert await reason(both) == "HANDOFF_FAILED"

    async def test_second_submit_with_a_lease_fails_alone(self) -> None:
        async with pair(SLOW) as both:
            sender_lease, receiver_lease = await both.attached()
            await both.receiver.stream.send(
                continuation(1, receiver_lease), continuation(2, receiver_lease)
            )
            assert await reason(both, 2) == "HANDOFF_FAILED"
            assert both.receiver.received.held == 1
            await both.sender.stream.send(release(sender_lease))
            assert await reason(both) == "HANDOFF_FAILED"
            await both.sender.stream.end(1)


class TestEndsOfTheSender:
    async def test_release_before_the_handoff_ends_the_sequence(self) -> None:
        async with pair(SLOW) as both:
            sender_lease = lease()
            await both.prefill(1, sender_lease)
            await both.sender.stream.send(release(sender_lease))
            assert await reason(both, at_sender=True) == "FINISH_REASON_CANCELLED"
            assert both.sender.sent.released == 1

    async def test_release_of_parked_kv(self) -> None:
        async with pair() as both:
            sender_lease = lease()
            await both.prefill(1, sender_lease)
            assert await reason(both, at_sender=True) == "FINISH_REASON_HANDOFF"
            assert both.sender.backend.stats().used_blocks
            await both.sender.stream.send(release(sender_lease))
            await both.settled()

    async def test_stop_before_the_handoff(self) -> None:
        async with pair(SLOW) as both:
            _, receiver_lease = await both.attached()
            await both.sender.stream.send(stop(1))
            assert await reason(both, at_sender=True) == "FINISH_REASON_STOPPED"
            assert (await both.receiver.failed(receiver_lease)).reason == "HANDOFF_FAILED"

    async def test_regular_end_at_the_first_token(self) -> None:
        async with pair() as both:
            receiver_lease = lease()
            await both.reserve(receiver_lease)
            descriptor = await both.prefill(1, lease(), max_tokens=1)
            await both.attach(receiver_lease, descriptor)
            assert await reason(both, at_sender=True) == "FINISH_REASON_LENGTH"
            assert (await both.receiver.failed(receiver_lease)).reason == "HANDOFF_FAILED"

    async def test_expiry_before_the_handoff_fails_the_sequence(self) -> None:
        async with pair(SLOW) as both:
            await both.sender.stream.send(prefill(1, lease(), lease_expires_in_ms=20))
            assert await reason(both, at_sender=True) == "HANDOFF_FAILED"
            assert both.sender.sent.expired == 1

    async def test_parked_kv_goes_when_sequences_wait_for_its_blocks(self) -> None:
        async with pair({"total_blocks": 7}, handoff={"dial_seconds": 0.1}) as both:
            leases = lease(), lease()
            short = PROMPT[:60]
            for handle, each in enumerate(leases):
                await both.prefill(handle, each, prompt=short, max_tokens=4)
                await both.sender.stream.end(handle)
            await both.sender.stream.send(submit(5, 4, prompt=tuple(range(50, 200))))
            assert len((await both.sender.stream.end(5)).token_ids) == 4
            assert both.sender.sent.released == 1
            assert both.sender.handoffs.sent.get(leases[1])
            await both.sender.stream.send(release(leases[1]))

    async def test_parked_kv_goes_although_another_sequence_runs(self) -> None:
        async with pair(
            {"total_blocks": 12, "step_ms": 50}, handoff={"dial_seconds": 0.05}
        ) as both:
            stream = both.sender.stream
            await both.prefill(1, lease())
            await stream.end(1)
            await stream.send(submit(2, 200, prompt=(5, 6, 7)))
            await stream.until(lambda: 2 in stream.received)
            await stream.send(submit(3, 4, prompt=tuple(range(50, 150))))
            assert len((await stream.end(3)).token_ids) == 4
            assert both.sender.sent.released == 1
            assert both.sender.engine.service.metrics.live_sequences == 1
            await stream.send(stop(2))
            await stream.end(2)

    async def test_parked_kv_goes_when_a_reservation_needs_its_blocks(self) -> None:
        async with pair({"total_blocks": 7}, handoff={"dial_seconds": 0.05}) as both:
            worker, leases = both.sender, [lease() for _ in range(3)]
            for handle, each in enumerate(leases):
                prompt = range(100 * handle, 100 * handle + 60)
                await both.prefill(handle, each, prompt=tuple(prompt), max_tokens=4)
                await worker.stream.end(handle)
            await eventually(lambda: all(each.is_parked for each in worker.handoffs.sent.all()))
            assert worker.backend.stats().free_blocks == 1
            reserved = lease()
            await worker.stream.send(reserve(reserved, 100))
            await worker.stream.until(lambda: worker.stream.blocks_reserved)
            (answer,) = worker.stream.blocks_reserved
            assert not answer.HasField("error"), answer.error.message
            assert [bool(worker.handoffs.sent.get(each)) for each in leases] == [False, False, True]
            too_much = lease()
            await worker.stream.send(reserve(too_much, 1000))
            await worker.stream.until(lambda: len(worker.stream.blocks_reserved) == 2)
            assert worker.stream.blocks_reserved[1].error.reason == "QUEUE_FULL"
            await worker.stream.send(release(reserved))

    async def test_kv_stays_for_a_receiver_that_connects(self) -> None:
        async with pair({"total_blocks": 7}, handoff={"dial_seconds": 60}) as both:
            stream, sender_lease = both.sender.stream, lease()
            await both.prefill(1, sender_lease)
            await stream.end(1)
            await stream.send(submit(2, 4, prompt=tuple(range(50, 200))))
            await eventually(lambda: both.sender.backend.stats().waiting_sequences)
            count = len(stream.loads)
            await stream.until(lambda: len(stream.loads) > count + 3)
            assert both.sender.sent.held == 1
            await stream.send(release(sender_lease))
            await stream.end(2)

    async def test_expiry_of_parked_kv_frees_it(self) -> None:
        async with pair() as both:
            sender_lease = lease()
            await both.prefill(1, sender_lease)
            assert await reason(both, at_sender=True) == "FINISH_REASON_HANDOFF"
            await both.sender.stream.send(renew(sender_lease, expires_in_ms=20))
            await both.settled()
            assert both.sender.sent.expired == 1

    async def test_end_of_the_stream(self) -> None:
        async with pair(SLOW) as both:
            receiver_lease = lease()
            await both.reserve(receiver_lease)
            async with router_stream(both.sender.engine.address) as stream:
                await stream.send(prefill(1, lease()))
                await stream.until(lambda: stream.handoffs_offered)
                descriptor = stream.handoffs_offered[1]
                descriptor.address = both.sender.engine.address
                await both.attach(receiver_lease, descriptor)
                await eventually(lambda: both.sender.handoffs.sent.all()[0]._fetch)
            assert (await both.receiver.failed(receiver_lease)).reason == "HANDOFF_FAILED"

    async def test_renewal_of_an_unknown_lease_is_answered(self) -> None:
        async with pair() as both:
            unknown = lease()
            await both.sender.stream.send(renew(unknown), release(lease()))
            assert (await both.sender.failed(unknown)).reason == "HANDOFF_FAILED"
            assert both.sender.engine.service.metrics.errors["HANDOFF_FAILED"] == 1

    async def test_renewal_that_crosses_the_end_of_its_lease_is_no_error_of_the_worker(
        self,
    ) -> None:
        async with pair() as both:
            sender_lease, receiver_lease = await both.attached()
            first = await both.sender.stream.end(1)
            await both.receiver.stream.send(continuation(1, receiver_lease, first.token_ids[0]))
            await both.receiver.stream.end(1)
            await both.settled()
            for side, ended in ((both.sender, sender_lease), (both.receiver, receiver_lease)):
                await side.stream.send(renew(ended))
                failed = await side.failed(ended)
                assert failed.reason == "HANDOFF_FAILED"
                assert failed.worker
                assert not side.engine.service.metrics.errors["HANDOFF_FAILED"]

    async def test_hand_over_of_an_ended_sequence_is_answered(self) -> None:
        async with pair() as both:
            sender_lease = lease()
            command = transfer.HandOverCommand(
                handle=7, lease_id=sender_lease, expires_in_ms=LIFE_MS
            )
            await both.sender.stream.send(epb.EngineCommand(hand_over=command))
            assert (await both.sender.failed(sender_lease)).reason == "HANDOFF_FAILED"


class TestRefusedDescriptors:
    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"protocol_version": 2}, "version 2"),
            ({"compatibility_hash": b"other"}, "another model"),
            ({"backend_state": bytes(2**20)}, "descriptor of"),
            (
                {"transports": [transfer.KvTransportOffer(transport=transfer.KV_TRANSPORT_NIXL)]},
                "no transport",
            ),
            ({"block_ids": []}, "no blocks"),
            ({"block_ids": [0] * 4}, "no blocks"),
            ({"block_ids": [1, 0, 3, 4]}, "null blocks after others"),
            ({"block_ids": range(1, 6)}, "more than were reserved"),
        ],
    )
    async def test_unusable_kv_is_refused(self, fields: dict[str, Any], words: str) -> None:
        async with pair(SLOW) as both:
            sender_lease, receiver_lease = lease(), lease()
            await both.reserve(receiver_lease)
            descriptor = await both.prefill(1, sender_lease)
            for name in fields:
                descriptor.ClearField(name)  # type: ignore[arg-type]  # Names of fields.
            descriptor.MergeFrom(transfer.HandoffDescriptor(**fields))
            await both.attach(receiver_lease, descriptor)
            error = await both.receiver.failed(receiver_lease)
            assert error.reason == "HANDOFF_FAILED"
            assert words in error.message
            assert both.sender.sent.held == 1
            await both.sender.stream.send(release(sender_lease))
            await both.sender.stream.end(1)

    async def test_other_shapes_are_refused(self) -> None:
        async with pair(SLOW) as both:
            sender_lease, receiver_lease = lease(), lease()
            await both.reserve(receiver_lease)
            descriptor = await both.prefill(1, sender_lease)
            descriptor.shards[0].data_type = pb.DATA_TYPE_INT64
            await both.attach(receiver_lease, descriptor)
            assert (await both.receiver.failed(receiver_lease)).reason == "HANDOFF_FAILED"
            await both.sender.stream.send(release(sender_lease))
            await both.sender.stream.end(1)
