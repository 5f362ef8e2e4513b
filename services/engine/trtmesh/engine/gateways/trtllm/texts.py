"""Encodes texts of requests by the tokenizer in the model directory, and finds stop texts in the output."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from trtmesh.chassis.errors import InvalidField
from trtmesh.chassis.spellings import Speller
from trtmesh.chassis.stop_texts import Ending, SpecialTokens, StopTexts
from trtmesh.chassis.tokenizer_loading import TOKENIZER_FILE, for_words, load_tokenizer

log = logging.getLogger(__name__)

CONTEXT_TOKENS = 8
"""Prompt tokens before the output: the text of a token may depend on the tokens before it."""
MOST_TEXTLESS = 16
"""Tokens in a row without text before decoding starts anew. A character has at most four tokens, so more are no
character."""
REPLACEMENT = "\ufffd"


class Texts:
    """A tokenizer of the library `tokenizers`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special_tokens = SpecialTokens.of(tokenizer)
        self._speller = Speller(for_words(tokenizer))

    @classmethod
    def load(cls, model_dir: Path | None) -> Self | None:
        """Blocks to read the file. Returns None without a file or without the library."""
        if model_dir is None or not (model_dir / TOKENIZER_FILE).is_file():
            return None
        try:
            return cls(load_tokenizer(model_dir))
        except ImportError:
            log.warning("texts of requests need the library tokenizers, which is not installed")
            return None

    def spell(self, word: str, field: str) -> Sequence[Sequence[int]]:
        """The spellings of a word. Raises InvalidField where there are none."""
        spellings = self._speller.spellings(word)
        if not spellings:
            raise InvalidField(f"has an entry without tokens, {word!r}; leave it out", field=field)
        return spellings

    def stops(self, stop_texts: Sequence[str]) -> StopTexts:
        return StopTexts(stop_texts, self._special_tokens)

    def follow(self, stops: StopTexts, prompt: Sequence[int]) -> StopSearch:
        return StopSearch(self._tokenizer, stops, prompt)


class StopSearch:
    """Finds the first stop text in the text of a sequence, token by token."""

    def __init__(self, tokenizer: Any, stops: StopTexts, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._state = stops.ROOT
        self._decoding = self._decoding_after(list(prompt[-CONTEXT_TOKENS:]))
        self._textless = 0
        self._length = 0
        """Characters of the text, marks included."""
        self._starts: list[int] = []
        """Position of each token's first character in the text; a token with incomplete text starts at the end."""
        self.certain = 0
        """Leading tokens, certainly outside a stop text."""
        self.found: str | None = None
        self.kept = 0
        """Tokens of the output once a text is found: the tokens before the text, or all tokens where the text begins
        inside a token. A client can then cut the text without loss."""

    def add(self, token: int, *, may_end: bool) -> bool:
        """Adds a token. Returns whether a stop text is complete and the sequence may end."""
        self._starts.append(self._length)
        stops, state = self._stops, self._state
        for character in self._text_of(token):
            self._length += 1
            state = stops.step(state, character)
            if may_end and (found := stops.ending(state)):
                self._end_with(found)
                return True
        self._state = state = stops.open_state(state)
        self.certain = bisect_left(self._starts, self._length - stops.held_length(state))
        return False

    def _text_of(self, token: int) -> str:
        """The text complete with this token, or the mark of a special token in a stop text."""
        if (mark := self._stops.marks.get(token)) is not None:
            return mark
        added: str | None = self._decoding.step(self._tokenizer, token)
        self._textless = 0 if added else self._textless + 1
        if self._textless >= MOST_TEXTLESS:
            self._textless = 0
            self._decoding = self._decoding_after([])
        return added or ""

    def _decoding_after(self, context: list[int]) -> Any:
        from tokenizers.decoders import DecodeStream

        # After half a character the text of the context would come again.
        text = self._tokenizer.decode(context, skip_special_tokens=True)
        if text.endswith(REPLACEMENT):
            context = []
        return DecodeStream(ids=context, skip_special_tokens=True)

    def _end_with(self, found: Ending) -> None:
        """Ends the output with a stop text at the end of the text."""
        self.found = self._stops.texts[found.stop_index]
        begins = self._length - found.length
        place = bisect_left(self._starts, begins)
        at_token = place < len(self._starts) and self._starts[place] == begins
        self.kept = self.certain = place if at_token else len(self._starts)
