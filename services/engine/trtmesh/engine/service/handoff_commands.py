"""Executes a router's commands about handoffs, and answers with the progress of the leases."""

from __future__ import annotations

import logging

from trtmesh.chassis.error_wire import to_proto
from trtmesh.chassis.errors import (
    HandoffFailed,
    InvalidField,
    SlowClient,
    TrtmeshError,
    UnsupportedCall,
)
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.backend import Submission
from trtmesh.engine.handoff.handoffs import HandoffsByBlocks, Lease
from trtmesh.engine.handoff.lease import check_lease_id, lease_seconds
from trtmesh.engine.handoff.send_run import SenderRequest
from trtmesh.engine.service.event_outbox import EventOutbox
from trtmesh.engine.service.streams import HANDLE_MASK, LoadedEngine
from trtmesh.engine.service.submission import adapter_of
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import kv_transfer_pb2 as transfer

log = logging.getLogger(__name__)

MAX_RENEWED_LEASES = 65_536
"""Most leases renewed by a command."""


class HandoffCommands:
    """The leases of a router. Implements LeaseOwner."""

    def __init__(self, engine: LoadedEngine, outbox: EventOutbox) -> None:
        self._engine, self._outbox = engine, outbox
        self._open = True

    def reserve(self, command: transfer.ReserveBlocksCommand) -> None:
        name = "reserve_blocks"
        try:
            handoffs = self._handoffs(name)
            check_lease_id(f"{name}.lease_id", command.lease_id)
            seconds = self._seconds(name, command.expires_in_ms)
            info = self._engine.info
            if not 0 < command.tokens <= info.max_sequence_tokens:
                limit = f"above 0 and at most {info.max_sequence_tokens}"
                raise InvalidField.of(f"{name}.tokens", command.tokens, limit)
            most = command.tokens // info.tokens_per_block
            if len(command.block_hashes) > most:
                limit = f"at most {most}, the full blocks of {command.tokens} tokens"
                count = f"{len(command.block_hashes)} hashes"
                raise InvalidField.of(f"{name}.block_hashes", count, limit)
            handoffs.reserve(
                self, command.lease_id, command.tokens, list(command.block_hashes), seconds
            )
        except TrtmeshError as error:
            self.tell_reserved(command.lease_id, 0, error)

    def attach(self, command: transfer.AttachSenderCommand) -> None:
        identity = Adapter(command.adapter_id, version=command.adapter_version)
        try:
            self._handoffs("attach_sender").attach(
                command.lease_id, command.descriptor, identity if identity.id else None
            )
        except TrtmeshError as error:
            self.tell_failed(command.lease_id, error)

    def hand_over(
        self,
        command: transfer.HandOverCommand,
        key: int | None,
        adapter: Adapter | None,
        present: Lease | None,
    ) -> Lease | None:
        """Starts the handoff of a running sequence, and returns the lease. `key` is None for an unknown handle.
        `present` is the handoff by which the sequence came, or a handoff under way."""
        name = "hand_over"
        try:
            handoffs = self._handoffs(name)
            check_lease_id(f"{name}.lease_id", command.lease_id)
            seconds = self._seconds(name, command.expires_in_ms)
            if key is None or (present is not None and present.outcome is None):
                raise HandoffFailed(
                    "names a sequence that has ended, or is handed over already",
                    field=f"{name}.handle",
                    value=str(command.handle),
                )
            asked = SenderRequest(self, command.lease_id, (key,), adapter, seconds)
            return handoffs.hand_over(key, asked)
        except TrtmeshError as error:
            self.tell_failed(command.lease_id, error)
            return present

    def renew(self, command: transfer.RenewLeasesCommand) -> None:
        name = "renew_leases"
        if len(command.lease_ids) > MAX_RENEWED_LEASES:
            count = f"{len(command.lease_ids)} ids"
            raise InvalidField.of(f"{name}.lease_ids", count, f"at most {MAX_RENEWED_LEASES}")
        try:
            leases = self._engine.handoffs or self._handoffs(name)
            seconds = self._seconds(name, command.expires_in_ms)
        except TrtmeshError as error:
            for lease_id in command.lease_ids:
                self.tell_failed(lease_id, error)
            return
        leases.renew(self, command.lease_ids, seconds)

    def release(self, command: transfer.ReleaseLeaseCommand) -> None:
        if self._engine.handoffs:
            self._engine.handoffs.release(command.lease_id, consumed=command.consumed)

    def submit(self, command: epb.SubmitCommand, item: Submission) -> Lease | None:
        """Gives an item of a handoff to the backend. Raises TrtmeshError."""
        if self._engine.handoffs is None:
            self._engine.backend.submit(item)
            return None
        handoff = item.config.handoff
        asked = SenderRequest(
            self,
            item.sender_lease_id,
            item.keys,
            adapter_of(item.config),
            command.lease_expires_in_ms / 1000,
            handoff is not None and handoff.phase == pb.GENERATION_PHASE_CONTEXT_ONLY,
        )
        return self._engine.handoffs.submit(item, asked, command.handoff.lease_id)

    def close(self) -> None:
        """Releases the router's leases, because the stream is over."""
        self._open = False
        if self._engine.handoffs:
            self._engine.handoffs.stream_ended(self)

    def tell_reserved(self, lease_id: str, present_tokens: int, error: TrtmeshError | None) -> None:
        answer = transfer.BlocksReserved(
            lease_id=lease_id,
            present_tokens=present_tokens,
            error=to_proto(self._blamed(error)) if error else None,
        )
        self._tell(epb.EngineEvent(blocks_reserved=answer))

    def tell_offered(self, key: int, descriptor: transfer.HandoffDescriptor) -> None:
        offered = transfer.HandoffOffered(handle=key & HANDLE_MASK, descriptor=descriptor)
        self._tell(epb.EngineEvent(handoff_offered=offered))

    def tell_failed(self, lease_id: str, error: TrtmeshError) -> None:
        self.tell_over(lease_id, self._blamed(error))

    def tell_over(self, lease_id: str, error: TrtmeshError) -> None:
        error.worker = error.worker or self._engine.name
        failed = transfer.HandoffFailed(lease_id=lease_id, error=to_proto(error))
        self._tell(epb.EngineEvent(handoff_failed=failed))

    def owes_less(self) -> None:
        self._engine.streams.calmed()

    def _blamed(self, error: TrtmeshError) -> TrtmeshError:
        error.worker = error.worker or self._engine.name
        self._engine.metrics.errors[error.reason] += 1
        log.info("lease refused or lost: %s", error.message)
        return error

    def _tell(self, event: epb.EngineEvent) -> None:
        if not self._open:
            return
        try:
            self._outbox.put_answer(event)
        except SlowClient as error:
            self._outbox.finish(error)

    def _handoffs(self, command: str) -> HandoffsByBlocks:
        handoffs = self._engine.handoffs
        if not isinstance(handoffs, HandoffsByBlocks):
            raise UnsupportedCall(
                f"the {self._engine.info.backend} backend of worker {self._engine.name} does not support {command}"
            )
        return handoffs

    def _seconds(self, command: str, milliseconds: int) -> float:
        most = self._engine.description.max_lease_ms
        return lease_seconds(f"{command}.expires_in_ms", milliseconds, most)
