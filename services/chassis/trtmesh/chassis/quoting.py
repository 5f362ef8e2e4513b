"""Text from strangers: cut to a length, and escaped for terminals and log lines."""

from __future__ import annotations

MAX_QUOTED_CHARACTERS = 256
"""Longest value, name or id of a peer in a sentence. Longer texts are cut."""

ELLIPSIS = "..."


def cut(text: str, most: int = MAX_QUOTED_CHARACTERS) -> str:
    """The text with at most `most` characters and an ellipsis."""
    return text if len(text) <= most else f"{text[:most]}{ELLIPSIS}"


def cut_inside(text: str, most: int) -> str:
    """Returns the text with at most `most` characters and an ellipsis inside: a sentence around a long quotation keeps
    both ends."""
    if len(text) <= most:
        return text
    tail = most // 3
    return f"{text[: most - tail]}{ELLIPSIS}{text[-tail:]}"


def quoted(text: str) -> str:
    """A name in quotes, cut and escaped."""
    return repr(cut(text))


def escaped(text: str, kept: str = "") -> str:
    """Returns the text safe for terminals and log lines. Control characters, bidirectional controls and surrogates
    appear as in Python's literals, except characters in `kept`."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in kept else char.encode("unicode_escape").decode()
        for char in text
    )
