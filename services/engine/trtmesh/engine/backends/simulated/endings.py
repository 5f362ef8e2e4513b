"""Where a sequence ends, judged over a run of tokens at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trtmesh.chassis.vocabulary import Stopping
from trtmesh.v1 import generation_pb2 as pb


@dataclass(frozen=True, slots=True)
class Ending:
    """How a sequence ends: after how many generated tokens, why, and by which token ids."""

    tokens: int
    reason: int
    stop_token_ids: tuple[int, ...] = ()


class EndRule:
    """When the sequences of one item end.

    As everywhere, at least `min_tokens` tokens come before an end id, and before the token that completes a stop word.
    """

    def __init__(self, stopping: Stopping, model_end_ids: Sequence[int], max_tokens: int) -> None:
        own = model_end_ids if stopping.end_id is None else (stopping.end_id,)
        self.end_ids = frozenset() if stopping.ignore_end_id else frozenset(own)
        self.max_tokens = max_tokens
        self._min_tokens = min(stopping.min_tokens, max_tokens)
        self._words = stopping.stop_token_ids
        self._reach = max((len(word) for word in self._words), default=1) - 1

    def without_early_ends(self, position: int, tokens: list[int], other: int) -> list[int]:
        """`tokens`, which begin at `position`, with `other` for the end ids that min_tokens forbids."""
        early = self._min_tokens - position
        if early <= 0 or self.end_ids.isdisjoint(tokens[:early]):
            return tokens
        return [other if token in self.end_ids else token for token in tokens[:early]] + tokens[
            early:
        ]

    def find(self, generated: Sequence[int], tokens: Sequence[int]) -> Ending | None:
        """The first ending among `tokens`, which follow `generated`."""
        position = len(generated)
        endings = [self._length(position, tokens), self._end_id(position, tokens)]
        endings += [self._word(word, generated, tokens) for word in self._words]
        return min((e for e in endings if e), key=_order, default=None)

    def _length(self, position: int, tokens: Sequence[int]) -> Ending | None:
        if position + len(tokens) < self.max_tokens:
            return None
        return Ending(self.max_tokens, pb.FINISH_REASON_LENGTH)

    def _end_id(self, position: int, tokens: Sequence[int]) -> Ending | None:
        if self.end_ids.isdisjoint(tokens):
            return None
        for count, token in enumerate(tokens, position + 1):
            if token in self.end_ids and count > self._min_tokens:
                return Ending(count, pb.FINISH_REASON_END_ID, (token,))
        return None

    def _word(
        self, word: tuple[int, ...], generated: Sequence[int], tokens: Sequence[int]
    ) -> Ending | None:
        before = list(generated[max(0, len(generated) - self._reach) :])
        window = before + list(tokens)
        skipped = len(generated) - len(before)
        for end in range(max(len(word), len(before) + 1), len(window) + 1):
            long_enough = skipped + end > self._min_tokens
            if long_enough and tuple(window[end - len(word) : end]) == word:
                return Ending(skipped + end, pb.FINISH_REASON_STOP_WORD, word)
        return None


def _order(ending: Ending) -> tuple[int, bool]:
    # At the same token the content's reason beats the length's.
    return ending.tokens, ending.reason == pb.FINISH_REASON_LENGTH
