"""The ids of a word within a text.

A word after a space has other ids than the same word elsewhere, and a tokenizer may put a space before every text.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

BEFORE = ("\n", "(", "=", "a")
"""Texts to prefix to a word, for tokenizers that begin a text with a space."""


class Speller:
    """Spells with a tokenizer of the library `tokenizers`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, words: list[str]) -> list[list[int]]:
        """Returns the ids of words, each encoded as a whole text."""
        # Releases the interpreter, unlike the library's `encode`.
        encodings = self._tokenizer.encode_batch_fast(words, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def spellings(self, word: str) -> list[list[int]]:
        """Returns the ids of a word, and of the word after a space unless there is a space already.

        A spelling ending with the ids of the other is left out: the other is found wherever this is.
        """
        bare = word.removeprefix(" ")
        own = self._encode(bare)
        own_text = self._text(own)
        text = own_text.removeprefix(" ")
        if not text:
            return [ids for ids in [self._encode(word)] if ids]
        wanted = [f" {text}"] if bare != word else [text, f" {text}"]
        found = {own_text: own} if own_text in wanted else {}
        for ids in self._candidates(bare):
            if len(found) == len(wanted):
                break
            if (spelled := self._text(ids)) in wanted:
                found.setdefault(spelled, ids)
        spellings = list(found.values()) or [self._encode(word)]
        return [ids for ids in spellings if not any(_ends_with(ids, other) for other in spellings)]

    def _candidates(self, bare: str) -> Iterator[list[int]]:
        yield self._encode(f" {bare}")
        for before, head in self._before.items():
            whole = self._encode(before + bare)
            if whole[: len(head)] == head:
                yield whole[len(head) :]

    @cached_property
    def _before(self) -> dict[str, list[int]]:
        return dict(zip(BEFORE, self.encode([*BEFORE]), strict=True))

    @cached_property
    def _head(self) -> tuple[list[int], str]:
        """A text as a prefix to ids, with the text's ids and their decoded form."""
        ids = self._encode("a")
        return ids, self._decode(ids)

    def _text(self, ids: list[int]) -> str:
        """The text of ids within a text."""
        head, before = self._head
        return self._decode([*head, *ids]).removeprefix(before)

    def _encode(self, text: str) -> list[int]:
        (ids,) = self.encode([text])
        return ids

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


def _ends_with(ids: list[int], end: list[int]) -> bool:
    return len(ids) > len(end) and ids[-len(end) :] == end
