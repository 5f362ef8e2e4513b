"""The model of the stand-in engine: each token follows from all tokens before it, as with greedy decoding.

So a sequence continues in the same way wherever its tokens are sent as a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

VOCABULARY = 6144
"""As large as the demo model's, whose tokenizer the stand-in serves."""
END_ID = 2
FIRST_ID = 8
END_EVERY = 64
"""One in so many tokens is the end id."""


def next_token(tokens: Sequence[int], seed: int | None = None) -> int:
    content = b"".join(token.to_bytes(4, "little") for token in tokens[-64:])
    salt = f"{len(tokens)} {seed}".encode()
    number = int.from_bytes(blake2b(content + salt, digest_size=8).digest(), "little")
    if number % END_EVERY == 0:
        return END_ID
    return FIRST_ID + number // END_EVERY % (VOCABULARY - FIRST_ID)


def other_token(tokens: Sequence[int]) -> int:
    """The token in place of a banned one."""
    return FIRST_ID + len(tokens) % 1000


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    """What the engine answers without end ids."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]
