"""What the command prints: results on standard output, everything said about them on standard error."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """A note for the person at the keyboard."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def say_error(text: str) -> None:
    say(f"trtmesh: error: {text}")


def put(text: str, end: str = "\n") -> None:
    """A result, at once, so that a pipe sees a stream as it comes."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def printable(text: str) -> str:
    """`text` without control characters, which could command a terminal."""
    return "".join(
        char if char in "\n\t" or char.isprintable() else f"\\x{ord(char):02x}" for char in text
    )
