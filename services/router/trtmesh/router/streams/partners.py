"""Whom a sequence deals with: the worker that has it, the item that owns it, the decoder that makes its text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from trtmesh.chassis.errors import TrtmeshError
from trtmesh.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from trtmesh.router.streams.sequence import SequenceRun


class Assignment(Protocol):
    """That a worker has a sequence; over with the end that the worker tells, with `release`, or with the worker."""

    @property
    def address(self) -> str:
        """Address of the worker."""

    def stop(self, reason: pb.FinishReason.ValueType) -> None:
        """Asks the worker to end the sequence, and to tell so."""

    def release(self, error: TrtmeshError | None) -> None:
        """Takes the sequence away from the worker, because of `error` where the worker gave cause for it: it is told to
        stop, and whatever it still says is dropped."""


class Owner(Protocol):
    """Whoever lets a sequence run."""

    def on_settled(self, run: SequenceRun) -> None:
        """The sequence is over; called exactly once, after its last token."""

    def on_lost(self, run: SequenceRun, address: str, error: TrtmeshError) -> None:
        """The worker at `address` does not go on with a sequence that is not over. No worker has it now."""

    def move(self, runs: Sequence[SequenceRun], address: str, error: TrtmeshError) -> bool:
        """Takes sequences away from the worker at `address` because of `error`, if another one takes them now; tells
        whether it did."""


class Decoder(Protocol):
    """Where a sequence's tokens become text."""

    def decode(self, sequence: SequenceRun, token_ids: list[int]) -> None:
        """Asks for the text of new tokens; answered by `sequence.on_text` or `sequence.on_stop_text`."""

    def finish(self, sequence: SequenceRun) -> None:
        """Asks for the rest of the text; answered by `on_text` and then by `on_text_complete`."""

    def restart(self, sequence: SequenceRun) -> None:
        """Forgets what was asked of the sequence, which begins anew: with no token, and nothing is answered."""

    def drop(self, sequence: SequenceRun) -> None:
        """Forgets the sequence; it is not answered any more."""
