"""Chooses the fastest detokenizer that reproduces the library."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

from tokenizers import Tokenizer
from trtmesh.chassis.panics import is_failure
from trtmesh.tokenizer.detokenizers.base import Detokenizer, decode_by_library, tokens_by_id
from trtmesh.tokenizer.detokenizers.byte_level import ByteLevelDetokenizer
from trtmesh.tokenizer.detokenizers.pieces import PieceDetokenizer
from trtmesh.tokenizer.detokenizers.windowed import WholeDetokenizer, WindowedDetokenizer

log = logging.getLogger(__name__)

_FAMILIES = (ByteLevelDetokenizer, PieceDetokenizer, WindowedDetokenizer)
_CHECKED_SEQUENCES = 200
_LONGEST_CHECKED = 32


def choose_detokenizer(tokenizer: Tokenizer) -> Detokenizer:
    """The first family that fits the tokenizer's decoder and passes `agrees`; else `WholeDetokenizer`."""
    for family in _FAMILIES:
        detokenizer = family.of(tokenizer)
        if detokenizer is None:
            continue
        if agrees(detokenizer, tokenizer):
            return detokenizer
        log.warning("%s decoding does not reproduce this tokenizer's decoder", detokenizer.name)
    log.warning("this tokenizer cannot be decoded token by token: text is delivered at the end")
    return WholeDetokenizer(tokenizer)


def agrees(detokenizer: Detokenizer, tokenizer: Tokenizer) -> bool:
    """Whether `detokenizer` reproduces the library on random sequences, the same for every load."""
    return all(
        _decode_by_token(detokenizer, token_ids, skip_special_tokens=skip)
        == decode_by_library(tokenizer, token_ids, skip_special_tokens=skip)
        for token_ids in _random_sequences(tokens_by_id(tokenizer))
        for skip in (False, True)
    )


def _decode_by_token(
    detokenizer: Detokenizer, token_ids: list[int], *, skip_special_tokens: bool
) -> str | None:
    """None where the library panics."""
    decoder = detokenizer.open(skip_special_tokens=skip_special_tokens)
    try:
        return "".join([*map(decoder.push, token_ids), decoder.flush()])
    except BaseException as error:
        if not is_failure(error):
            raise
        return None


def _random_sequences(tokens: list[str | None]) -> Iterator[list[int]]:
    """Half of the ids are short or bracketed tokens: parts of characters, bytes, special tokens."""
    random_number = random.Random(len(tokens))  # noqa: S311 - the same sequences each time
    every = range(len(tokens))
    odd = [i for i, token in enumerate(tokens) if token is None or _is_odd(token)] or every
    for _ in range(_CHECKED_SEQUENCES if tokens else 0):
        length = random_number.randint(1, _LONGEST_CHECKED)
        yield [
            random_number.choice(odd if random_number.random() < 0.5 else every)
            for _ in range(length)
        ]


def _is_odd(token: str) -> bool:
    return len(token) <= 2 or token[0] in "<["
