"""A worker's own KV, and the way for other workers to reach the KV: blocks of a pool, or states of the backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import astuple, dataclass, field

from trtmesh.chassis.errors import HandoffFailed, InvalidField
from trtmesh.chassis.tls.client import TlsOfPeers, plain_text
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.backend import (
    MAX_STATE_BYTES,
    BackendInfo,
    HandsOverBlocks,
    HandsOverStates,
    StateKind,
)
from trtmesh.engine.handoff.copying import Copying
from trtmesh.engine.handoff.identity import PROTOCOL_VERSION, compatibility_hash
from trtmesh.engine.handoff.messages import MessageMemory
from trtmesh.engine.handoff.settings import HANDOFF_LIMITS, HandoffLimits, HandoffSettings
from trtmesh.engine.handoff.transports.choice import Transports
from trtmesh.engine.kv_memory import KvMemory
from trtmesh.v1 import kv_transfer_pb2 as pb


@dataclass(frozen=True)
class OwnKv:
    """The KV of a loaded worker, with everything needed by leases."""

    worker: str
    settings: HandoffSettings
    backend: HandsOverBlocks
    memory: KvMemory
    kind: Sequence[object]
    """Properties that must be equal. Block sizes and shards may differ, since plans bridge the difference."""
    total_blocks: int
    layers_per_part: int
    transports: Transports
    threads: Executor
    """For work too long for the event loop."""
    copying: Copying
    """Copies KV to and from messages."""
    max_message_bytes: int
    is_draining: Callable[[], bool]
    tls_of_peers: TlsOfPeers = plain_text
    """For connections to senders."""
    message_memory: MessageMemory = field(default_factory=MessageMemory)
    limits: HandoffLimits = HANDOFF_LIMITS

    @property
    def max_quarantined_blocks(self) -> int:
        """With more blocks in quarantine the worker refuses reservations."""
        return int(self.limits.max_quarantined_fraction * self.total_blocks)

    def hash(self, adapter: Adapter | None) -> bytes:
        """The compatibility hash of an item."""
        return compatibility_hash(self.kind, adapter)


def kind_of(memory: KvMemory, info: BackendInfo) -> Sequence[object]:
    shards = memory.shards
    layers = {layer for shard in shards for layer in shard.layers}
    heads = {head for shard in shards for head in shard.kv_heads}
    sizes = len(layers), len(heads), shards[0].head_dim
    return info.model_fingerprint, info.tokenizer_fingerprint, *sizes


@dataclass(frozen=True, slots=True)
class OwnStates:
    """A worker with handoffs by states of the backend."""

    worker: str
    backend: HandsOverStates
    kind: StateKind
    model_fingerprint: str
    tokenizer_fingerprint: str
    max_message_bytes: int
    limits: HandoffLimits = HANDOFF_LIMITS

    @property
    def max_state_bytes(self) -> int:
        """Most bytes of a state for handoffs: a message to the router holds more than the state."""
        return min(MAX_STATE_BYTES, self.max_message_bytes // 4)

    def hash(self, adapter: Adapter | None) -> bytes:
        """The compatibility hash of an item."""
        of_model = self.model_fingerprint, self.tokenizer_fingerprint
        return compatibility_hash((*astuple(self.kind), *of_model), adapter)

    def state_of(self, descriptor: pb.HandoffDescriptor, adapter: Adapter | None) -> bytes:
        """The state in a descriptor. Raises HandoffFailed for another kind of state, or InvalidField."""
        if (
            descriptor.protocol_version != PROTOCOL_VERSION
            or descriptor.compatibility_hash != self.hash(adapter)
        ):
            raise HandoffFailed(
                f"is the state of worker {descriptor.worker}, whose protocol, backend, model or adapter is another;"
                " continue from the tokens",
                field="submit.handoff",
            )
        size = len(descriptor.backend_state)
        if not 0 < size <= MAX_STATE_BYTES:
            limit = f"above 0 and at most {MAX_STATE_BYTES} bytes"
            raise InvalidField.of("submit.handoff.backend_state", f"{size} bytes", limit)
        return descriptor.backend_state
