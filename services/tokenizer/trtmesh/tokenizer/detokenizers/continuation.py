"""Decoding of a text that continues a prompt.

Decoders treat the beginning of a text unlike the rest; many strip the first space. A generated text has no such
beginning: prompt and text together are the text of all ids.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile, islice, takewhile

from tokenizers import Tokenizer
from trtmesh.tokenizer.detokenizers.base import (
    Detokenizer,
    TextDecoder,
    decode_by_library,
    tokens_by_id,
)

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_INNER_BYTE = re.compile(r"<0x[89AB][0-9A-F]>")
"""A token of a byte within a character."""


class Continuations:
    """Opens decoders behind the end of a prompt."""

    def __init__(self, tokenizer: Tokenizer, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        tokens = tokens_by_id(tokenizer)
        self._size = len(tokens)
        self._inner_bytes = frozenset(
            i for i, token in enumerate(tokens) if token and _INNER_BYTE.fullmatch(token)
        )
        words = (
            i
            for i, token in enumerate(tokens)
            if token
            and not _BYTE.fullmatch(token)
            and (decode_by_library(tokenizer, [i], skip_special_tokens=True) or "").isalnum()
        )
        self._word = [*islice(words, 1)]
        """A token for the text before the end of a prompt."""

    def open(
        self, prompt: Sequence[int], *, is_cut: bool, skip_special_tokens: bool
    ) -> TextDecoder:
        """A decoder of the text after `prompt`. If `is_cut`, `prompt` is the end of a longer prompt."""
        decoder = self._detokenizer.open(skip_special_tokens=skip_special_tokens)
        if is_cut:
            # The first may be the end of a character.
            prompt = [*self._word, *dropwhile(self._inner_bytes.__contains__, prompt)]
        known = [token_id for token_id in prompt if token_id < self._size]
        begin = len(known)
        while begin and not self._detokenizer.starts_anew(known[begin - 1]):
            begin -= 1
        for token_id in known[begin:]:
            decoder.push(token_id)
        told = decoder.flush()
        return Continuation(decoder, told) if told else decoder


@dataclass(slots=True)
class Continuation:
    """Leaves out the end of the prompt's text, held back by the prompt's decoder."""

    _decoder: TextDecoder
    _told: str
    _held: str = ""

    def push(self, token_id: int) -> str:
        text = self._decoder.push(token_id)
        if not self._told:
            return text
        self._held += text
        if self._told.startswith(self._held) and self._told != self._held:
            return ""
        text = self._added(self._held)
        self._told = self._held = ""
        return text

    def flush(self) -> str:
        return self._added(self._held + self._decoder.flush())

    def _added(self, text: str) -> str:
        # The end of the prompt may read otherwise with what follows.
        pairs = zip(self._told, text, strict=False)
        return text[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) :]
