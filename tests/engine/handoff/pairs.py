"""Two engine services on real sockets, and a test that plays their router."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from typing import Any

from engine.short_names import by_short_names
from engine_streams import (
    RouterStream,
    RunningEngine,
    assert_leases_conserved,
    eventually,
    router_stream,
    serving,
    submit,
)
from leaks import gone, without_collector
from trtmesh.engine.backends.simulated.backend import SimulatedBackend
from trtmesh.engine.backends.simulated.settings import SimulatedSettings
from trtmesh.engine.handoff.fetch import Fetch
from trtmesh.engine.handoff.fetch_server import ServedFetch
from trtmesh.engine.handoff.handoffs import HandoffsByBlocks
from trtmesh.engine.handoff.leases import Timer
from trtmesh.engine.handoff.receive_run import ReceivedBlocks, Transfer
from trtmesh.engine.handoff.send_run import SentBlocks
from trtmesh.engine.handoff.settings import HandoffLimits
from trtmesh.engine.service.router_session import RouterSession
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import kv_transfer_pb2 as transfer

LIFE_MS = 60_000
PROMPT = tuple(range(40, 140))


def lease() -> str:
    return secrets.token_hex(16)


@dataclass
class Side:
    """A worker, and the stream of its router."""

    engine: RunningEngine
    backend: SimulatedBackend
    stream: RouterStream

    @property
    def handoffs(self) -> HandoffsByBlocks:
        loaded = self.engine.service._engine
        assert loaded
        assert isinstance(loaded.handoffs, HandoffsByBlocks)
        return loaded.handoffs

    @property
    def sent(self) -> transfer.HandoffCounts:
        return self.handoffs.sent.counts()

    @property
    def received(self) -> transfer.HandoffCounts:
        return self.handoffs.received.counts()

    async def settled(self) -> None:
        """Waits until nothing of any handoff is left, and checks that every lease has an outcome."""
        await eventually(lambda: not self.handoffs.sent.all())
        await eventually(lambda: not self.handoffs.received.all())
        await eventually(lambda: not self.handoffs._tasks)
        await eventually(lambda: self.backend.stats().used_blocks == 0)
        load = self.load
        assert_leases_conserved(load)
        assert load.sent_handoffs.held == load.received_handoffs.held == 0
        assert load.quarantined_blocks == 0

    def fetches(self, lease_id: str) -> bool:
        """Whether a lease was fetched."""
        sent = self.handoffs.sent.get(lease_id)
        return sent is None or sent._fetch is not None

    @property
    def load(self) -> epb.Load:
        """The load now."""
        loaded = self.engine.service._engine
        assert loaded
        return loaded.load()

    async def failed(self, lease_id: str) -> pb.Error:
        """The report of a lease that ended without a sequence."""
        await self.stream.until(lambda: lease_id in self.stream.handoffs_failed)
        return self.stream.handoffs_failed[lease_id]


SLOW = {"step_ms": 1000, "prefill_tokens_per_step": 10}
"""A sender whose prefill outlasts the test."""


@dataclass
class Pair:
    """A prefill worker and a decode worker."""

    sender: Side
    receiver: Side

    async def reserve(self, lease_id: str, tokens: int = len(PROMPT), **fields: Any) -> int:
        """Reserves blocks; returns the present tokens."""
        stream = self.receiver.stream
        await stream.send(reserve(lease_id, tokens, **fields))
        await stream.until(lambda: stream.blocks_reserved)
        answer = stream.blocks_reserved.pop()
        assert answer.lease_id == lease_id
        assert not answer.HasField("error"), answer.error.message
        return answer.present_tokens

    async def prefill(
        self, handle: int, lease_id: str, prompt: Sequence[int] = PROMPT, **fields: Any
    ) -> transfer.HandoffDescriptor:
        """Submits to the sender; returns the descriptor for the receiver."""
        stream = self.sender.stream
        await stream.send(prefill(handle, lease_id, prompt, **fields))
        await stream.until(lambda: handle in stream.handoffs_offered)
        descriptor = stream.handoffs_offered.pop(handle)
        descriptor.address = self.sender.engine.address
        return descriptor

    async def attach(self, lease_id: str, descriptor: transfer.HandoffDescriptor) -> None:
        await self.receiver.stream.send(attach(lease_id, descriptor))

    async def attached(self, handle: int = 1, **fields: Any) -> tuple[str, str]:
        """A handoff up to the open fetch; returns the leases of sender and receiver."""
        sender_lease, receiver_lease = lease(), lease()
        await self.reserve(receiver_lease)
        descriptor = await self.prefill(handle, sender_lease, **fields)
        await self.attach(receiver_lease, descriptor)
        await eventually(lambda: self.sender.fetches(sender_lease))
        return sender_lease, receiver_lease

    async def hand_over(
        self, handle: int = 1, prompt: Sequence[int] = PROMPT, max_tokens: int = 20
    ) -> list[int]:
        """A whole handoff; returns the tokens of both sides."""
        sender_lease, receiver_lease = lease(), lease()
        await self.reserve(receiver_lease, len(prompt))
        descriptor = await self.prefill(handle, sender_lease, prompt, max_tokens=max_tokens)
        await self.attach(receiver_lease, descriptor)
        first = await self.sender.stream.end(handle)
        assert first.end
        assert first.end.reason == pb.FINISH_REASON_HANDOFF
        await self.receiver.stream.send(
            submit(
                handle,
                max_tokens,
                prompt=(*prompt, *first.token_ids),
                emitted_tokens=1,
                receiver_lease_id=receiver_lease,
            )
        )
        rest = await self.receiver.stream.end(handle)
        assert rest.end
        assert rest.end.reason == pb.FINISH_REASON_LENGTH, rest.end.error.message
        return first.token_ids + rest.token_ids

    async def settled(self) -> None:
        await self.sender.settled()
        await self.receiver.settled()


@asynccontextmanager
async def side(handoff: dict[str, Any] | None = None, **simulated: Any) -> AsyncIterator[Side]:
    """A worker with a stream; `handoff` has settings, and limits too."""
    settings = dict(handoff or {})
    limits = {f.name: settings.pop(f.name) for f in fields(HandoffLimits) if f.name in settings}
    given = {"step_ms": 0} | simulated
    backend = SimulatedBackend(by_short_names(SimulatedSettings, **given))
    async with (
        serving(backend, handoff_limits=HandoffLimits(**limits), handoff=settings) as engine,
        router_stream(engine.address) as stream,
    ):
        yield Side(engine, backend, stream)


@asynccontextmanager
async def pair(
    sender: dict[str, Any] | None = None,
    receiver: dict[str, Any] | None = None,
    handoff: dict[str, Any] | None = None,
) -> AsyncIterator[Pair]:
    """Two workers; in the end nothing of a handoff is left, without help of the garbage collector."""
    grpc_alone = {"transports": ("grpc",)} | (handoff or {})
    with without_collector():
        async with (
            side(grpc_alone, **(sender or {})) as prefill_side,
            side(grpc_alone, **(receiver or {})) as decode_side,
        ):
            both = Pair(prefill_side, decode_side)
            yield both
            await both.settled()
            await gone(ReceivedBlocks, Transfer, Fetch, SentBlocks, ServedFetch, Timer)
        await gone(RouterSession)


async def oracle(prompt: Sequence[int] = PROMPT, max_tokens: int = 20) -> list[int]:
    """The tokens of one worker."""
    async with side() as alone:
        await alone.stream.send(submit(1, max_tokens, prompt=prompt))
        return (await alone.stream.end(1)).token_ids


def reserve(lease_id: str, tokens: int, **fields: Any) -> epb.EngineCommand:
    values = {"expires_in_ms": LIFE_MS} | fields
    return epb.EngineCommand(
        reserve_blocks=transfer.ReserveBlocksCommand(lease_id=lease_id, tokens=tokens, **values)
    )


def prefill(
    handle: int, lease_id: str, prompt: Sequence[int] = PROMPT, **fields: Any
) -> epb.EngineCommand:
    values = {"max_tokens": 20, "lease_expires_in_ms": LIFE_MS} | fields
    return submit(handle, prompt=prompt, sender_lease_id=lease_id, **values)


def attach(lease_id: str, descriptor: transfer.HandoffDescriptor) -> epb.EngineCommand:
    command = transfer.AttachSenderCommand(lease_id=lease_id, descriptor=descriptor)
    return epb.EngineCommand(attach_sender=command)


def release(lease_id: str) -> epb.EngineCommand:
    return epb.EngineCommand(release_lease=transfer.ReleaseLeaseCommand(lease_id=lease_id))


def renew(*lease_ids: str, expires_in_ms: int = LIFE_MS) -> epb.EngineCommand:
    command = transfer.RenewLeasesCommand(lease_ids=lease_ids, expires_in_ms=expires_in_ms)
    return epb.EngineCommand(renew_leases=command)
