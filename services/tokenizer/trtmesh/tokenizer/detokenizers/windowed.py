"""Decoding by the library, for decoders without a faster family."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenizers import Tokenizer
from trtmesh.tokenizer.detokenizers.base import (
    REPLACEMENT,
    bytes_by_library,
    special_tokens,
    tokens_by_id,
)

KEPT_TOKENS = 8
"""Preceding tokens decoded again with a new token, because they may affect the new text."""

MOST_TOKENS = 64
"""Longest wait of the window for text that no further token changes."""


class WindowedDetokenizer:
    """Decodes the last tokens with and without the new token; the difference is the new text.

    Correct for decoders with a lookback of a few tokens.
    """

    name = "windowed"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        tokens = tokens_by_id(tokenizer)
        specials = special_tokens(tokenizer)
        self._gaps = frozenset(i for i, token in enumerate(tokens) if token is None)
        self._specials = frozenset(i for i, token in enumerate(tokens) if token in specials)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> WindowedDetokenizer:
        return cls(tokenizer)

    def open(self, *, skip_special_tokens: bool) -> WindowedDecoder:
        hidden = self._gaps | self._specials if skip_special_tokens else self._gaps
        return WindowedDecoder(self, hidden)

    def starts_anew(self, token_id: int) -> bool:
        return False

    def token_bytes(self, *, skip_special_tokens: bool) -> list[bytes]:
        return bytes_by_library(self._tokenizer, skip_special_tokens=skip_special_tokens)

    def decode(self, token_ids: list[int]) -> str:
        """The text of ids, special tokens included."""
        # Of none, some decoders panic.
        return (
            str(self._tokenizer.decode(token_ids, skip_special_tokens=False)) if token_ids else ""
        )


@dataclass(slots=True)
class WindowedDecoder:
    """Keeps the last ids and the part of their text already delivered."""

    _family: WindowedDetokenizer
    _hidden: frozenset[int]
    _ids: list[int] = field(default_factory=list)
    _shown: str = ""

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        self._ids.append(token_id)
        text = self._family.decode(self._ids)
        certain = text.rstrip(REPLACEMENT)
        if len(self._ids) >= MOST_TOKENS:
            # Only the last can be the beginning of a character.
            certain = text.removesuffix(REPLACEMENT)
        elif not certain.startswith(self._shown):
            return ""
        delta = certain[len(self._shown) :]
        self._shown = certain
        if len(self._ids) >= 2 * KEPT_TOKENS:
            self._shrink(len(text) - len(certain))
        return delta

    def _shrink(self, held_back: int) -> None:
        """Drops the first ids, if the others have the end of the text that is held back."""
        ids = self._ids[-KEPT_TOKENS:]
        text = self._family.decode(ids)
        if len(text) >= held_back:
            self._ids, self._shown = ids, text[: len(text) - held_back]

    def flush(self) -> str:
        return self._family.decode(self._ids)[len(self._shown) :]


@dataclass(slots=True)
class WholeDetokenizer:
    """Delivers all text at the end. Correct for every decoder, but nothing is streamed."""

    _tokenizer: Tokenizer
    name: str = "whole"

    def open(self, *, skip_special_tokens: bool) -> WholeDecoder:
        return WholeDecoder(self._tokenizer, skip_special_tokens)

    def starts_anew(self, token_id: int) -> bool:
        return False

    def token_bytes(self, *, skip_special_tokens: bool) -> list[bytes]:
        return bytes_by_library(self._tokenizer, skip_special_tokens=skip_special_tokens)


@dataclass(slots=True)
class WholeDecoder:
    _tokenizer: Tokenizer
    _skip_special_tokens: bool
    _ids: list[int] = field(default_factory=list)

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        return ""

    def flush(self) -> str:
        ids, skip = self._ids, self._skip_special_tokens
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip)) if ids else ""
