"""A worker's own KV, and how other workers reach it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from trtmesh.chassis.tls.client import TlsOfPeers, plain_text
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.backend import Backend
from trtmesh.engine.handoff.copying import Copying
from trtmesh.engine.handoff.identity import KvKind
from trtmesh.engine.handoff.message_memory import MessageMemory
from trtmesh.engine.handoff.settings import HandoffSettings
from trtmesh.engine.handoff.transports.choice import Transports
from trtmesh.engine.kv_memory import KvMemory


@dataclass(frozen=True)
class OwnKv:
    """The KV of a loaded worker, with everything that its leases need."""

    worker: str
    settings: HandoffSettings
    backend: Backend
    memory: KvMemory
    kind: KvKind
    total_blocks: int
    layers_per_part: int
    transports: Transports
    threads: Executor
    """For work that would hold up the event loop."""
    copying: Copying
    """Copies KV to and from messages."""
    max_message_bytes: int
    is_draining: Callable[[], bool]
    tls_of_peers: TlsOfPeers = plain_text
    """For connections to senders."""
    message_memory: MessageMemory = field(default_factory=MessageMemory)

    @property
    def max_quarantined_blocks(self) -> int:
        """Most blocks in quarantine with which the worker reserves blocks."""
        return int(self.settings.max_quarantined_fraction * self.total_blocks)

    def hash(self, adapter: Adapter | None) -> bytes:
        """The compatibility hash of an item."""
        return self.kind.hash(adapter)


def kind_of(memory: KvMemory, model_fingerprint: str, tokenizer_fingerprint: str) -> KvKind:
    """The kind of KV in `memory`."""
    shards = memory.shards
    return KvKind(
        model_fingerprint=model_fingerprint,
        tokenizer_fingerprint=tokenizer_fingerprint,
        layers=len({layer for shard in shards for layer in shard.layers}),
        kv_heads=len({head for shard in shards for head in shard.kv_heads}),
        head_dim=shards[0].head_dim,
    )
