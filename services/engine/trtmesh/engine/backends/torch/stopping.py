"""Where a sequence ends."""

from __future__ import annotations

from collections.abc import Sequence

from trtmesh.chassis.vocabulary import Stopping
from trtmesh.v1 import generation_pb2 as pb

End = tuple[int, tuple[int, ...]]
"""A FinishReason and the ids that ended the sequence."""


class EndRule:
    """When the sequences of one item end; asked after each token.

    The ending token or word is part of the output. While fewer than `min_tokens` tokens were generated before it, an
    end id is not chosen (`bans_end_ids`) and a word that is completed does not end the sequence.
    """

    def __init__(
        self, stopping: Stopping, model_end_ids: Sequence[int], prompt_tokens: int, limit: int
    ) -> None:
        """`limit` is the most tokens of the sequence, prompt included."""
        own = model_end_ids if stopping.end_id is None else (stopping.end_id,)
        self.end_ids = frozenset() if stopping.ignore_end_id else frozenset(own)
        self.prompt_tokens = prompt_tokens
        self.limit = limit
        self._words_by_last = _by_last_id(stopping.stop_token_ids)
        # Length of the sequence, prompt included, before which nothing but the limit ends it.
        self._open_until = prompt_tokens + stopping.min_tokens

    @property
    def ending_tokens(self) -> int:
        """At most so many ids end a sequence before its limit."""
        return len(self.end_ids) + len(self._words_by_last)

    def bans_end_ids(self, length: int) -> bool:
        """Whether the token at index `length` must be no end id."""
        return length < self._open_until and bool(self.end_ids)

    def end_after(self, tokens: Sequence[int]) -> End | None:
        """How the sequence ends with the last of `tokens`, its prompt and what was generated; None if it goes on."""
        token = tokens[-1]
        length = len(tokens)
        if length > self._open_until:
            if token in self.end_ids:
                return pb.FINISH_REASON_END_ID, (token,)
            for word in self._words_by_last.get(token, ()):
                generated = length - self.prompt_tokens
                if generated >= len(word) and tuple(tokens[-len(word) :]) == word:
                    return pb.FINISH_REASON_STOP_WORD, word
        if length >= self.limit:
            return pb.FINISH_REASON_LENGTH, ()
        return None


def _by_last_id(words: Sequence[tuple[int, ...]]) -> dict[int, list[tuple[int, ...]]]:
    by_last: dict[int, list[tuple[int, ...]]] = {}
    for word in words:
        by_last.setdefault(word[-1], []).append(word)
    return by_last
