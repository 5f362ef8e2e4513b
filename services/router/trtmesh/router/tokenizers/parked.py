"""A sequence without a tokenizer."""

from __future__ import annotations

from trtmesh.router.streams.sequence import SequenceRun
from trtmesh.router.tokenizers.waiting_room import WaitingRoom


class Parked:
    """Decoder of a sequence that waits for a tokenizer: its tokens stay with the sequence itself."""

    def __init__(self, room: WaitingRoom[SequenceRun]) -> None:
        self._room = room

    def decode(self, sequence: SequenceRun, token_ids: list[int]) -> None:
        """Nothing: whoever opens the sequence decodes all that has no text yet."""

    def finish(self, sequence: SequenceRun) -> None:
        """Nothing, likewise."""

    def restart(self, sequence: SequenceRun) -> None:
        """Nothing, likewise."""

    def drop(self, sequence: SequenceRun) -> None:
        self._room.dismiss(sequence)
