"""The decode state of one sequence: ids in, text without stop texts out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trtmesh.chassis.errors import InvalidRequest, TokenOutOfVocabulary
from trtmesh.tokenizer.decoding.base import TextDecoder
from trtmesh.tokenizer.stop_texts import StopMatcher


@dataclass(frozen=True, slots=True)
class Stop:
    """A stop text was found."""

    stop_index: int
    token_count: int
    """Tokens of the call up to and including the one that completed it; 0 if an earlier call did."""


class DecodeSequence:
    """Text of one sequence. Its state depends on the ids so far and not on how they were split into calls."""

    __slots__ = (
        "_absorbed_stop",
        "_decoder",
        "_finished",
        "_matcher",
        "_over",
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
        self._over = False
        self._finished = False

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
        if self._over:
            return self._push_after_the_end(token_ids)
        text, count, matcher = "", 0, self._matcher
        for token_id in token_ids:
            count += 1  # noqa: SIM113 - this loop runs for every token served; enumerate doubles its cost
            if token_id >= self._vocabulary_size:
                raise self._out_of_vocabulary(token_id)
            delta = self._decoder.push(token_id)
            if matcher is not None:
                delta = matcher.push(delta)
                if matcher.stop_index is not None:
                    self._over = True
                    return text + delta, Stop(matcher.stop_index, count)
            text += delta
        return text, None

    def finish(self, token_ids: Sequence[int]) -> tuple[str, Stop | None]:
        """`push` of the last tokens, then everything that is still held back."""
        text, stop = self.push(token_ids)
        if self._over:
            return text, stop
        self._over = self._finished = True
        rest = self._decoder.flush()
        if self._matcher is None:
            return text + rest, None
        text += self._matcher.push(rest)
        if self._matcher.stop_index is not None:
            return text, Stop(self._matcher.stop_index, len(token_ids))
        return text + self._matcher.flush(), None

    def _out_of_vocabulary(self, token_id: int) -> TokenOutOfVocabulary:
        size = self._vocabulary_size
        return TokenOutOfVocabulary(f"token id {token_id} is outside the vocabulary of {size} ids")

    def _push_after_the_end(self, token_ids: Sequence[int]) -> tuple[str, Stop | None]:
        if self._finished and token_ids:
            raise InvalidRequest(
                f"{len(token_ids)} tokens came after the sequence was finished; close it instead"
            )
        stop, self._absorbed_stop = self._absorbed_stop, None
        return "", stop
