"""The decode state of one sequence: ids in, text without stop texts out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from trtmesh.chassis.errors import InvalidRequest, TokenOutOfVocabulary
from trtmesh.tokenizer.decoding import TextDecoder
from trtmesh.tokenizer.stop_texts import StopMatcher


@dataclass(frozen=True, slots=True)
class Stop:
    """A stop text was found."""

    stop_index: int
    token_count: int
    """Tokens of the call up to and including the one that completed it; 0 if an earlier call did."""


class _Phase(Enum):
    OPEN = "open"
    STOPPED = "stopped"
    FINISHED = "finished"


class DecodeSequence:
    """Text of one sequence. Its state depends on the ids so far and not on how they were split into calls."""

    __slots__ = (
        "_absorbed_stop",
        "_decoder",
        "_matcher",
        "_phase",
        "_vocabulary_size",
        "request_id",
    )

    def __init__(
        self,
        decoder: TextDecoder,
        matcher: StopMatcher | None,
        vocabulary_size: int,
        request_id: str = "",
    ) -> None:
        self.request_id = request_id
        self._decoder = decoder
        self._matcher = matcher
        self._vocabulary_size = vocabulary_size
        self._absorbed_stop: Stop | None = None
        self._phase = _Phase.OPEN

    def absorb(self, token_ids: Sequence[int]) -> None:
        """Takes tokens whose text was delivered before. Raises TokenOutOfVocabulary.

        A stop text that they complete is told by the next `push`.
        """
        _, stop = self.push(token_ids)
        if stop is not None:
            self._absorbed_stop = Stop(stop.stop_index, 0)

    def push(self, token_ids: Sequence[int]) -> tuple[str, Stop | None]:
        """The text that became certain, and the stop text that ended the sequence, told once.

        Tokens after a stop text are void. Raises TokenOutOfVocabulary, and InvalidRequest for tokens after `finish`.
        """
        if self._phase is not _Phase.OPEN:
            return self._push_after_the_end(token_ids)
        if token_ids and max(token_ids) >= self._vocabulary_size:
            raise TokenOutOfVocabulary(
                f"token id {max(token_ids)} is outside the vocabulary of {self._vocabulary_size} ids"
            )
        push, matcher = self._decoder.push, self._matcher
        if matcher is None:
            if len(token_ids) == 1:
                return push(token_ids[0]), None
            return "".join([push(token_id) for token_id in token_ids]), None
        texts = []
        for count, token_id in enumerate(token_ids, start=1):
            texts.append(matcher.push(push(token_id)))
            if matcher.stop_index is not None:
                self._phase = _Phase.STOPPED
                return "".join(texts), Stop(matcher.stop_index, count)
        return "".join(texts), None

    def finish(self, token_ids: Sequence[int]) -> tuple[str, Stop | None]:
        """`push` of the last tokens, then everything that is still held back."""
        text, stop = self.push(token_ids)
        if self._phase is not _Phase.OPEN:
            return text, stop
        self._phase = _Phase.FINISHED
        rest = self._decoder.flush()
        if self._matcher is None:
            return text + rest, None
        text += self._matcher.push(rest)
        if self._matcher.stop_index is not None:
            return text, Stop(self._matcher.stop_index, len(token_ids))
        return text + self._matcher.flush(), None

    def _push_after_the_end(self, token_ids: Sequence[int]) -> tuple[str, Stop | None]:
        if self._phase is _Phase.FINISHED and token_ids:
            raise InvalidRequest(
                f"{len(token_ids)} tokens came after the sequence was finished; close it instead"
            )
        stop, self._absorbed_stop = self._absorbed_stop, None
        return "", stop
