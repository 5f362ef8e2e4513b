"""Handoffs of a simulated worker by states of its own, as a backend does whose library moves the KV itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError
from trtmesh.chassis.errors import HandoffFailed
from trtmesh.engine.backend import HandoffState
from trtmesh.engine.backends.simulated.handoffs import WrittenHandoffs
from trtmesh.engine.backends.simulated.kv_content import KvContent
from trtmesh.engine.backends.simulated.sequence import SimulatedSequence
from trtmesh.engine.handoff.identity import content_of
from trtmesh.engine.scheduling.handoffs import Sending
from trtmesh.engine.scheduling.leases import LeasedBlocks
from trtmesh.engine.scheduling.scheduler import Scheduler
from trtmesh.engine.scheduling.sequence import Chunk


class RemoteState(BaseModel):
    """KV that another process keeps, as its state names it."""

    model_config = ConfigDict(ser_json_bytes="hex", val_json_bytes="hex")

    port: int
    """Of the process, on this host."""
    lease_id: str
    tokens: int
    digest: bytes

    @classmethod
    def read(cls, content: bytes) -> Self:
        """Raises HandoffFailed."""
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            raise HandoffFailed("the handoff state is none of this backend") from error


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
        self._kept: dict[str, asyncio.TimerHandle] = {}
        """KV for other processes, by lease, until the timer frees it."""
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
        self._kept[lease_id] = timer
        kv = content_of(sequence.root, tokens)
        state = RemoteState(port=self.port, lease_id=lease_id, tokens=kv.tokens, digest=kv.digest)
        content = state.model_dump_json().encode()
        self._ending[sequence.key] = HandoffState(content, self._kept_seconds)

    def state_of(self, sequence: SimulatedSequence) -> HandoffState | None:
        return self._ending.pop(sequence.key, None)

    def pull(self, lease_id: str) -> bool:
        """Gives KV away, once. Returns whether it was kept."""
        is_kept = lease_id in self._kept
        self.drop(lease_id)
        return is_kept

    def drop(self, lease_id: str) -> list[SimulatedSequence]:
        if timer := self._kept.pop(lease_id, None):
            timer.cancel()
        return super().drop(lease_id)

    def close(self) -> None:
        for lease_id in [*self._kept]:
            self.drop(lease_id)
