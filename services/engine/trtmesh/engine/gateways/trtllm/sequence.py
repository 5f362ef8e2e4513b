"""The output of a sequence of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trtmesh.engine.backend import SequenceEnd, TokenDetails, TopLogProbs
from trtmesh.engine.gateways.trtllm.request import AskedGeneration
from trtmesh.engine.gateways.trtllm.texts import StopSearch
from trtmesh.v1 import generation_pb2 as pb

STOP_IDS = frozenset({pb.FINISH_REASON_END_ID, pb.FINISH_REASON_STOP_WORD})


@dataclass(slots=True)
class SequenceOutput:
    """Everything generated so far, because the last answer repeats all. Bounded by `max_tokens`."""

    asked: AskedGeneration
    index: int
    search: StopSearch | None
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[TopLogProbs] = field(default_factory=list)
    logits: bytearray = field(default_factory=bytearray)
    sent: int = 0
    """Tokens in chunks so far."""
    end: SequenceEnd | None = None
    completed: bool = False
    """Whether the last answer was taken."""

    @property
    def stop_text(self) -> str | None:
        """The stop text at the end of the sequence."""
        return self.search.found if self.search else None

    @property
    def generated(self) -> int:
        """Tokens generated, including a stop text."""
        return len(self.token_ids)

    @property
    def sendable(self) -> int:
        """Leading tokens, certain to belong to the output."""
        if self.end or self.stop_text is not None:
            # A backend may report the end later than the ending token.
            return max(self.sent, self._kept())
        if self.asked.revises:
            return 0
        return self.search.certain if self.search else len(self.token_ids)

    def add(self, offset: int, token_ids: Sequence[int], details: TokenDetails | None) -> bool:
        """Adds tokens, in place of earlier tokens from `offset` on. Returns whether a stop text was completed; later
        tokens are dropped."""
        if self.stop_text is not None:
            return False
        if offset < len(self.token_ids):
            del self.token_ids[offset:]
            self._cut_details(offset)
        self.token_ids += token_ids
        if details:
            self.log_probs += details.log_probs
            self.top_log_probs += details.top_log_probs
            if details.generation_logits:
                self.logits += details.generation_logits.data
        return self.search is not None and self._search(self.search, offset)

    def _search(self, search: StopSearch, offset: int) -> bool:
        for length in range(offset + 1, len(self.token_ids) + 1):
            may_end = length > self.asked.min_tokens
            if search.add(self.token_ids[length - 1], may_end=may_end):
                del self.token_ids[length:]
                self._cut_details(length)
                return True
        return False

    def _cut_details(self, length: int) -> None:
        del self.log_probs[length:]
        del self.top_log_probs[length:]
        del self.logits[length * self.asked.logits_row_bytes :]

    def _kept(self) -> int:
        """Tokens of the output, without the end id or stop text unless requested."""
        if self.asked.includes_stop:
            return len(self.token_ids)
        if self.search and self.search.found is not None:
            return self.search.kept
        if self.end and self.end.reason in STOP_IDS:
            return len(self.token_ids) - len(self.end.stop_token_ids)
        return len(self.token_ids)
