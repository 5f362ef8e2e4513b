"""The leases of handoffs on a worker: commands on the worker's stream, and the answers to each handoff."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from trtmesh.chassis.error_wire import from_proto
from trtmesh.chassis.errors import TrtmeshError
from trtmesh.v1 import engine_pb2 as pb
from trtmesh.v1 import kv_transfer_pb2 as kv_pb


class LeaseHolder(Protocol):
    """A handoff, as a worker's answers reach it."""

    def on_reserved(self, present_tokens: int) -> None:
        """The worker reserved the blocks; it holds the KV of `present_tokens` leading tokens already."""

    def on_offered(self, descriptor: kv_pb.HandoffDescriptor) -> None:
        """The worker granted the sender's lease."""

    def on_lease_ended(self, address: str, error: TrtmeshError) -> None:
        """The worker at `address` refused a lease, ended it, or is lost."""


class Leases:
    """The leases of a worker by id, a sender's and a receiver's alike."""

    def __init__(self, address: str, send: Callable[[pb.EngineCommand], None]) -> None:
        self._address = address
        self._send = send
        self._holders: dict[str, LeaseHolder] = {}
        self.moves = 0
        """Running sequences that the worker hands over now, because of a drain or another role."""

    def __len__(self) -> int:
        return len(self._holders)

    def reserve(
        self,
        holder: LeaseHolder,
        lease_id: str,
        tokens: int,
        block_hashes: Sequence[int],
        seconds: float,
    ) -> None:
        """Asks for blocks of `tokens` tokens."""
        self._holders[lease_id] = holder
        command = kv_pb.ReserveBlocksCommand(
            lease_id=lease_id,
            tokens=tokens,
            expires_in_ms=round(seconds * 1000),
            block_hashes=block_hashes,
        )
        self._send(pb.EngineCommand(reserve_blocks=command))

    def expect_answers(self, holder: LeaseHolder, lease_id: str) -> None:
        """Passes the answers about a sender's lease, or the loss of the worker, to `holder`."""
        self._holders[lease_id] = holder

    def attach(self, command: kv_pb.AttachSenderCommand) -> None:
        """Names the sender of a reservation."""
        self._send(pb.EngineCommand(attach_sender=command))

    def release(self, lease_id: str, *, consumed: bool = False) -> None:
        """Ends a lease, even if unknown to the worker. `consumed` tells a sender that the state was used."""
        command = kv_pb.ReleaseLeaseCommand(lease_id=lease_id, consumed=consumed)
        self._send(pb.EngineCommand(release_lease=command))

    def forget(self, lease_id: str) -> None:
        """Drops later answers about a lease."""
        self._holders.pop(lease_id, None)

    def renew(self, lease_ids: Iterable[str], seconds: float) -> None:
        """Lengthens leases to `seconds` from now."""
        command = kv_pb.RenewLeasesCommand(lease_ids=lease_ids, expires_in_ms=round(seconds * 1000))
        self._send(pb.EngineCommand(renew_leases=command))

    def on_reserved(self, reserved: kv_pb.BlocksReserved) -> None:
        if (holder := self._holders.get(reserved.lease_id)) is None:
            return
        if reserved.HasField("error"):
            holder.on_lease_ended(self._address, from_proto(reserved.error))
        else:
            holder.on_reserved(reserved.present_tokens)

    def on_offered(self, offered: kv_pb.HandoffOffered) -> None:
        if (holder := self._holders.get(offered.descriptor.lease_id)) is not None:
            holder.on_offered(offered.descriptor)

    def on_failed(self, failed: kv_pb.HandoffFailed) -> None:
        if (holder := self._holders.get(failed.lease_id)) is not None:
            holder.on_lease_ended(self._address, from_proto(failed.error))

    def lost(self, error: TrtmeshError) -> None:
        """Ends every lease with the stream of the worker."""
        for holder in [*self._holders.values()]:
            holder.on_lease_ended(self._address, error)
        self._holders.clear()
