"""What a tokenizer tells the pool that it belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from trtmesh.router.streams.sequence import SequenceRun
from trtmesh.router.tokenizers.encode_job import EncodeJob

if TYPE_CHECKING:
    from trtmesh.router.tokenizers.tokenizer import Tokenizer


class Pool(Protocol):
    """Whoever decides which tokenizer has what."""

    def on_ready(self, tokenizer: Tokenizer) -> None:
        """It takes texts and sequences."""

    def on_room(self, tokenizer: Tokenizer) -> None:
        """It has one text less to encode."""

    def on_lost(self, encodes: Sequence[EncodeJob], runs: Sequence[SequenceRun]) -> None:
        """It is gone, and this is what it had."""

    def move(self, encodes: Sequence[EncodeJob], runs: Sequence[SequenceRun]) -> None:
        """It drains, and does not take these."""

    def answers_elsewhere(self, tokenizer: Tokenizer) -> bool:
        """Whether another one could have what it has and answers in time."""
