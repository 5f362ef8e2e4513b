"""The tokens of a simulated model: a pure function of request and position.

Equal requests get equal tokens, and a migrated sequence continues as if it had stayed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import fields
from hashlib import blake2b, shake_128
from operator import attrgetter
from struct import unpack

from trtmesh.chassis.vocabulary import Adapter, Sampling
from trtmesh.v1.generation_fields import FILTERS, supported_by

CHUNK = 128
"""Tokens that are made at once; a chunk costs about 7 µs."""

_WORDS = f"<{CHUNK}I"

DRAWS = ("temperature", *FILTERS, "seed")
"""Sampling fields with an effect on sampled streams only."""
PENALTIES = tuple(
    field.name
    for field in fields(Sampling)
    if f"sampling.{field.name}" in supported_by("simulated") - {"sampling.num_return_sequences"}
    and field.name not in DRAWS
)
"""Sampling fields with an effect on every stream."""

_penalties = attrgetter(*PENALTIES)
_draws = attrgetter(*DRAWS)


class TokenSource:
    """Makes chunks of a sequence's tokens.

    Ids lie in [first, last]; a longer range contributes 256 evenly spread ids. A share `end_probability` of the
    positions holds `end_id`.
    """

    def __init__(self, first: int, last: int, end_id: int, end_probability: float) -> None:
        self._ids = range(first, last + 1)
        span = len(self._ids)
        # One lookup per token, in a table that fits the processor's cache.
        self._token_of_byte = [
            first + (byte % span if span < 256 else byte * span // 256) for byte in range(256)
        ]
        self._end_id = end_id
        self._end_below = int(end_probability * 2**32)

    def chunk(self, key: bytes, index: int) -> list[int]:
        """Tokens at the positions [index * CHUNK, (index + 1) * CHUNK) of the stream `key`."""
        place = key + index.to_bytes(8, "little")
        tokens = list(map(self._token_of_byte.__getitem__, shake_128(place).digest(CHUNK)))
        if not self._end_below:
            return tokens
        below, end = self._end_below, self._end_id
        words = unpack(_WORDS, shake_128(place + b"end").digest(4 * CHUNK))
        return [end if word < below else token for word, token in zip(words, tokens, strict=True)]

    def other_than(self, banned: frozenset[int]) -> int:
        """The lowest allowed id, or the lowest id if all are banned."""
        return next((token for token in self._ids if token not in banned), self._ids[0])


def stream_key(
    prompt: Sequence[int],
    sampling: Sampling,
    batch_index: int,
    sequence_index: int,
    adapter: Adapter | None = None,
) -> bytes:
    """Names a stream of tokens. As with a model, greedy streams differ by prompt, penalties and adapter alone."""
    if sampling.greedy:
        asked: tuple[object, ...] = _penalties(sampling)
    else:
        asked = (*_penalties(sampling), *_draws(sampling), batch_index, sequence_index)
    content = array("I", prompt).tobytes() + repr(asked).encode()
    if adapter:
        content += f" adapter {adapter.id} {adapter.version}".encode()
    return blake2b(content, digest_size=16).digest()
