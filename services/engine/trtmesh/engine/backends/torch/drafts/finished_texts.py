"""Drafts from the sequence, and from finished sequences of the same salt, adapter and prompt table. As with KV, nothing
crosses between tenants."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf

from trtmesh.engine.backends.torch.drafts.drafter import Wish
from trtmesh.engine.backends.torch.drafts.prompt_lookup import (
    ID_BITS,
    NOTHING,
    SHORTEST,
    TOKENS_AT_ONCE,
    Found,
    PromptLookup,
    SuffixIndex,
)
from trtmesh.engine.backends.torch.sequence import Sequence

MOST_TOKENS = 2**15
"""Most tokens of finished sequences in an index; a full index replaces the index before."""
MOST_SHELVES = 16
"""Most salts, adapters and prompt tables; the longest unused are dropped."""
SEPARATOR = 2**ID_BITS - 1
"""Between two texts: no id of a vocabulary, so no match crosses texts."""


class FinishedTexts:
    """Implements Drafter."""

    is_free = True
    seconds_apart = 0.0

    def __init__(self) -> None:
        self._own = PromptLookup()
        # By the root of the sequences, the longest unused first.
        self._shelves: OrderedDict[int, Shelf] = OrderedDict()

    def propose(self, wishes: SequenceOf[Wish]) -> list[SequenceOf[int]]:
        return [self._find(sequence, most)[1] for sequence, most in wishes]

    def _find(self, sequence: Sequence, most: int) -> Found:
        """The longest match; among equals, the match in the sequence."""
        found = self._own.find(sequence, most)
        shelf = self._shelves.get(sequence.root)
        if shelf is None:
            return found
        return max(found, *shelf.find(sequence.tokens, most), key=lambda each: each[0])

    def forget(self, sequence: Sequence) -> None:
        self._own.forget(sequence)
        shelf = self._shelves.setdefault(sequence.root, Shelf())
        self._shelves.move_to_end(sequence.root)
        # The suffix before the first generated token is included.
        first = max(0, sequence.prompt_tokens - SHORTEST)
        shelf.add(sequence.tokens[first:][:TOKENS_AT_ONCE])
        if len(self._shelves) > MOST_SHELVES:
            self._shelves.popitem(last=False)


class Shelf:
    """Texts in two indexes: one full, and one in use for new texts."""

    def __init__(self) -> None:
        self._full: SuffixIndex | None = None
        self._filling = SuffixIndex([])

    def find(self, tokens: SequenceOf[int], most: int) -> list[Found]:
        indexes = (self._filling, self._full) if self._full else (self._filling,)
        return [_within(index.find(tokens, most)) for index in indexes]

    def add(self, text: list[int]) -> None:
        if len(self._filling.text) > MOST_TOKENS:
            self._full, self._filling = self._filling, SuffixIndex([])
        self._filling.text += [*text, SEPARATOR]
        self._filling.catch_up()


def _within(found: Found) -> Found:
    """The guess up to the end of the text."""
    length, guess = found
    if SEPARATOR in guess:
        guess = guess[: guess.index(SEPARATOR)]
    return (length, guess) if guess else NOTHING
