"""The decode state of one sequence: token ids in, text out, ended by stop texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from trtmesh.chassis.errors import InvalidRequest
from trtmesh.tokenizer.decoding.stop_matcher import StopMatcher
from trtmesh.tokenizer.detokenizers.base import TextDecoder

NO_MARKS: Mapping[int, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Stop:
    """A stop text was found."""

    stop_index: int
    token_count: int
    """Tokens of the call up to and including the completing token; 0 if an earlier call completed the stop text."""


@dataclass(slots=True, eq=False)
class DecodeSequence:
    """Decodes one sequence. The text does not depend on how the ids are split into calls."""

    _decoder: TextDecoder
    _matcher: StopMatcher | None
    _vocabulary_size: int
    request_id: str = ""
    min_tokens: int = 0
    """Fewest tokens before the one that completes a stop text."""
    _pushed: int = 0
    """Tokens of earlier calls, where stop texts are looked for."""
    _absorbed_stop: Stop | None = None
    _over: bool = False
    _finished: bool = False

    def absorb(self, token_ids: Sequence[int]) -> None:
        """Takes tokens with delivered text; the next `push` returns a stop text completed here."""
        _, stop = self.push(token_ids)
        if stop is not None:
            self._absorbed_stop = Stop(stop.stop_index, 0)

    def push(self, token_ids: Sequence[int]) -> tuple[str, Stop | None]:
        """Returns the newly certain text, and once the stop text at the end of the sequence.

        Ignores tokens after a stop text. Raises InvalidRequest for tokens after `finish`.
        """
        if self._over:
            return self._push_after_the_end(token_ids)
        text, count, matcher = "", 0, self._matcher
        marks = matcher.marks if matcher else NO_MARKS
        for token_id in token_ids:
            # This loop runs for every token served; enumerate doubles the cost.
            count += 1
            if token_id >= self._vocabulary_size:
                # A row of the model's padded embedding: the tokenizer has no text for it.
                continue
            delta = self._decoder.push(token_id)
            if matcher is not None:
                may_end = self._pushed + count > self.min_tokens
                if token_id in marks:
                    rest = self._decoder.flush()
                    delta = matcher.push_mark(marks[token_id], rest, may_end=may_end)
                else:
                    delta = matcher.push(delta, may_end=may_end)
                if matcher.stop_index is not None:
                    self._over = True
                    return text + delta, Stop(matcher.stop_index, count)
            text += delta
        self._pushed += count
        return text, None

    def finish(self, token_ids: Sequence[int]) -> tuple[str, Stop | None]:
        """Pushes the last tokens and returns all text still held back."""
        text, stop = self.push(token_ids)
        if self._over:
            return text, stop
        self._over = self._finished = True
        rest = self._decoder.flush()
        if self._matcher is None:
            return text + rest, None
        text += self._matcher.push(rest, may_end=self._pushed > self.min_tokens)
        if self._matcher.stop_index is not None:
            return text, Stop(self._matcher.stop_index, len(token_ids))
        return text + self._matcher.flush(), None

    def _push_after_the_end(self, token_ids: Sequence[int]) -> tuple[str, Stop | None]:
        if self._finished and token_ids:
            raise InvalidRequest(
                f"has {len(token_ids)} ids after the sequence was finished; close the handle instead",
                field="token_ids",
            )
        stop, self._absorbed_stop = self._absorbed_stop, None
        return "", stop
