"""Where a sequence ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trtmesh.chassis.stop_texts import StopTexts
from trtmesh.chassis.vocabulary import Stopping
from trtmesh.v1 import generation_pb2 as pb

End = tuple["pb.FinishReason.ValueType", tuple[int, ...]]
"""A FinishReason and the ids at the end of the sequence."""


class StopVocabulary:
    """generation.proto's StopVocabulary: finds stop texts in the texts of tokens, with a byte as a character."""

    START = StopTexts.ROOT
    """The state before a text."""

    def __init__(
        self, texts: Sequence[bytes], tokens: Mapping[int, bytes], textless_from: int = 0
    ) -> None:
        """`tokens` are the ids with texts of use for stop texts; ids from `textless_from` on, unless 0, have none."""
        self._stops = StopTexts([text.decode("latin-1") for text in texts])
        self._tokens = {token: text.decode("latin-1") for token, text in tokens.items()}
        self._textless_from = textless_from

    def follow(self, state: int, token: int, *, may_end: bool = True) -> tuple[int, str]:
        """Returns the state after a further token and, where the token completes a stop text, the token's text up to
        the end of the stop text. Ignores a stop text where the sequence must not end."""
        added = self._tokens.get(token)
        if added is None:
            return (state if 0 < self._textless_from <= token else self.START), ""
        for length, character in enumerate(added, start=1):
            state = self._stops.step(state, character)
            if may_end and self._stops.ending(state):
                return state, added[:length]
        return state, ""


class EndRule:
    """Decides when the sequences of an item end: `end_after` judges a token, `first_end` a run of tokens.

    The ending token or word is part of the output. Before `min_tokens` tokens were generated, end ids are banned
    (`bans_end_ids`) and a completed stop word does not end the sequence. Lengths and limits include the prompt.
    """

    def __init__(
        self,
        stopping: Stopping,
        model_end_ids: Sequence[int],
        prompt_tokens: int,
        limit: int,
        stop_vocabulary: StopVocabulary | None = None,
    ) -> None:
        """`limit` is the most tokens of the sequence; `stop_vocabulary` is for a beam search to follow."""
        own = model_end_ids if stopping.end_id is None else (stopping.end_id,)
        self.end_ids = frozenset() if stopping.ignore_end_id else frozenset(own)
        self.prompt_tokens = prompt_tokens
        self.limit = limit
        self.stop_vocabulary = stop_vocabulary
        self._words_by_last = _by_last_id(stopping.stop_token_ids)
        self._ending_ids = self.end_ids | self._words_by_last.keys()
        self.min_tokens = stopping.min_tokens
        # Below this length only the limit ends the sequence.
        self._open_until = prompt_tokens + stopping.min_tokens

    @property
    def ending_tokens(self) -> int:
        """Most ids able to end a sequence before the limit."""
        return len(self.end_ids) + len(self._words_by_last)

    def bans_end_ids(self, length: int) -> bool:
        """Whether the token at index `length` must not be an end id."""
        return length < self._open_until and bool(self.end_ids)

    def end_after(self, tokens: Sequence[int], length: int | None = None) -> End | None:
        """Returns how the sequence ends with the last of the first `length` tokens, by default all, or None to
        continue."""
        length = length or len(tokens)
        token = tokens[length - 1]
        if length > self._open_until:
            if token in self.end_ids:
                return pb.FINISH_REASON_END_ID, (token,)
            for word in self._words_by_last.get(token, ()):
                start = length - len(word)
                if start >= self.prompt_tokens and tuple(tokens[start:length]) == word:
                    return pb.FINISH_REASON_STOP_WORD, word
        if length >= self.limit:
            return pb.FINISH_REASON_LENGTH, ()
        return None

    def first_end(self, tokens: Sequence[int], start: int) -> tuple[int, End] | None:
        """Returns length and end of the sequence if a token from index `start` on ends the sequence."""
        last = min(len(tokens), self.limit)
        if self._ending_ids.isdisjoint(tokens[start:last]):
            # Only the limit can end the sequence.
            start = last - 1
        for length in range(start + 1, last + 1):
            end = self.end_after(tokens, length)
            if end:
                return length, end
        return None


def _by_last_id(words: Sequence[tuple[int, ...]]) -> dict[int, list[tuple[int, ...]]]:
    by_last: dict[int, list[tuple[int, ...]]] = {}
    for word in words:
        by_last.setdefault(word[-1], []).append(word)
    return by_last
