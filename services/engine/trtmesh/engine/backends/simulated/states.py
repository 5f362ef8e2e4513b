"""Handoffs of a simulated worker by states of its own, as a backend does whose library moves the KV itself."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

from trtmesh.chassis.json_text import load_json
from trtmesh.engine.backend import HandoffState
from trtmesh.engine.backends.simulated.leases import Holding, Leases
from trtmesh.engine.backends.simulated.sequence import Sequence
from trtmesh.engine.handoff.identity import content_of
from trtmesh.engine.kv_memory import Content

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


@dataclass
class StateLeases(Leases):
    """The KV of context-only halves by lease, until another process pulls it. Nothing is announced: the library moves
    the KV after the prefill."""

    port: int = 0
    """Where other processes pull; 0 before the start."""
    kept_seconds: float = 0.0
    _kept: dict[str, _Kept] = field(default_factory=dict)
    _ending: dict[int, HandoffState] = field(default_factory=dict)
    """States of sequences that end now, by key."""

    def offer(self, lease_id: str, sequence: Sequence, tokens: int) -> None:
        pass

    def announce(self, sequence: Sequence, tokens: int) -> None:
        pass

    def compute(self, sequence: Sequence, tokens: int) -> None:
        pass

    def commit(self, sequence: Sequence, holding: Holding, emitted_tokens: int) -> None:
        """Keeps the KV of all tokens but the last for whoever has the state."""
        lease_id = sequence.sender_lease_id
        length = sequence.rule.prompt_tokens + emitted_tokens
        content = content_of(sequence.root, sequence.tokens[: length - 1])
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self.kept_seconds, self.drop, lease_id)
        self._holdings[lease_id], self._kept[lease_id] = holding, _Kept(content, timer)
        state = RemoteState(self.port, lease_id).write()
        self._ending[sequence.key] = HandoffState(state, self.kept_seconds)

    def state_of(self, sequence: Sequence) -> HandoffState | None:
        return self._ending.pop(sequence.key, None)

    def pull(self, lease_id: str) -> Content | None:
        """Gives KV away, once; None for unknown KV."""
        kept = self._kept.get(lease_id)
        self.drop(lease_id)
        return kept.content if kept else None

    def drop(self, lease_id: str) -> None:
        if kept := self._kept.pop(lease_id, None):
            kept.timer.cancel()
        super().drop(lease_id)

    def close(self) -> None:
        for lease_id in [*self._kept]:
            self.drop(lease_id)
