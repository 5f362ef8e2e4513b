"""What a tokenizer and its renderer say to each other: frames of a length and as many bytes.

First come the templates and special tokens, then conversations, all as JSON. Of a conversation comes what is asked,
then each part as the client sent it, since to parse large ones takes long. Each conversation is answered by a mark,
with the text or the problem. The renderer imports nothing else of trtmesh.
"""

from __future__ import annotations

from typing import BinaryIO

LENGTH_BYTES = 4
RENDERED, REFUSED, INVALID = b"+", b"-", b"!"
"""A text, the problem of a template, or the name of a part, a space and the problem of the part."""
CPU_SECONDS = 2.0
"""Most CPU time of a rendering; beyond the limit the system ends the process."""
OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables for every template."""


def framed(content: bytes) -> bytes:
    return len(content).to_bytes(LENGTH_BYTES, "big") + content


def read_frame(incoming: BinaryIO) -> bytes | None:
    """The next frame; None at the end."""
    length = incoming.read(LENGTH_BYTES)
    return incoming.read(int.from_bytes(length, "big")) if len(length) == LENGTH_BYTES else None
