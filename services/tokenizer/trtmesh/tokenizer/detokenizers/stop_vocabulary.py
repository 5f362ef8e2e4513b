"""Stop texts in terms of tokens, for beam searches on workers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from trtmesh.chassis.stop_texts import NO_SPECIAL_TOKENS, SpecialTokens, spellings
from trtmesh.tokenizer.detokenizers.base import Detokenizer
from trtmesh.v1 import generation_pb2 as pb

KEPT = 64
"""Stop vocabularies kept: building one for a large vocabulary takes tenths of a second."""


class StopVocabularies:
    """Builds the stop vocabularies of a tokenizer, in any thread."""

    def __init__(self, detokenizer: Detokenizer, specials: SpecialTokens) -> None:
        self.of = lru_cache(KEPT)(self._build)
        self._specials = specials
        self._token_bytes = lru_cache(detokenizer.token_bytes)

    def bytes_of(self, token_ids: Sequence[int]) -> Sequence[bytes]:
        """UTF-8 of tokens within a text; empty for ids that the tokenizer does not know."""
        if not token_ids:
            return ()
        tokens = self._token_bytes(skip_special_tokens=False)
        return [tokens[each] if each < len(tokens) else b"" for each in token_ids]

    def _build(
        self, stop_texts: tuple[str, ...], *, skip_special_tokens: bool
    ) -> pb.StopVocabulary:
        """Finds the tokens that may be part of a stop text, or have no text. Special tokens that the text omits and a
        stop text names have their marks for texts."""
        marks: dict[int, str] = {}
        omitted = self._specials if skip_special_tokens else NO_SPECIAL_TOKENS
        texts = [_utf8(text) for _, text in spellings(stop_texts, omitted, marks)]
        tokens = [*self._token_bytes(skip_special_tokens=skip_special_tokens)]
        for token_id, mark in marks.items():
            tokens[token_id] = _utf8(mark)
        parts = Parts(texts, max(map(len, tokens), default=0))
        found = {token_id: token for token_id, token in enumerate(tokens) if parts.touches(token)}
        return pb.StopVocabulary(
            stop_texts=texts,
            token_ids=found.keys(),
            token_texts=found.values(),
            textless_from=len(tokens),
        )


def _utf8(text: str) -> bytes:
    # Marks are surrogates, whose bytes no valid UTF-8 contains.
    return text.encode("utf-8", "surrogatepass")


@dataclass(slots=True)
class Parts:
    """Answers whether a token's text may overlap with a stop text."""

    texts: Sequence[bytes]
    longest_token: int
    _heads: frozenset[bytes] = field(init=False)
    _tails: frozenset[bytes] = field(init=False)
    _all: bytes = field(init=False)
    _whole: re.Pattern[bytes] = field(init=False)

    def __post_init__(self) -> None:
        sizes = range(1, self.longest_token + 1)
        self._heads = frozenset(text[:size] for text in self.texts for size in sizes)
        self._tails = frozenset(text[-size:] for text in self.texts for size in sizes)
        self._all = b"\0".join(self.texts)
        self._whole = re.compile(b"|".join(map(re.escape, self.texts)))

    def touches(self, token: bytes) -> bool:
        """Whether the token has no text, lies within a stop text, holds one, or overlaps with the beginning or end of
        one."""
        sizes = range(1, len(token) + 1)
        return (
            token in self._all
            or any(token[-size:] in self._heads for size in sizes)
            or any(token[:size] in self._tails for size in sizes)
            or self._whole.search(token) is not None
        )
