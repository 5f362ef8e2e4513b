"""Handoffs by states between engine services on real sockets; the tests play their router."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from engine_streams import (
    RouterStream,
    RunningEngine,
    eventually,
    router_stream,
    sampling,
    serving,
    stop,
    submit,
)
from recording_backend import INFO, RecordingBackend
from trtmesh.engine.backend import (
    MAX_STATE_BYTES,
    HandoffState,
    SequenceEnd,
    StateKind,
    StepOutput,
)
from trtmesh.engine.backends.simulated.backend import SimulatedBackend
from trtmesh.engine.backends.simulated.settings import SimulatedSettings
from trtmesh.engine.service.router_session import RouterSession
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import kv_transfer_pb2 as transfer

PROMPT = tuple(range(40, 140))
LIFE_MS = 60_000
HANDOFF, ERROR = pb.FINISH_REASON_HANDOFF, pb.FINISH_REASON_ERROR
SLOW: dict[str, Any] = {"timing": {"step_ms": 1000, "prefill_tokens_per_step": 10}}
"""A prefill that outlasts the test."""


def lease() -> str:
    return secrets.token_hex(16)


@dataclass
class Side:
    """A worker that hands over by states, and the stream of its router."""

    engine: RunningEngine
    stream: RouterStream

    @property
    def load(self) -> epb.Load:
        """The load now."""
        loaded = self.engine.service._engine
        assert loaded
        return loaded.load()

    def is_empty(self) -> bool:
        return not self.load.used_blocks

    def outcomes(self, side: str = "sent") -> tuple[int, int, int, int, int]:
        """Leases granted, consumed, released, expired and held."""
        load = self.load
        each = load.sent_handoffs if side == "sent" else load.received_handoffs
        return each.granted, each.consumed, each.released, each.expired, each.held

    async def ended(self, *commands: epb.EngineCommand) -> epb.SequenceEnd:
        """The end of the sequence of the last command."""
        await self.stream.send(*commands)
        handle = commands[-1].submit.handle
        return await self.end_of(handle)

    async def end_of(self, handle: int) -> epb.SequenceEnd:
        def end() -> epb.SequenceEnd | None:
            found = self.stream.received.get(handle)
            return found.end if found else None

        await self.stream.until(end)
        found = end()
        assert found
        return found


@asynccontextmanager
async def sides(count: int = 1, **groups: dict[str, Any]) -> AsyncIterator[list[Side]]:
    """Workers with equal settings."""
    settings = {"timing": {"step_ms": 1}, **groups}
    settings["handoff"] = {"by": "state", **settings.get("handoff", {})}
    async with AsyncExitStack() as stack:
        found = []
        for _ in range(count):
            backend = SimulatedBackend(SimulatedSettings.model_validate(settings))
            engine = await stack.enter_async_context(serving(backend))
            stream = await stack.enter_async_context(router_stream(engine.address))
            found.append(Side(engine, stream))
        yield found
        for side in found:
            await eventually(side.is_empty)


def first_half(lease_id: str, life_ms: int = LIFE_MS, **fields: Any) -> epb.EngineCommand:
    return submit(0, prompt=PROMPT, sender_lease_id=lease_id, lease_expires_in_ms=life_ms, **fields)


def second_half(
    descriptor: transfer.HandoffDescriptor, first_token: int, **fields: Any
) -> epb.EngineCommand:
    values: dict[str, Any] = {
        "prompt": (*PROMPT, first_token),
        "emitted_tokens": 1,
        "handoff": descriptor,
    }
    return submit(0, **(values | fields))


def release(lease_id: str, *, consumed: bool = False) -> epb.EngineCommand:
    command = transfer.ReleaseLeaseCommand(lease_id=lease_id, consumed=consumed)
    return epb.EngineCommand(release_lease=command)


async def test_description_names_the_kind_and_no_shapes() -> None:
    async with sides() as (side,):
        assert side.stream.welcome
        engine = side.stream.welcome.engine
        assert engine.handoff_kind == "simulated"
        assert list(engine.kv_transports) == [transfer.KV_TRANSPORT_BACKEND]
        assert not engine.kv_shapes
        assert engine.kv_compatibility_hash
        assert "handoff.phase" in engine.supported_fields


async def test_second_half_continues_after_the_first_token() -> None:
    async with sides(2) as (sender, receiver):
        whole = await receiver.ended(submit(0, prompt=PROMPT))
        assert whole.reason == pb.FINISH_REASON_LENGTH
        expected = receiver.stream.received.pop(0).token_ids
        computed = receiver.load.computed_prompt_tokens
        lease_id = lease()
        end = await sender.ended(first_half(lease_id))
        (first,) = sender.stream.received[0].token_ids
        assert (end.reason, end.generated_tokens) == (HANDOFF, 1)
        assert end.handoff.lease_id == lease_id
        assert end.handoff.backend_state
        assert end.handoff.computed_tokens == len(PROMPT)
        assert sender.outcomes() == (1, 0, 0, 0, 1)
        await receiver.ended(second_half(end.handoff, first))
        got = receiver.stream.received[0]
        assert (got.first_offset, [first, *got.token_ids]) == (1, expected)
        assert receiver.load.computed_prompt_tokens == computed + 1
        assert receiver.outcomes("received") == (1, 1, 0, 0, 0)
        await sender.stream.send(release(lease_id, consumed=True))
        await eventually(lambda: sender.outcomes() == (1, 1, 0, 0, 0))


@pytest.mark.parametrize("consumed", [True, False])
async def test_release_before_the_handoff_stops_the_first_half(consumed: bool) -> None:
    async with sides(**SLOW) as (side,):
        lease_id = lease()
        await side.stream.send(first_half(lease_id), release(lease_id, consumed=consumed))
        assert (await side.end_of(0)).reason == pb.FINISH_REASON_CANCELLED
        assert side.outcomes() == (1, 0, 1, 0, 0)


async def test_unused_state_expires_with_its_lease() -> None:
    async with sides() as (side,):
        lease_id = lease()
        assert (await side.ended(first_half(lease_id))).reason == HANDOFF
        assert side.load.used_blocks
        renew = transfer.RenewLeasesCommand(lease_ids=[lease_id], expires_in_ms=20)
        await side.stream.send(epb.EngineCommand(renew_leases=renew))
        await eventually(lambda: side.outcomes() == (1, 0, 0, 1, 0))
        await eventually(lambda: not side.load.used_blocks)


async def test_lease_lives_no_longer_than_the_backend_keeps_the_kv() -> None:
    async with sides(handoff={"kept_seconds": 0.2}) as (side,):
        lease_id = lease()
        end = await side.ended(first_half(lease_id))
        assert end.handoff.expires_in_ms == 200
        renew = transfer.RenewLeasesCommand(lease_ids=[lease_id], expires_in_ms=LIFE_MS)
        await side.stream.send(epb.EngineCommand(renew_leases=renew))
        await eventually(lambda: side.outcomes() == (1, 0, 0, 1, 0))
        assert not side.load.used_blocks


async def test_first_half_whose_lease_expires_fails() -> None:
    async with sides(**SLOW) as (side,):
        end = await side.ended(first_half(lease(), life_ms=300))
        assert (end.reason, end.error.reason) == (ERROR, "HANDOFF_FAILED")
        assert side.outcomes() == (1, 0, 0, 1, 0)


async def test_renewed_lease_lives_on() -> None:
    async with sides(**SLOW) as (side,):
        lease_id = lease()
        renew = transfer.RenewLeasesCommand(lease_ids=[lease_id, lease()], expires_in_ms=LIFE_MS)
        await side.stream.send(
            first_half(lease_id, life_ms=300), epb.EngineCommand(renew_leases=renew)
        )
        await side.stream.until(lambda: side.stream.handoffs_failed)
        assert list(side.stream.handoffs_failed) == [renew.lease_ids[1]]
        await side.stream.send(stop(0))
        assert (await side.end_of(0)).reason == pb.FINISH_REASON_STOPPED
        assert side.outcomes() == (1, 0, 1, 0, 0)


async def test_end_of_the_stream_frees_states() -> None:
    async with sides() as (side,):
        async with router_stream(side.engine.address) as other:
            await other.send(first_half(lease()))
            await other.until(lambda: 0 in other.received and other.received[0].end)
            assert side.outcomes() == (1, 0, 0, 0, 1)
        await eventually(lambda: side.outcomes() == (1, 0, 1, 0, 0))


async def test_state_that_nobody_keeps_fails_the_second_half() -> None:
    async with sides(2) as (sender, receiver):
        lease_id = lease()
        end = await sender.ended(first_half(lease_id))
        (first,) = sender.stream.received[0].token_ids
        await sender.stream.send(release(lease_id))
        await eventually(lambda: not sender.load.used_blocks)
        failed = await receiver.ended(second_half(end.handoff, first))
        assert (failed.reason, failed.error.reason) == (ERROR, "HANDOFF_FAILED")
        assert receiver.outcomes("received") == (1, 0, 1, 0, 0)


@pytest.mark.parametrize("state", [b"junk", b"{}", b'{"port": "1", "lease_id": 2}'])
async def test_state_that_is_none_is_refused(state: bytes) -> None:
    async with sides(2) as (sender, receiver):
        end = await sender.ended(first_half(lease()))
        end.handoff.backend_state = state
        refused = await receiver.ended(second_half(end.handoff, 0))
        assert (refused.reason, refused.error.reason) == (ERROR, "HANDOFF_FAILED")
        assert receiver.outcomes("received") == (0, 0, 0, 0, 0)
        await sender.stream.send(release(end.handoff.lease_id))


async def test_state_of_other_tokens_fails_the_second_half() -> None:
    async with sides(2) as (sender, receiver):
        end = await sender.ended(first_half(lease()))
        others = (*PROMPT[1:], 7, 7)
        failed = await receiver.ended(second_half(end.handoff, 0, prompt=others))
        assert (failed.reason, failed.error.reason) == (ERROR, "HANDOFF_FAILED")
        await sender.stream.send(release(end.handoff.lease_id))


@pytest.mark.parametrize("other", [{"compatibility": "fp8"}, {"by": "leases"}])
async def test_worker_of_another_kind_refuses_a_state(other: dict[str, Any]) -> None:
    async with sides() as (sender,):
        end = await sender.ended(first_half(lease()))
        (first,) = sender.stream.received[0].token_ids
        async with sides(handoff=other) as (receiver,):
            refused = await receiver.ended(second_half(end.handoff, first))
            reason = "UNSUPPORTED_FIELD" if "by" in other else "HANDOFF_FAILED"
            assert (refused.reason, refused.error.reason) == (ERROR, reason)
            assert receiver.outcomes("received") == (0, 0, 0, 0, 0)
        await sender.stream.send(release(end.handoff.lease_id))


async def test_state_is_used_once() -> None:
    async with sides(2) as (sender, receiver):
        end = await sender.ended(first_half(lease()))
        (first,) = sender.stream.received[0].token_ids
        await receiver.ended(second_half(end.handoff, first))
        receiver.stream.received.clear()
        again = await receiver.ended(second_half(end.handoff, first))
        assert again.error.reason == "ALREADY_EXISTS"
        await sender.stream.send(release(end.handoff.lease_id, consumed=True))


DESCRIPTOR = transfer.HandoffDescriptor(lease_id="0123456789abcdef" * 2, backend_state=b"x")


@pytest.mark.parametrize(
    ("command", "reason", "fields"),
    [
        (
            first_half(lease(), config=sampling(num_return_sequences=2, seed=1)),
            "INVALID_FIELD",
            ["submit.sender_lease_id"],
        ),
        (submit(0, receiver_lease_id=lease()), "UNSUPPORTED_FIELD", ["submit.receiver_lease_id"]),
        (submit(0, handoff=DESCRIPTOR), "INVALID_FIELD", ["submit.handoff"]),
        (second_half(DESCRIPTOR, 7), "HANDOFF_FAILED", ["submit.handoff"]),
        (
            second_half(DESCRIPTOR, 7, sender_lease_id=lease(), lease_expires_in_ms=LIFE_MS),
            "INVALID_FIELD",
            ["submit.handoff"],
        ),
        (
            second_half(transfer.HandoffDescriptor(lease_id="short"), 7),
            "INVALID_FIELD",
            ["submit.handoff.lease_id"],
        ),
    ],
)
async def test_wrong_half_is_refused_alone(
    command: epb.EngineCommand, reason: str, fields: list[str]
) -> None:
    async with sides() as (side,):
        end = await side.ended(command)
        assert (end.error.reason, list(end.error.fields)) == (reason, fields)
        side.stream.received.clear()
        assert (await side.ended(submit(0))).reason == pb.FINISH_REASON_LENGTH


STATEFUL = replace(INFO, state_kind=StateKind("recorded"))


class StateBackend(RecordingBackend):
    """Ends first halves with a state that the test chooses."""

    def __init__(self) -> None:
        super().__init__(STATEFUL)
        self.dropped: list[str] = []

    def drop(self, lease_id: str) -> None:
        self.dropped.append(lease_id)

    def hand_over_with(self, content: bytes) -> None:
        ((key, item),) = self.live.items()
        self.live.clear()
        state = HandoffState(content, LIFE_MS / 1000)
        end = SequenceEnd(key, HANDOFF, item.prompt_tokens, 0, 1, handoff_state=state)
        self._advance()
        self.deliver(StepOutput(self.stats_now.step_count, ends=[end]))


@pytest.mark.parametrize("size", [0, 1, MAX_STATE_BYTES, MAX_STATE_BYTES + 1])
async def test_state_has_a_limit(size: int) -> None:
    backend, lease_id = StateBackend(), lease()
    async with serving(backend) as engine, router_stream(engine.address) as stream:
        side = Side(engine, stream)
        await stream.send(first_half(lease_id))
        await eventually(lambda: backend.live)
        backend.hand_over_with(bytes(size))
        end = await side.end_of(0)
        if 0 < size <= MAX_STATE_BYTES:
            assert (end.reason, len(end.handoff.backend_state)) == (HANDOFF, size)
            assert not backend.dropped
        else:
            assert (end.reason, end.error.reason) == (ERROR, "HANDOFF_FAILED")
            assert lease_id in backend.dropped
            assert side.outcomes() == (1, 0, 1, 0, 0)


async def test_draining_worker_waits_for_the_receiver() -> None:
    async with sides() as (side,):
        lease_id = lease()
        await side.ended(first_half(lease_id))
        session = next(iter(side.engine.service._streams))
        assert isinstance(session, RouterSession)
        await eventually(lambda: not session.outbox.holds_steps)
        assert session.busy
        await side.stream.send(release(lease_id, consumed=True))
        await eventually(lambda: not session.busy)
