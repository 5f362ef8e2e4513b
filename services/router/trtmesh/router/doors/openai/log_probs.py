"""Log-probabilities in both shapes of the API, with the bytes of tokens."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trtmesh.chassis.errors import SchemaMismatch
from trtmesh.router.tokenizers.pool import TokenizerPool
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import tokenizer_pb2 as tokenizer_pb

LEAST = -9999.0
"""Stands for minus infinity, impossible in JSON."""
MOST_TOKENIZERS = 16
"""Number of tokenizers with kept bytes."""

Candidate = tuple[int, float]
"""A token's id and log-probability."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A generated token, with the likeliest tokens of the same position."""

    token: Candidate
    top: Sequence[Candidate]


def scored(token_ids: Sequence[int], details: pb.TokenDetails) -> list[Scored]:
    tops = [list(zip(top.token_ids, top.log_probs, strict=True)) for top in details.top_log_probs]
    each = zip(token_ids, details.log_probs, strict=True)
    return [Scored(token, tops[place] if tops else ()) for place, token in enumerate(each)]


class TokenBytes:
    """UTF-8 of tokens, as reported by the tokenizers. Each token is requested once."""

    def __init__(self, tokenizers: TokenizerPool) -> None:
        self._tokenizers = tokenizers
        self._known: dict[str, dict[int, bytes]] = {}

    async def of(self, model: str, tokens: Iterable[Scored]) -> Mapping[int, bytes]:
        """Fetches the bytes of at least these tokens. Raises the pool's errors."""
        fingerprint = self._tokenizers.fingerprint_of(model)
        known = self._known.setdefault(fingerprint, {})
        if len(self._known) > MOST_TOKENIZERS:
            del self._known[next(iter(self._known))]
        wanted = {each for token in tokens for each, _ in (token.token, *token.top)} - known.keys()
        if wanted:
            asked = sorted(wanted)
            command = tokenizer_pb.EncodeCommand(described_token_ids=asked)
            encoded = await self._tokenizers.encode(model, command)
            if not encoded.token_bytes:
                raise SchemaMismatch("the tokenizer cannot describe tokens; run the same release")
            known.update(zip(asked, encoded.token_bytes, strict=True))
        return known


@dataclass(slots=True)
class TokenTexts:
    """The texts of a choice's tokens, and the position in the text."""

    by_ids: bool
    """Whether tokens are written by number."""
    bytes_of: Mapping[int, bytes] = field(default_factory=dict)
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )
    _offset: int = 0

    def of(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.by_ids else _text(self.bytes_of[token_id])

    def pass_over(self, token_id: int) -> int:
        """Moves past a token. Returns the beginning of the token."""
        began = self._offset
        self._offset += len(self._decoder.decode(self.bytes_of[token_id]))
        return began


def chat_shape(tokens: Sequence[Scored], texts: TokenTexts) -> dict[str, Any]:
    def entry(candidate: Candidate) -> dict[str, Any]:
        token_id, log_prob = candidate
        told = {"token": texts.of(token_id), "logprob": max(log_prob, LEAST)}
        return told | {"bytes": list(texts.bytes_of[token_id])}

    content = [entry(each.token) | {"top_logprobs": list(map(entry, each.top))} for each in tokens]
    return {"content": content, "refusal": None}


def completion_shape(tokens: Sequence[Scored], texts: TokenTexts) -> dict[str, Any]:
    """The shape of completions. The generated token is always among the likeliest. Of two tokens with the same text,
    the likelier counts."""
    tops: list[dict[str, float]] = []
    for each in tokens:
        top: dict[str, float] = {}
        for token_id, log_prob in (*each.top, each.token):
            text, told = texts.of(token_id), max(log_prob, LEAST)
            top[text] = max(told, top.get(text, told))
        tops.append(top)
    return {
        "tokens": [texts.of(each.token[0]) for each in tokens],
        "token_logprobs": [max(each.token[1], LEAST) for each in tokens],
        "top_logprobs": tops,
        "text_offset": [texts.pass_over(each.token[0]) for each in tokens],
    }


def _text(token: bytes) -> str:
    return token.decode("utf-8", "replace")
