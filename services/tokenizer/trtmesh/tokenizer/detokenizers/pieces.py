"""Decoding of tokens with their own text: SentencePiece, Unigram, WordPiece.

Most steps of such a decoder depend on one token, with a special case for the first. Three effects reach further, each
with a small state: a run of byte tokens (`<0xE2>`), valid text as a whole or not at all; the end of the run; a strip at
the start of the text.
"""

from __future__ import annotations

import json
import re
from codecs import utf_8_decode
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from trtmesh.tokenizer.detokenizers.base import (
    REPLACEMENT,
    decoder_steps,
    special_tokens,
    tokens_by_id,
)

Step = dict[str, Any]
Piece = str | int | None
"""The text of a token, the byte of a byte token, or None for a token without text."""

_LOCAL_STEPS = frozenset({"Replace", "Metaspace", "WordPiece", "Strip"})
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")
_ANCHOR = "a"


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder component taken apart: local steps, byte fallback, local steps, strip of the whole."""

    before: list[Step] = field(default_factory=list)
    byte_fallback: bool = False
    after: list[Step] = field(default_factory=list)
    strip_content: str = ""
    strip_count: int = 0
    joined_by_spaces: bool = False

    @classmethod
    def of(cls, steps: list[Step]) -> Shape | None:
        """None for other decoders."""
        if not steps:
            return cls(joined_by_spaces=True)
        kinds = [step["type"] for step in steps]
        fuse = kinds.index("Fuse") if "Fuse" in kinds else len(steps)
        local, whole = steps[:fuse], steps[fuse + 1 :]
        if len(whole) > 1 or any(step["type"] != "Strip" or step["stop"] for step in whole):
            return None
        fallback = kinds.index("ByteFallback") if "ByteFallback" in kinds[:fuse] else fuse
        before, after = local[:fallback], local[fallback + 1 :]
        if any(step["type"] not in _LOCAL_STEPS for step in before + after):
            return None
        strip: Step = whole[0] if whole else {"content": "", "start": 0}
        return cls(before, fallback < fuse, after, strip["content"], strip["start"])


class LocalSteps:
    """Steps over single tokens, with a special case for the first token; run by the library."""

    def __init__(self, steps: list[Step]) -> None:
        self._decode: Callable[[list[str]], str] | None = _build_decoder(steps) if steps else None
        self._anchor = self._decode([_ANCHOR]) if self._decode else ""

    def first(self, token: str) -> str:
        return self._decode([token]) if self._decode else token

    def later(self, token: str) -> str:
        if self._decode is None:
            return token
        return self._decode([_ANCHOR, token])[len(self._anchor) :]


def _build_decoder(steps: list[Step]) -> Callable[[list[str]], str]:
    skeleton = json.loads(Tokenizer(WordLevel()).to_str())
    skeleton["decoder"] = {"type": "Sequence", "decoders": steps}
    decode: Callable[[list[str]], str] = Tokenizer.from_str(json.dumps(skeleton)).decoder.decode
    return decode


class PieceDetokenizer:
    """The piece of every token after the first; pieces of first tokens are computed on demand."""

    name = "pieces"

    def __init__(self, tokenizer: Tokenizer, shape: Shape) -> None:
        self.shape = shape
        self._before = LocalSteps(shape.before)
        self._after = LocalSteps(shape.after)
        self._tokens = tokens_by_id(tokenizer)
        specials = special_tokens(tokenizer)
        self._kept = [self._later_piece(token) for token in self._tokens]
        self._skipped = [
            None if token in specials else piece
            for token, piece in zip(self._tokens, self._kept, strict=True)
        ]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> PieceDetokenizer | None:
        """None for other decoders."""
        shape = Shape.of(decoder_steps(tokenizer))
        return None if shape is None else cls(tokenizer, shape)

    def open(self, *, skip_special_tokens: bool) -> PieceDecoder:
        return PieceDecoder(self, self._skipped if skip_special_tokens else self._kept)

    def starts_anew(self, token_id: int) -> bool:
        return False

    def token_bytes(self, *, skip_special_tokens: bool) -> list[bytes]:
        pieces = self._skipped if skip_special_tokens else self._kept
        return [_utf8(piece) for piece in pieces]

    def first_piece(self, token_id: int) -> str | int:
        """The piece of the first id with text."""
        token = self._tokens[token_id] or ""
        text = self._before.first(token)
        byte = self._byte_of(text)
        return self._after.first(text) if byte is None else byte

    def run_text(self, run: list[str], *, first: bool) -> str:
        """Applies the steps after byte fallback to a run of bytes."""
        if not self.shape.after:
            return "".join(run)
        head = [self._after.first(piece) for piece in run[:1]] if first else []
        return "".join(head + [self._after.later(piece) for piece in run[len(head) :]])

    def _later_piece(self, token: str | None) -> Piece:
        if token is None:
            return None
        if self.shape.joined_by_spaces:
            return f" {token}"
        text = self._before.later(token)
        byte = self._byte_of(text)
        return self._after.later(text) if byte is None else byte

    def _byte_of(self, text: str) -> int | None:
        match = _BYTE_TOKEN.fullmatch(text) if self.shape.byte_fallback else None
        return int(match[1], 16) if match else None


def _utf8(piece: Piece) -> bytes:
    if isinstance(piece, int):
        return bytes([piece])
    return piece.encode() if piece else b""


class PieceDecoder:
    """Holds back a run of bytes during valid UTF-8: an invalid byte turns the whole run into U+FFFD."""

    __slots__ = ("_family", "_fresh", "_pieces", "_plain", "_run", "_strip_left", "_untouched")

    def __init__(self, family: PieceDetokenizer, pieces: list[Piece]) -> None:
        self._family = family
        self._pieces = pieces
        self._run: ByteRun | None = None
        self._strip_left = family.shape.strip_count
        # No token yet / no piece has passed the steps after byte fallback yet.
        self._fresh = self._untouched = True
        # The text depends on the token alone.
        self._plain = False

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if piece is None:
            return ""
        if self._plain and isinstance(piece, str):
            return piece
        if self._fresh:
            piece = self._family.first_piece(token_id)
            self._fresh = False
        text = self._push_text(piece) if isinstance(piece, str) else self._push_byte(piece)
        text = self._strip(text)
        self._plain = self._run is None and not self._strip_left
        return text

    def flush(self) -> str:
        end = copy(self)
        return end._strip(end._end_run())

    def _push_text(self, text: str) -> str:
        text = self._end_run() + text
        self._untouched = False
        return text

    def _push_byte(self, byte: int) -> str:
        if self._run is None:
            self._run = ByteRun()
        return self._run_text(self._run.push(byte))

    def _end_run(self) -> str:
        run, self._run = self._run, None
        return self._run_text(run.end()) if run else ""

    def _run_text(self, run: list[str]) -> str:
        text = self._family.run_text(run, first=self._untouched)
        self._untouched = self._untouched and not run
        return text

    def _strip(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != self._family.shape.strip_content:
                self._strip_left = 0
            else:
                text = text[1:]
                self._strip_left -= 1
        return text


@dataclass(slots=True)
class ByteRun:
    """A run of byte tokens, with constant cost per byte."""

    _characters: list[str] = field(default_factory=list)
    _rest: bytes = b""
    _count: int = 0
    _broken: bool = False

    def push(self, byte: int) -> list[str]:
        """Returns the certain pieces: none while the run is valid, then one U+FFFD for each byte."""
        if self._broken:
            return [REPLACEMENT]
        self._count += 1
        try:
            text, used = utf_8_decode(self._rest + bytes([byte]), "strict", False)  # noqa: FBT003 - C function
        except UnicodeDecodeError:
            self._broken = True
            self._characters.clear()
            return [REPLACEMENT] * self._count
        if used:
            self._characters.append(text)
            self._rest = b""
        else:
            self._rest += bytes([byte])
        return []

    def end(self) -> list[str]:
        """Returns the pieces held back."""
        if self._broken:
            return []
        if self._rest:
            return [REPLACEMENT] * self._count
        return ["".join(self._characters)]
