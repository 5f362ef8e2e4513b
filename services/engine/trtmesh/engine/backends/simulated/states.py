"""Handoffs of a simulated worker by states of its own, as a backend does whose library moves the KV itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass

from trtmesh.chassis.json_text import load_json
from trtmesh.engine.backend import Content, HandoffState
from trtmesh.engine.backends.simulated.handoffs import WrittenHandoffs
from trtmesh.engine.backends.simulated.kv_content import KvContent
from trtmesh.engine.backends.simulated.sequence import SimulatedSequence
from trtmesh.engine.handoff.identity import content_of
from trtmesh.engine.scheduling.handoffs import Sending
from trtmesh.engine.scheduling.leases import LeasedBlocks
from trtmesh.engine.scheduling.scheduler import Scheduler
from trtmesh.engine.scheduling.sequence import Chunk

PULL_BYTES = 256
"""Most bytes of a line between two libraries."""


class UnusableState(Exception):
    """A state that this library cannot continue from."""


@dataclass(frozen=True, slots=True)
class RemoteState:
    """KV that another process keeps, as its state names it."""

    port: int
    """Of the process, on this host."""
    lease_id: str

    def write(self) -> bytes:
        return json.dumps({"port": self.port, "lease_id": self.lease_id}).encode()

    @classmethod
    def read(cls, content: bytes) -> RemoteState:
        """Raises UnusableState."""
        try:
            fields = load_json(content)
            port, lease_id = fields["port"], fields["lease_id"]
        except (ValueError, KeyError, TypeError) as error:
            raise UnusableState("is none of this backend") from error
        if not (isinstance(port, int) and isinstance(lease_id, str)):
            raise UnusableState("is none of this backend")
        return cls(port, lease_id)


@dataclass(frozen=True, slots=True)
class _Kept:
    """KV for another process, until the timer frees it."""

    content: Content
    timer: asyncio.TimerHandle


class KeptStates(WrittenHandoffs):
    """The KV of context-only halves by lease, until another process pulls it. Nothing is announced: the library moves
    the KV after the prefill."""

    def __init__(
        self, scheduler: Scheduler[SimulatedSequence], content: KvContent, kept_seconds: float
    ) -> None:
        super().__init__(scheduler, content)
        self.port = 0
        """Where other processes pull; 0 before the start."""
        self._kept_seconds = kept_seconds
        self._kept: dict[str, _Kept] = {}
        self._ending: dict[int, HandoffState] = {}
        """States of sequences that end now, by key."""

    def sending(
        self, chunks: Iterable[Chunk[SimulatedSequence]]
    ) -> list[Sending[SimulatedSequence]]:
        return []

    def leave(self, sequence: SimulatedSequence, *, with_kv: bool) -> None:
        """Keeps the KV of all tokens but the last for whoever has the state."""
        outgoing = self.outgoing.pop(sequence.key, None)
        if outgoing is None or not with_kv:
            return
        lease_id, tokens = outgoing.lease_id, sequence.tokens[:-1]
        blocks = sequence.blocks[: self._scheduler.rules.blocks(len(tokens))]
        self._scheduler.pool.hold(blocks)
        self._leases[lease_id] = LeasedBlocks(blocks)
        timer = asyncio.get_running_loop().call_later(self._kept_seconds, self.drop, lease_id)
        self._kept[lease_id] = _Kept(content_of(sequence.root, tokens), timer)
        state = RemoteState(self.port, lease_id).write()
        self._ending[sequence.key] = HandoffState(state, self._kept_seconds)

    def state_of(self, sequence: SimulatedSequence) -> HandoffState | None:
        return self._ending.pop(sequence.key, None)

    def pull(self, lease_id: str) -> Content | None:
        """Gives KV away, once; None for unknown KV."""
        kept = self._kept.get(lease_id)
        self.drop(lease_id)
        return kept.content if kept else None

    def drop(self, lease_id: str) -> list[SimulatedSequence]:
        if kept := self._kept.pop(lease_id, None):
            kept.timer.cancel()
        return super().drop(lease_id)

    def close(self) -> None:
        for lease_id in [*self._kept]:
            self.drop(lease_id)
