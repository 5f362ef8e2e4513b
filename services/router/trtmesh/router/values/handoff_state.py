"""The state of a context_only item, for the client to bring back with generation_only.

A client may change the state, so the state names the worker and the lease, and nothing to be dialled or mapped by a
worker: address, shapes and transports come from the fleet. The lease id is 128 random bits, so no client finds the KV
of another. The state is not signed: a client with another first token changes only this client's output.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from google.protobuf.message import DecodeError
from trtmesh.chassis.errors import InvalidField
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.v1 import kv_transfer_pb2 as pb

FIELD = "handoff.state"
PROTOCOL_VERSION = 1
MAX_STATE_BYTES = 2**20
DIGEST_BYTES = 16
MAX_NAME_CHARACTERS = 256
END = b"\1"
"""The last byte of a state. Zeros after it are padding of a batch."""
LEASE_ID = re.compile("[0-9a-f]{32}")

TRUSTED_FIELDS = frozenset(
    {
        *("protocol_version", "compatibility_hash", "worker", "lease_id", "computed_tokens"),
        *("block_ids", "first_token_id", "emitted_tokens", "layers_per_part", "backend_state"),
    }
)
"""Fields of a state. `backend_state` holds the digest of the prompt."""


@dataclass(frozen=True, slots=True)
class HandoffState:
    """KV that waits on a worker for the second half of a prompt."""

    descriptor: pb.HandoffDescriptor
    """Without a lease if there is no KV to continue from: the item is then computed as a whole."""

    @property
    def is_readable(self) -> bool:
        """Whether the state is of this release."""
        return self.descriptor.protocol_version == PROTOCOL_VERSION

    @property
    def has_kv(self) -> bool:
        """Whether a router of this release may continue from the KV."""
        return self.is_readable and bool(self.descriptor.lease_id)

    @property
    def first_tokens(self) -> list[int]:
        """The token that the first half generated, if any."""
        return [self.descriptor.first_token_id] if self.descriptor.emitted_tokens else []

    def check(self, digest: bytes) -> None:
        """Raises InvalidField for the state of another prompt."""
        if self.descriptor.backend_state != digest:
            raise InvalidField(
                "is that of another prompt or adapter; send the prompt of the first half again",
                field=FIELD,
            )


def digest_of(token_ids: Sequence[int], adapter: Adapter | None) -> bytes:
    of_adapter = None if adapter is None else (adapter.id, adapter.version)
    content = repr(of_adapter).encode() + b"\n" + array("I", token_ids).tobytes()
    return blake2b(content, digest_size=DIGEST_BYTES).digest()


def write_state(descriptor: pb.HandoffDescriptor | None, worker: str, digest: bytes) -> bytes:
    """The state for a client; without a descriptor, that of an item with nothing to continue."""
    state = pb.HandoffDescriptor(protocol_version=PROTOCOL_VERSION, worker=worker)
    if descriptor is not None:
        state.CopyFrom(descriptor)
        for field, _ in descriptor.ListFields():
            if field.name not in TRUSTED_FIELDS:
                state.ClearField(field.name)
    state.backend_state = digest
    return state.SerializeToString(deterministic=True) + END


def read_state(data: bytes) -> HandoffState:
    """Reads a state. Raises InvalidField."""
    if len(data) > MAX_STATE_BYTES:
        raise InvalidField(
            f"has {len(data)} bytes but must have at most {MAX_STATE_BYTES}",
            field=FIELD,
            value=str(len(data)),
            limit=f"at most {MAX_STATE_BYTES} bytes",
        )
    content = data.rstrip(b"\0")
    state = pb.HandoffDescriptor()
    try:
        state.ParseFromString(content[: -len(END)])
    except DecodeError as error:
        raise _unreadable() from error
    if not (content.endswith(END) and _is_whole(state)):
        raise _unreadable()
    return HandoffState(state)


def _is_whole(state: pb.HandoffDescriptor) -> bool:
    if state.protocol_version != PROTOCOL_VERSION:
        # The rest may have another meaning; it is never read.
        return bool(state.protocol_version)
    fields = {field.name for field, _ in state.ListFields()}
    return (
        fields <= TRUSTED_FIELDS
        and not _has_unknown_fields(state)
        and (not state.lease_id or bool(LEASE_ID.fullmatch(state.lease_id)))
        and 0 < len(state.worker) <= MAX_NAME_CHARACTERS
        and len(state.backend_state) == DIGEST_BYTES
        and state.emitted_tokens == state.HasField("first_token_id")
    )


def _has_unknown_fields(state: pb.HandoffDescriptor) -> bool:
    known: Any = pb.HandoffDescriptor()
    known.CopyFrom(state)
    known.DiscardUnknownFields()
    return bool(known != state)


def _unreadable() -> InvalidField:
    return InvalidField(
        "is not the handoff_state of a context_only item; send it unchanged", field=FIELD
    )
