"""Decoding of byte-level BPE: each token stands for bytes of UTF-8."""

from __future__ import annotations

from codecs import utf_8_decode
from dataclasses import dataclass

from tokenizers import Tokenizer
from trtmesh.tokenizer.detokenizers.base import decoder_steps, special_tokens, tokens_by_id


class ByteLevelDetokenizer:
    """The bytes of every token, and the text of tokens with whole characters."""

    name = "byte_level"

    def __init__(self, tokenizer: Tokenizer) -> None:
        specials = special_tokens(tokenizer)
        byte_of = _byte_by_character()
        tokens = tokens_by_id(tokenizer)
        self._kept = [_bytes_of(token, byte_of) for token in tokens]
        self._skipped = [
            b"" if token in specials else data
            for token, data in zip(tokens, self._kept, strict=True)
        ]
        self._kept_texts = [_whole_text(data) for data in self._kept]
        self._skipped_texts = [_whole_text(data) for data in self._skipped]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ByteLevelDetokenizer | None:
        """None for other decoders."""
        kinds = [step["type"] for step in decoder_steps(tokenizer)]
        return cls(tokenizer) if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]) else None

    def open(self, *, skip_special_tokens: bool) -> ByteLevelDecoder:
        if skip_special_tokens:
            return ByteLevelDecoder(self._skipped_texts, self._skipped)
        return ByteLevelDecoder(self._kept_texts, self._kept)

    def starts_anew(self, token_id: int) -> bool:
        # Whole characters leave nothing of the bytes before them.
        return bool(self._skipped_texts[token_id])

    def token_bytes(self, *, skip_special_tokens: bool) -> list[bytes]:
        return self._skipped if skip_special_tokens else self._kept


@dataclass(slots=True)
class ByteLevelDecoder:
    """Holds back the bytes of an incomplete character, at most three."""

    _texts: list[str | None]
    _bytes: list[bytes]
    _rest: bytes = b""

    def push(self, token_id: int) -> str:
        text = self._texts[token_id]
        if text is not None and not self._rest:
            return text
        data = self._rest + self._bytes[token_id]
        text, used = utf_8_decode(data, "replace", False)  # noqa: FBT003 - C function, no keywords
        self._rest = data[used:]
        return text

    def flush(self) -> str:
        return self._rest.decode("utf-8", "replace")


def _byte_by_character() -> dict[str, int]:
    """The visible characters of byte-level vocabularies.

    Visible Latin-1 characters stand for their own byte; the other bytes use the code points from 256 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {
        chr(256 + position): byte for position, byte in enumerate(hidden)
    }


def _bytes_of(token: str | None, byte_of: dict[str, int]) -> bytes:
    if token is None:
        return b""
    try:
        return bytes([byte_of[character] for character in token])
    except KeyError:
        # An added token is written as plain text.
        return token.encode("utf-8")


def _whole_text(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None
