"""Drafts from known text: the continuation of the longest suffix with an earlier occurrence."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf

from trtmesh.engine.backends.torch.drafts.drafter import Wish
from trtmesh.engine.backends.torch.sequence import Sequence

SHORTEST = 2
"""Tokens of the shortest suffix to look up."""
LONGEST = 32
"""Matches are compared up to this length."""
CANDIDATES = 8
"""Most earlier places compared, the latest first."""
TOKENS_AT_ONCE = 8192
"""Most tokens of a sequence indexed in a step: a long prompt delays the others by a few milliseconds."""
ID_BITS = 32

Found = tuple[int, SequenceOf[int]]
"""The length of a match, and the following text: at most as many tokens."""
NOTHING: Found = (0, ())


class PromptLookup:
    """Implements Drafter by the text of the sequence."""

    is_free = True
    seconds_apart = 0.0

    def __init__(self) -> None:
        self._indexes: dict[int, SuffixIndex] = {}

    def propose(self, wishes: SequenceOf[Wish]) -> list[SequenceOf[int]]:
        return [self.find(sequence, most)[1] for sequence, most in wishes]

    def find(self, sequence: Sequence, most: int) -> Found:
        index = self._indexes.get(sequence.key)
        if index is None:
            index = self._indexes[sequence.key] = SuffixIndex(sequence.tokens)
        return index.find(sequence.tokens, most) if index.catch_up() else NOTHING

    def forget(self, sequence: Sequence) -> None:
        self._indexes.pop(sequence.key, None)


class SuffixIndex:
    """The places of every pair of tokens in a text, each linked to the place before."""

    def __init__(self, text: list[int]) -> None:
        """Tokens may be added to `text`, then `catch_up`."""
        self.text = text
        # The index after the last occurrence, by pair.
        self._last: dict[int, int] = {}
        # The index after the occurrence before, by index; 0 without any.
        self._before = array("q", [0] * SHORTEST)

    def find(self, tokens: SequenceOf[int], most: int) -> Found:
        """Up to `most` tokens likely to follow `tokens`. The text may be `tokens` too."""
        if len(tokens) < SHORTEST:
            return NOTHING
        place = self._last.get(_pair(tokens, len(tokens)), 0)
        best = longest = 0
        for _ in range(CANDIDATES):
            if not place:
                break
            length = self._match(tokens, place)
            if length > longest:
                best, longest = place, length
            place = self._before[place]
        # The longer the match, the longer the guess holds.
        return (longest, self._continuation(best, min(most, longest))) if best else NOTHING

    def catch_up(self) -> bool:
        """Takes in tokens with a follower; returns whether all are in."""
        before, last, text = self._before, self._last, self.text
        first = len(before)
        end = min(len(text), first + TOKENS_AT_ONCE)
        for place in range(first, end):
            pair = _pair(text, place)
            before.append(last.get(pair, 0))
            last[pair] = place
        return end >= len(text)

    def _match(self, tokens: SequenceOf[int], place: int) -> int:
        """Tokens common to the end of `tokens` and the text before `place`."""
        text, length, end = self.text, SHORTEST, len(tokens)
        most = min(LONGEST, place, end)
        while length < most and text[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length

    def _continuation(self, place: int, most: int) -> list[int]:
        """The text from `place` on, repeated beyond the end, since the text may be a repetition."""
        found = self.text[place : place + most]
        period = len(self.text) - place
        while len(found) < most:
            found.append(found[len(found) - period])
        return found


def _pair(tokens: SequenceOf[int], end: int) -> int:
    return tokens[end - 2] << ID_BITS | tokens[end - 1]
