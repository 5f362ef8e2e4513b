"""Text from strangers: cut and escaped."""

from __future__ import annotations

import pytest
from trtmesh.chassis.errors import MAX_FIELDS, MAX_PROBLEM_CHARACTERS, InvalidField, InvalidRequest
from trtmesh.chassis.quoting import MAX_QUOTED_CHARACTERS, cut, cut_inside, escaped


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢", "plain é 漢"),
        ("a\nb\r\tc", "a\\nb\\r\\tc"),
        ("\x1b[31mred\x9b0m", "\\x1b[31mred\\x9b0m"),
        ("abc\u202edef\u2066", "abc\\u202edef\\u2066"),
        ("line\u2028end", "line\\u2028end"),
        ("half \ud800", "half \\ud800"),
    ],
)
def test_what_commands_a_terminal_is_escaped(text: str, shown: str) -> None:
    assert escaped(text) == shown
    assert escaped(text).isprintable()


def test_kept_characters_stay() -> None:
    assert escaped("a\n\tb\x1b", kept="\n\t") == "a\n\tb\\x1b"


def test_long_texts_are_cut() -> None:
    most = "x" * MAX_QUOTED_CHARACTERS
    assert cut(most) == most
    assert cut(most + "y") == most + "..."
    assert cut_inside("a" * 90 + "b" * 30, 120) == "a" * 90 + "b" * 30
    assert cut_inside("a" * 100 + "b" * 30, 120) == "a" * 80 + "..." + "a" * 10 + "b" * 30


def test_errors_echo_little_of_what_they_quote() -> None:
    name = "n" * 2**20
    error = InvalidRequest(f"model '{name}' is unknown", fields=(name,) * 100, value=name)
    assert error.problem.endswith("' is unknown")
    assert len(error.problem) <= MAX_PROBLEM_CHARACTERS + 3
    assert len(error.fields) == MAX_FIELDS
    assert len(error.message) < 2**13
    assert len(InvalidField.of("model", name, "short").message) < 1000
