"""Commands about leases and roles, and the facts about handoffs that routers get."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest
from engine.handoff.pairs import (
    LIFE_MS,
    PROMPT,
    SLOW,
    attach,
    lease,
    pair,
    prefill,
    release,
    reserve,
    side,
)
from engine_streams import RouterStream, eventually, router_stream, serving, submit
from recording_backend import RecordingBackend
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.backend import (
    BlocksCleared,
    HandedOver,
    HeldAdapter,
    SequenceEnd,
    StepOutput,
)
from trtmesh.engine.handoff.descriptor import MAX_DESCRIPTOR_BYTES
from trtmesh.engine.handoff.send_run import SentBlocks
from trtmesh.engine.service.streams import KvMirror
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import engine_pb2_grpc
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import kv_transfer_pb2 as transfer

LEASE = "0123456789abcdef" * 2


def set_role(role: epb.WorkerRole.ValueType) -> epb.EngineCommand:
    return epb.EngineCommand(set_role=epb.SetRoleCommand(role=role))


def hand_over(handle: int, lease_id: str, expires_in_ms: int = LIFE_MS) -> epb.EngineCommand:
    command = transfer.HandOverCommand(
        handle=handle, lease_id=lease_id, expires_in_ms=expires_in_ms
    )
    return epb.EngineCommand(hand_over=command)


async def refusal(stream: RouterStream, command: epb.EngineCommand) -> pb.Error:
    """The error of a reservation."""
    stream.blocks_reserved.clear()
    await stream.send(command)
    await stream.until(lambda: stream.blocks_reserved)
    return stream.blocks_reserved[0].error


class TestReservations:
    @pytest.mark.parametrize(
        ("fields", "field"),
        [
            ({"lease_id": ""}, "reserve_blocks.lease_id"),
            ({"lease_id": LEASE.upper()}, "reserve_blocks.lease_id"),
            ({"lease_id": LEASE + "0"}, "reserve_blocks.lease_id"),
            ({"tokens": 0}, "reserve_blocks.tokens"),
            ({"tokens": 10**6}, "reserve_blocks.tokens"),
            ({"expires_in_ms": 0}, "reserve_blocks.expires_in_ms"),
            ({"expires_in_ms": 600_001}, "reserve_blocks.expires_in_ms"),
            ({"block_hashes": range(4)}, "reserve_blocks.block_hashes"),
        ],
    )
    async def test_invalid_reservation_is_refused_alone(
        self, fields: dict[str, Any], field: str
    ) -> None:
        given: dict[str, Any] = {"lease_id": LEASE, "tokens": 100} | fields
        async with side() as worker:
            error = await refusal(worker.stream, reserve(**given))
            assert (error.reason, list(error.fields)) == ("INVALID_FIELD", [field])
            assert not (await refusal(worker.stream, reserve(LEASE, 100))).reason
            await worker.stream.send(release(LEASE))
            await worker.settled()

    async def test_load_has_the_tokens_that_the_blocks_lack(self) -> None:
        async with pair() as both:
            await both.hand_over(prompt=PROMPT[:64])
            receiver_lease = lease()
            known = both.receiver.stream.kv_events[0].events[0].stored.block_hashes[:1]
            present = await both.reserve(receiver_lease, 96, block_hashes=known)
            assert present == 32
            assert both.receiver.load.receiving_tokens == 64
            assert both.receiver.load.received_handoffs.held == 1
            await both.receiver.stream.send(release(receiver_lease))
            await both.settled()
            assert both.receiver.load.receiving_tokens == 0

    async def test_id_is_granted_once(self) -> None:
        async with side() as worker:
            assert not (await refusal(worker.stream, reserve(LEASE, 100))).reason
            await worker.stream.send(release(LEASE))
            await worker.settled()
            error = await refusal(worker.stream, reserve(LEASE, 100))
            assert error.reason == "ALREADY_EXISTS"
            assert worker.received.granted == 1

    @pytest.mark.parametrize("setting", ["max_leases", "max_leases_per_stream"])
    async def test_leases_are_limited(self, setting: str) -> None:
        async with side({setting: 1}) as worker:
            first = lease()
            assert not (await refusal(worker.stream, reserve(first, 10))).reason
            error = await refusal(worker.stream, reserve(lease(), 10))
            assert error.reason == "QUEUE_FULL"
            assert ("this router" in error.message) is (setting == "max_leases_per_stream")
            async with router_stream(worker.engine.address, router="other") as other:
                reason = (await refusal(other, reserve(lease(), 10))).reason
                assert reason == ("QUEUE_FULL" if setting == "max_leases" else "")
            await worker.stream.send(release(first))
            await worker.settled()

    @pytest.mark.parametrize("setting", ["max_leases", "max_leases_per_stream"])
    async def test_unanswered_reservations_count(self, setting: str) -> None:
        async with side({setting: 2}) as worker:
            leases = [lease() for _ in range(5)]
            await worker.stream.send(*(reserve(each, 10) for each in leases))
            answers = worker.stream.blocks_reserved
            await worker.stream.until(lambda: len(answers) == len(leases))
            reasons = {answer.lease_id: answer.error.reason for answer in answers}
            assert sorted(reasons.values()) == ["", "", *["QUEUE_FULL"] * 3]
            granted = [each for each in leases if not reasons[each]]
            await worker.stream.send(*map(release, granted))
            await worker.settled()
            assert not (await refusal(worker.stream, reserve(lease(), 10))).reason
            for held in worker.handoffs.received.all():
                held.release()

    async def test_draining_worker_refuses(self) -> None:
        async with side(step_ms=100) as worker:
            await worker.stream.send(submit(1, 10_000))
            await worker.stream.until(lambda: worker.stream.received)
            drain = asyncio.create_task(worker.engine.service.drain())
            await worker.stream.until(lambda: worker.stream.loads[-1].draining)
            assert (await refusal(worker.stream, reserve(lease(), 10))).reason == "DRAINING"
            drain.cancel()

    async def test_attach_to_an_unknown_lease_is_answered(self) -> None:
        async with side() as worker:
            await worker.stream.send(attach(LEASE, transfer.HandoffDescriptor()))
            assert (await worker.failed(LEASE)).reason == "HANDOFF_FAILED"

    async def test_descriptor_of_another_adapter_is_refused(self) -> None:
        async with pair(SLOW) as both:
            sender_lease, receiver_lease = lease(), lease()
            await both.reserve(receiver_lease)
            command = attach(receiver_lease, await both.prefill(1, sender_lease))
            command.attach_sender.adapter_id = 3
            command.attach_sender.adapter_version = "v1"
            await both.receiver.stream.send(command)
            assert "adapter" in (await both.receiver.failed(receiver_lease)).message
            await both.sender.stream.send(release(sender_lease))
            await both.sender.stream.end(1)


class TestSubmits:
    @pytest.mark.parametrize(
        ("fields", "field"),
        [
            ({"sender_lease_id": "x"}, "submit.sender_lease_id"),
            ({"sender_lease_id": LEASE}, "submit.lease_expires_in_ms"),
            ({"receiver_lease_id": "x"}, "submit.receiver_lease_id"),
            ({"lease_expires_in_ms": 5}, "submit.lease_expires_in_ms"),
            (
                {"sender_lease_id": LEASE, "lease_expires_in_ms": 700_000},
                "submit.lease_expires_in_ms",
            ),
            (
                {"sender_lease_id": LEASE, "receiver_lease_id": LEASE},
                "submit.sender_lease_id",
            ),
        ],
    )
    async def test_invalid_lease_fails_the_item(self, fields: dict[str, Any], field: str) -> None:
        async with side() as worker:
            await worker.stream.send(submit(1, **fields))
            end = (await worker.stream.end(1)).end
            assert end
            assert end.error.reason == "INVALID_FIELD"
            assert end.error.fields[0] == field
            assert worker.sent.granted == 0

    async def test_context_only_needs_a_lease(self) -> None:
        config = pb.GenerationConfig()
        config.handoff.phase = pb.GENERATION_PHASE_CONTEXT_ONLY
        async with side() as worker:
            await worker.stream.send(submit(1, config=config))
            end = (await worker.stream.end(1)).end
            assert end
            assert list(end.error.fields) == ["handoff.phase"]

    async def test_used_id_fails_the_item(self) -> None:
        async with side() as worker:
            await worker.stream.send(prefill(1, LEASE), prefill(2, LEASE))
            ends = await worker.stream.ends([1, 2])
            assert ends[2].end
            assert ends[2].end.error.reason == "ALREADY_EXISTS"
            await worker.stream.send(release(LEASE))
            await worker.settled()

    async def test_item_that_the_backend_refuses_has_no_lease(self) -> None:
        async with side() as worker:
            await worker.stream.send(prefill(1, LEASE, prompt=(10**6,)))
            end = (await worker.stream.end(1)).end
            assert end
            assert end.error.reason == "TOKEN_OUT_OF_VOCABULARY"
            assert worker.sent.granted == 0


class TestRunningSequences:
    async def test_sequence_is_handed_over_once(self) -> None:
        async with side(step_ms=1000) as worker:
            await worker.stream.send(submit(1, 100, prompt=PROMPT))
            await worker.stream.until(lambda: worker.stream.received)
            first, second = lease(), lease()
            await worker.stream.send(hand_over(1, first), hand_over(1, second))
            assert (await worker.failed(second)).reason == "HANDOFF_FAILED"
            await worker.stream.send(release(first))
            await worker.stream.end(1)
            await worker.settled()

    async def test_sibling_of_a_refused_sequence_ends_as_ever(self) -> None:
        async with side() as worker:
            config = pb.GenerationConfig(sampling=pb.SamplingConfig(num_return_sequences=2))
            command = submit(1, 30, prompt=PROMPT, config=config)
            await worker.stream.send(command, hand_over(1, LEASE))
            ends = await worker.stream.ends([1, 2])
            assert ends[1].end
            assert ends[1].end.error.reason == "HANDOFF_FAILED"
            assert len(ends[2].token_ids) == 30
            await worker.settled()

    async def test_invalid_command_leaves_the_sequence_alone(self) -> None:
        async with side() as worker:
            await worker.stream.send(submit(1, 8), hand_over(1, LEASE, expires_in_ms=0))
            assert (await worker.failed(LEASE)).reason == "INVALID_FIELD"
            assert len((await worker.stream.end(1)).token_ids) == 8


async def test_drain_waits_for_the_receivers_of_handed_over_sequences() -> None:
    async with pair(handoff={"dial_seconds": 60}) as both:
        await both.prefill(1, LEASE)
        await both.sender.stream.end(1)
        drain = asyncio.create_task(both.sender.engine.service.drain())
        loads = both.sender.stream.loads
        await both.sender.stream.until(lambda: loads[-1].draining)
        count = len(loads)
        await both.sender.stream.until(lambda: len(loads) > count + 3)
        assert not drain.done()
        await both.sender.stream.send(release(LEASE))
        await drain


async def test_drain_leaves_parked_kv_to_its_client() -> None:
    async with side({"dial_seconds": 0.05}) as worker:
        await worker.stream.send(prefill(1, LEASE))
        await worker.stream.end(1)
        drain = asyncio.create_task(worker.engine.service.drain())
        await eventually(drain.done)
        assert worker.sent.held == 1
        await worker.stream.send(release(LEASE))
        await worker.settled()


async def test_defect_of_a_lease_fails_its_sequence_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    handed_over = SentBlocks.handed_over

    def broken(self: SentBlocks, news: HandedOver) -> None:
        if self.lease_id == LEASE:
            raise RuntimeError("defect")
        handed_over(self, news)

    monkeypatch.setattr(SentBlocks, "handed_over", broken)
    async with side() as worker:
        other = lease()
        await worker.stream.send(prefill(1, LEASE), prefill(2, other))
        ends = await worker.stream.ends([1, 2])
        assert ends[1].end
        assert ends[1].end.error.reason == "HANDOFF_FAILED"
        assert ends[2].end
        assert ends[2].end.reason == pb.FINISH_REASON_HANDOFF
        await worker.stream.send(release(other))
        await worker.settled()


async def test_defect_at_an_end_fails_its_sequence_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sequence_ended = SentBlocks.sequence_ended

    def broken(self: SentBlocks, end: SequenceEnd) -> transfer.HandoffDescriptor | None:
        if self.lease_id == LEASE:
            raise RuntimeError("defect")
        return sequence_ended(self, end)

    monkeypatch.setattr(SentBlocks, "sequence_ended", broken)
    async with side() as worker:
        other = lease()
        await worker.stream.send(prefill(1, LEASE), prefill(2, other))
        ends = await worker.stream.ends([1, 2])
        assert ends[1].end
        assert ends[1].end.error.reason == "BACKEND_FAILED"
        assert ends[2].end
        assert ends[2].end.reason == pb.FINISH_REASON_HANDOFF
        await worker.stream.send(release(LEASE), release(other))
        await worker.settled()


@pytest.mark.parametrize(
    "method", ["take_step", "take_kv_events", "take_adapters", "take_end"], ids=str
)
async def test_defect_of_a_stream_ends_it_alone(method: str) -> None:
    async with side() as worker, router_stream(worker.engine.address, router="other") as other:
        loaded = worker.engine.service._engine
        assert loaded
        (session,) = (each for each in loaded.streams if getattr(each, "router", "") == "other")

        def broken(*_: object) -> None:
            raise RuntimeError("defect")

        # The session is broken on purpose.
        setattr(session, method, broken)
        news = [HeldAdapter(Adapter(7, "news", "1"), epb.ADAPTER_PLACE_HOST)]
        loaded.streams.deliver(StepOutput(1, adapters=news, kv_events=[BlocksCleared()]))
        await other.send(submit(1, 8))
        assert (await other.failure()).reason == "BACKEND_FAILED"
        await worker.stream.send(submit(1, 8))
        assert len((await worker.stream.end(1)).token_ids) == 8


async def test_step_that_cannot_be_split_still_ends_its_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(self: KvMirror, events: object) -> int:
        raise RuntimeError("defect")

    async with side(max_batch_size=1) as worker:
        metrics = worker.engine.service.metrics
        await worker.stream.send(prefill(1, LEASE), submit(2, 8), reserve(lease(), 100))
        monkeypatch.setattr(KvMirror, "record", broken)
        assert (await worker.stream.failure()).reason == "BACKEND_FAILED"
        await eventually(lambda: not metrics.live_sequences)
        await worker.settled()


async def test_parked_kv_stays_while_sequences_wait_for_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with side() as worker:
        await worker.stream.send(prefill(1, LEASE))
        await worker.stream.end(1)
        stats = worker.backend.stats
        waiting = lambda: replace(stats(), waiting_sequences=1)  # noqa: E731
        monkeypatch.setattr(worker.backend, "stats", waiting)
        count = len(worker.stream.loads)
        await worker.stream.until(lambda: len(worker.stream.loads) > count + 3)
        assert worker.sent.held == 1
        monkeypatch.undo()
        await worker.stream.send(release(LEASE))
        await worker.settled()


class TestFacts:
    async def test_worker_with_pools_describes_them(self) -> None:
        async with (
            side({"transports": ("shared_memory", "grpc")}, shards=2) as worker,
            grpc.aio.insecure_channel(worker.engine.address) as channel,
        ):
            stub = engine_pb2_grpc.EngineServiceStub(channel)
            described = await stub.GetEngine(epb.GetEngineRequest())
            heads = [(shape.first_kv_head, shape.kv_heads) for shape in described.kv_shapes]
            assert len(heads) == 2
            assert heads[1][0] == heads[0][1]
            assert len(described.kv_compatibility_hash) == 16
            assert list(described.kv_transports) == [
                transfer.KV_TRANSPORT_SHARED_MEMORY,
                transfer.KV_TRANSPORT_GRPC,
            ]
            assert list(described.roles) == [
                epb.WORKER_ROLE_MIXED,
                epb.WORKER_ROLE_PREFILL,
                epb.WORKER_ROLE_DECODE,
            ]
            assert "handoff.phase" in described.supported_fields

    async def test_worker_without_pools_describes_none(self) -> None:
        async with (
            serving(RecordingBackend()) as engine,
            router_stream(engine.address) as stream,
        ):
            assert stream.welcome
            described = stream.welcome.engine
            assert not described.kv_shapes
            assert not described.kv_transports
            assert list(described.roles) == [epb.WORKER_ROLE_MIXED]

    async def test_descriptor_has_room_for_the_longest_sequence(self) -> None:
        blocks = 2**17
        descriptor = transfer.HandoffDescriptor(block_ids=range(blocks, 2 * blocks))
        assert descriptor.ByteSize() < MAX_DESCRIPTOR_BYTES


class TestRoles:
    async def test_role_changes_for_all_routers(self) -> None:
        async with (
            side() as worker,
            router_stream(worker.engine.address, router="other") as other,
        ):
            await other.until(lambda: other.loads)
            assert other.loads[-1].role == epb.WORKER_ROLE_MIXED
            await worker.stream.send(set_role(epb.WORKER_ROLE_DECODE))
            await other.until(lambda: other.loads[-1].role == epb.WORKER_ROLE_DECODE)

    async def test_unsupported_role_ends_the_stream(self) -> None:
        async with serving(RecordingBackend()) as engine, router_stream(engine.address) as stream:
            await stream.send(set_role(epb.WORKER_ROLE_PREFILL))
            failure = await stream.failure()
            assert failure.reason == "INVALID_FIELD"
            assert "WORKER_ROLE_MIXED" in failure.details


async def test_metrics_count_by_transport_and_outcome() -> None:
    async with pair() as both:
        await both.hand_over()
        await both.settled()
        await eventually(lambda: both.receiver.load.received_handoffs.consumed)
        families = {
            family.name: family for family in both.receiver.engine.service.metrics.collect()
        }
        (ended,) = families["trtmesh_engine_handoffs"].samples
        assert ended.labels == {"side": "received", "transport": "grpc", "outcome": "consumed"}
        assert ended.value == 1
        (size,) = families["trtmesh_engine_handoff_bytes"].samples
        assert size.value == both.receiver.received.bytes
