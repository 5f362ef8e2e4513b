"""The tokens that a simulated model generates: a pure function of request and position.

Equal requests get equal tokens, and a sequence that moved to another worker goes on as if it had stayed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b, shake_128
from struct import unpack

from trtmesh.chassis.vocabulary import Sampling

CHUNK = 64
"""Tokens that are made at once; a chunk costs about 5 µs."""

_WORDS = f"<{CHUNK}I"


class TokenSource:
    """Makes chunks of a sequence's tokens.

    Ids lie in [first, last]; a share `end_probability` of the positions holds `end_id`.
    """

    def __init__(self, first: int, last: int, end_id: int, end_probability: float) -> None:
        self._first = first
        self._span = last - first + 1
        self._end_id = end_id
        self._end_below = int(end_probability * 2**32)

    def chunk(self, key: bytes, index: int) -> list[int]:
        """Tokens at the positions [index * CHUNK, (index + 1) * CHUNK) among the generated tokens."""
        words = unpack(_WORDS, shake_128(key + index.to_bytes(8, "little")).digest(4 * CHUNK))
        first, span = self._first, self._span
        if not self._end_below:
            return [first + word % span for word in words]
        below, end = self._end_below, self._end_id
        return [end if word < below else first + word % span for word in words]

    def other_than(self, banned: frozenset[int]) -> int:
        """The lowest id that is not banned; where all are, the lowest."""
        ids = range(self._first, self._first + self._span)
        return next((token for token in ids if token not in banned), self._first)


def stream_key(
    prompt: Sequence[int], sampling: Sampling, batch_index: int, sequence_index: int
) -> bytes:
    """Names a stream of tokens. Greedy streams differ by prompt and penalties alone, as a model's do."""
    asked = replace(sampling, num_return_sequences=1, best_of=None)
    place = (batch_index, sequence_index)
    if sampling.greedy:
        place = (0, 0)
        asked = replace(asked, seed=None, temperature=None, top_k=None, top_p=None, min_p=None)
        asked = replace(asked, top_p_min=None, top_p_decay=None, top_p_reset_id=None)
    content = array("I", prompt).tobytes() + repr((asked, place)).encode()
    return blake2b(content, digest_size=16).digest()
