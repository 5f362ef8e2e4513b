"""The interface of incremental decoders, and helpers for implementations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer
from trtmesh.chassis.panics import is_failure

REPLACEMENT = "\ufffd"
"""Replaces bytes of invalid UTF-8."""


class TextDecoder(Protocol):
    """Decodes one sequence token by token.

    The joined texts of all pushes and the flush MUST equal `Tokenizer.decode` of all ids. The result of a push MUST
    depend only on the ids so far.
    """

    def push(self, token_id: int) -> str:
        """Returns the newly certain text, possibly empty. The id MUST be below the vocabulary size."""

    def flush(self) -> str:
        """Returns the rest of the text, if no token follows. MUST change nothing."""


class Detokenizer(Protocol):
    """Decodes the ids of a tokenizer; shared by all sequences."""

    name: str

    def open(self, *, skip_special_tokens: bool) -> TextDecoder:
        """A decoder at the beginning of a sequence."""

    def starts_anew(self, token_id: int) -> bool:
        """Whether a decoder is after this token as at the beginning of a sequence, whatever came before."""

    def token_bytes(self, *, skip_special_tokens: bool) -> Sequence[bytes]:
        """UTF-8 of every token within a text, as far as neighbours do not change it."""


def decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The serialized steps of the decoder component as a flat list; empty without a decoder."""
    if tokenizer.decoder is None:
        return []
    return _flatten(json.loads(tokenizer.decoder.__getstate__()))


def _flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] == "Sequence":
        return [inner for outer in step["decoders"] for inner in _flatten(outer)]
    return [step]


def tokens_by_id(tokenizer: Tokenizer) -> list[str | None]:
    """The token of every id; None for gaps, without text."""
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    return [tokenizer.id_to_token(token_id) for token_id in range(size)]


def special_tokens(tokenizer: Tokenizer) -> frozenset[str]:
    """The tokens omitted by `skip_special_tokens`: the library compares content, not ids."""
    added = tokenizer.get_added_tokens_decoder().values()
    return frozenset(token.content for token in added if token.special)


def decode_by_library(
    tokenizer: Tokenizer, token_ids: list[int], *, skip_special_tokens: bool
) -> str | None:
    """None where the library panics."""
    try:
        return str(tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))
    except BaseException as error:
        if not is_failure(error):
            raise
        return None


def bytes_by_library(tokenizer: Tokenizer, *, skip_special_tokens: bool) -> list[bytes]:
    """What the library adds to a text for each token."""
    ids = range(len(tokens_by_id(tokenizer)))
    texts = ((token_id, tokenizer.decode([token_id])) for token_id in ids)
    # After a word, no rule for the first token applies.
    anchor, before = next(((i, text) for i, text in texts if text.isalnum()), (0, ""))
    whole = (tokenizer.decode([anchor, i], skip_special_tokens=skip_special_tokens) for i in ids)
    return [text.removeprefix(before).encode() for text in whole]
