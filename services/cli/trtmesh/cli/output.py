"""Output of commands: results on standard output, notes and errors on standard error."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from trtmesh.chassis.quoting import escaped

if TYPE_CHECKING:
    from google.protobuf.message import Message

KEPT = "\n\t\u00a0\u202f\u3000\u200c\u200d"
"""What no terminal obeys, though it does not print as a character: line ends, spaces, and joiners within a word."""
CONTROLS = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}


def say(text: str) -> None:
    """Prints a note to standard error; a closed standard error does not end the command."""
    with suppress(OSError):
        try:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
        except BrokenPipeError:
            # The rest of the buffer would fail again when Python flushes at exit, and change the status.
            give_up(sys.stderr)


def give_up(stream: TextIO) -> None:
    """Redirects a stream without a reader to the null device."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def say_error(text: str) -> None:
    say(f"trtmesh: error: {readable(text)}")


def say_equal(sequences: int, remedy: str) -> None:
    say(f"trtmesh: note: the {sequences} sequences are equal, as nothing is drawn; {remedy}")


def readable(text: str) -> str:
    """Returns text of several lines without control characters for a terminal."""
    return escaped(text, kept=KEPT)


def shown(text: str) -> str:
    """Returns a model's text for standard output: as it is, but readable where that is a terminal."""
    return readable(text) if sys.stdout.isatty() else text


def local_time(timespec: str = "seconds") -> str:
    """Now, with the offset of the local time zone."""
    return datetime.now().astimezone().isoformat(timespec=timespec)


def put(text: str, end: str = "\n") -> None:
    """Prints and flushes a result: a pipe sees a stream without delay."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def put_json(value: Any) -> None:
    """Prints a line of JSON, the same in a pipe and on a terminal: JSON itself escapes only half of the controls."""
    put(json.dumps(value, ensure_ascii=False).translate(CONTROLS))


def as_fields(message: Message) -> dict[str, Any]:
    """A message as a JSON object: the field names of the protos, unset fields too, 64-bit numbers as texts."""
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
