"""Drafts from the sequence's own text: what followed the longest suffix that occurred before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf

from trtmesh.engine.backends.torch.drafts.drafter import Wish

SHORTEST = 2
"""Tokens of the shortest suffix to look up."""
LONGEST = 32
"""Matches are compared up to this length."""
CANDIDATES = 8
"""Most earlier places compared, the latest first."""
TOKENS_AT_ONCE = 8192
"""Most tokens indexed in a step, so that a long prompt delays no other sequence."""
ID_BITS = 32


class PromptLookup:
    """Implements Drafter."""

    is_free = True

    def __init__(self) -> None:
        self._indexes: dict[int, SuffixIndex] = {}

    def propose(self, wishes: SequenceOf[Wish]) -> list[list[int]]:
        indexes = self._indexes
        proposals = []
        for sequence, most in wishes:
            index = indexes.get(sequence.key)
            if index is None:
                index = indexes[sequence.key] = SuffixIndex()
            proposals.append(index.propose(sequence.tokens, most))
        return proposals

    def forget(self, key: int) -> None:
        self._indexes.pop(key, None)


class SuffixIndex:
    """The places of every pair of tokens, each linked to the place before."""

    def __init__(self) -> None:
        # The index after the last occurrence, by pair.
        self._last: dict[int, int] = {}
        # The index after the occurrence before, by index; 0 without any.
        self._before = array("q", [0] * SHORTEST)

    def propose(self, tokens: SequenceOf[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow `tokens`, to which tokens were only added since the last call."""
        if len(tokens) < SHORTEST or not self._catch_up(tokens):
            return []
        place = self._last.get(_pair(tokens, len(tokens)), 0)
        best = longest = 0
        for _ in range(CANDIDATES):
            if not place:
                break
            length = _match(tokens, place)
            if length > longest:
                best, longest = place, length
            place = self._before[place]
        # The longer the match, the longer the guess holds.
        return _continuation(tokens, best, min(most, longest)) if best else []

    def _catch_up(self, tokens: SequenceOf[int]) -> bool:
        """Takes in tokens with a follower; returns whether all are in."""
        before, last = self._before, self._last
        first = len(before)
        end = min(len(tokens), first + TOKENS_AT_ONCE)
        for place in range(first, end):
            pair = _pair(tokens, place)
            before.append(last.get(pair, 0))
            last[pair] = place
        return end >= len(tokens)


def _pair(tokens: SequenceOf[int], end: int) -> int:
    return tokens[end - 2] << ID_BITS | tokens[end - 1]


def _match(tokens: SequenceOf[int], place: int) -> int:
    """Tokens that the end of `tokens` and the tokens before `place` have in common."""
    length, end, most = SHORTEST, len(tokens), min(LONGEST, place)
    while length < most and tokens[place - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length


def _continuation(tokens: SequenceOf[int], place: int, most: int) -> list[int]:
    """The tokens from `place` on. Beyond the end they go on as they did from `place`: the text may be a repetition."""
    found = list(tokens[place : place + most])
    period = len(tokens) - place
    while len(found) < most:
        found.append(found[len(found) - period])
    return found
