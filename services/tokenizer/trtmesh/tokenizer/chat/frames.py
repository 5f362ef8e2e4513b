"""Frames between a tokenizer and the programs for chats: a length, and as many bytes.

The renderer first gets the templates and special tokens, then conversations, all in JSON. A conversation is a frame
with the question, then a frame for each part as the client sent it, since parsing a large part takes long. The reader
first gets the response template, then texts with their places in the answers. An answer is a mark with the result or
the problem; a mark alone says that the program has begun. The programs import nothing else of trtmesh.
"""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Callable
from typing import BinaryIO

LENGTH_BYTES = 4
DONE, REFUSED, INVALID = b"+", b"-", b"!"
"""A result, the problem of a template, or the name of a part, a space and its problem."""
CPU_SECONDS = 2.0
"""Most CPU time of an answer; beyond it the system ends the process."""
MEMORY_BYTES = 2**30
"""Most address space of a process."""
MOST_PROBLEM_CHARACTERS = 512
OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables for every template."""


def framed(content: bytes) -> bytes:
    return len(content).to_bytes(LENGTH_BYTES, "big") + content


def read_frame(incoming: BinaryIO) -> bytes | None:
    """The next frame; None at the end."""
    length = incoming.read(LENGTH_BYTES)
    return incoming.read(int.from_bytes(length, "big")) if len(length) == LENGTH_BYTES else None


def serve(begin: Callable[[bytes], Callable[[bytes, BinaryIO], bytes]]) -> None:
    """Answers questions within the limits of time and memory until the input ends. `begin` takes the first frame, and
    returns what answers each question, given its first frame and the rest of the input."""
    # Those of the terminal are for the service.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    incoming, outgoing = sys.stdin.buffer, sys.stdout.buffer
    answer = begin(read_frame(incoming) or b"{}")
    outgoing.write(framed(DONE))
    outgoing.flush()
    while (question := read_frame(incoming)) is not None:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        answered = answer(question, incoming)
        signal.setitimer(signal.ITIMER_PROF, 0)
        outgoing.write(framed(answered))
        outgoing.flush()
