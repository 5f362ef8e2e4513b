"""What every family of incremental decoders promises, and what they share."""

from __future__ import annotations

import json
from typing import Any, Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
"""What a decode shows for bytes that are no character."""


class TextDecoder(Protocol):
    """The text of one sequence, token by token.

    The texts of all pushes and of the flush, joined, MUST equal `Tokenizer.decode` of all the ids, and what a push
    returns MUST depend on nothing but the ids so far.
    """

    def push(self, token_id: int) -> str:
        """The text that became certain with this token, possibly empty. The id MUST be below the vocabulary size."""

    def flush(self) -> str:
        """The rest of the text, as the decode of the whole shows it. Called once, last."""


class Decoding(Protocol):
    """A way to decode the ids of one tokenizer, shared by its sequences."""

    name: str

    def open(self, *, skip_special_tokens: bool) -> TextDecoder:
        """A decoder at the beginning of a sequence."""


def decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The decoder component as a flat list of serialised steps; empty where there is none."""
    if tokenizer.decoder is None:
        return []
    return _flatten(json.loads(tokenizer.decoder.__getstate__()))


def _flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] == "Sequence":
        return [inner for outer in step["decoders"] for inner in _flatten(outer)]
    return [step]


def tokens_by_id(tokenizer: Tokenizer) -> list[str | None]:
    """The token of every id up to the largest; None where the ids have a gap, which decodes to nothing."""
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    return [tokenizer.id_to_token(token_id) for token_id in range(size)]


def special_tokens(tokenizer: Tokenizer) -> frozenset[str]:
    """The tokens that `skip_special_tokens` leaves out; the library goes by content, not by id."""
    added = tokenizer.get_added_tokens_decoder().values()
    return frozenset(token.content for token in added if token.special)
