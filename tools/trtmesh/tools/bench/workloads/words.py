"""Text of a known number of tokens: words of which each is one token of the model's tokenizer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from trtmesh.chassis.errors import InvalidRequest, ModelUnusable, SettingsError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Count = Callable[[Sequence[str]], Awaitable[Sequence[int]]]
"""The number of tokens of each text, special ones included."""

_WORDS = """
the of and to in is that for it as was with be by on not this are or from at but have an they which one you were
all her she there would their we him been has when who will no more if out so up said what its about than into
them can only other time new some could these two may first then do any like my now over such our man me even most
made after also did many off before must well back through years where much your way down should because long each
just state those people too mr how little good world make very year still see own work men day get here old life
between both being under three never know same last another while us might great go come since against right came
take used himself few house use place during without again home around small found thought went say part once
high general upon school every return self name value list line file data text type key item count size index path
class def import print string number result error input output test function method object code user set add end
"""
COMMON = tuple(_WORDS.split())
"""Candidates where no vocabulary is at hand; few tokenizers split them."""

FEWEST, MOST = 16, 2000
"""Words: fewer would repeat themselves, more say nothing new."""


@dataclass(frozen=True, slots=True)
class Words:
    """Draws texts. Any sequence of the words, with a space between two, has as many tokens as words."""

    words: tuple[str, ...] = COMMON
    special: int = 0
    """Tokens that the tokenizer adds to a text."""

    def text(self, draw: Random, tokens: int) -> str:
        return " ".join(draw.choices(self.words, k=tokens))


async def one_token_words(count: Count, candidates: Sequence[str] = COMMON) -> Words:
    """The candidates of one token each, at the beginning of a text and after a space. Raises InvalidRequest if too few
    are."""
    candidates = tuple(dict.fromkeys(candidates))[:MOST]
    alone = await count(candidates)
    tripled = await count([f"{word} {word} {word}" for word in candidates])
    least = min(alone, default=1)
    words = tuple(
        word
        for word, once, thrice in zip(candidates, alone, tripled, strict=True)
        if once == least and thrice - once == 2
    )
    if len(words) < FEWEST:
        raise InvalidRequest(
            f"{len(words)} of {len(candidates)} common words are one token each of the tokenizer, and {FEWEST} are"
            " needed for texts of a known length; name its tokenizer.json by --tokenizer"
        )
    return Words(words, special=least - 1)


def load_tokenizer(path: Path, setting: str) -> Tokenizer:
    """That of a model's directory, or of the `tokenizer.json` in it. Raises SettingsError."""
    from trtmesh.chassis.tokenizer_loading import TOKENIZER_FILE
    from trtmesh.chassis.tokenizer_loading import load_tokenizer as load

    file = path / TOKENIZER_FILE if path.is_dir() else path
    if file.name != TOKENIZER_FILE or not file.is_file():
        raise SettingsError(
            f"is {path}, but must be a {TOKENIZER_FILE}, or a directory with one", setting=setting
        )
    try:
        return load(file.parent)
    except ImportError as error:
        raise SettingsError(
            "needs the library tokenizers: pip install 'trtmesh[tokenizer]'", setting=setting
        ) from error
    except ModelUnusable as error:
        raise SettingsError(f"is {path}, but {error}", setting=setting) from error


def local_tokenizer(path: Path) -> tuple[Count, tuple[str, ...]]:
    """Counts tokens by the tokenizer of `--tokenizer`, and names words of its vocabulary. Raises SettingsError."""
    tokenizer = load_tokenizer(path, "--tokenizer")

    def counted(texts: Sequence[str]) -> list[int]:
        return [len(encoding.ids) for encoding in tokenizer.encode_batch_fast(list(texts))]

    async def count(texts: Sequence[str]) -> Sequence[int]:
        return await asyncio.to_thread(counted, texts)

    # Words with a space before them, as byte-level tokenizers and those of SentencePiece spell it.
    spelled = (re.fullmatch("[\u0120\u2581]([a-z]{2,})", token) for token in tokenizer.get_vocab())
    return count, tuple(sorted(match[1] for match in spelled if match)) or COMMON
