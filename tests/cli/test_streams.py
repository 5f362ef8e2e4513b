from __future__ import annotations

import io
import json
import sys

import pytest
from rich.console import Console
from trtmesh.chassis.errors import QueueFull
from trtmesh.cli.streams import (
    LiveRegions,
    Printer,
    RawText,
    TaggedLines,
    choose_printer,
)
from trtmesh.client import (
    Accepted,
    Event,
    FinishReason,
    ItemFailed,
    ItemFinished,
    SequenceFinished,
    Tokens,
    Usage,
)

ESCAPE = "\x1b"


def tokens(batch: int, text: str, offset: int = 0, sequence: int = 0) -> Tokens:
    return Tokens(batch, sequence, offset, (1,), text, None)


def finished(batch: int) -> list[Event]:
    return [
        SequenceFinished(batch, 0, FinishReason.LENGTH, 2, None, (), None),
        ItemFinished(batch, 0, FinishReason.LENGTH, Usage(3, 0, 2), None),
    ]


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=80)


def pipe() -> Console:
    return Console(file=io.StringIO(), force_terminal=False)


def show(printer: Printer, *events: Event) -> None:
    with printer:
        for event in events:
            printer.show(event)


@pytest.mark.parametrize(
    ("console", "items", "sequences", "kind"),
    [
        (pipe(), 1, 1, RawText),
        (terminal(), 1, 1, RawText),
        (pipe(), 2, 1, TaggedLines),
        (pipe(), 1, 2, TaggedLines),
        (terminal(), 2, 1, LiveRegions),
    ],
)
def test_printer_fits_the_output(console: Console, items: int, sequences: int, kind: type) -> None:
    printer = choose_printer(as_json_lines=False, items=items, sequences=sequences, console=console)
    assert isinstance(printer, kind)


def test_interleaved_streams_stay_apart_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    printer = choose_printer(as_json_lines=False, items=2, sequences=1, console=pipe())
    long = "word " * 30
    show(
        printer,
        tokens(0, "one"),
        tokens(1, "uno"),
        tokens(0, " two\nthree"),
        tokens(1, " " + long),
        *finished(0),
        tokens(1, "last"),
        *finished(1),
    )
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert [line for line in lines if line.startswith("[0] ")] == ["[0] one two", "[0] three"]
    second = [line.removeprefix("[1] ") for line in lines if line.startswith("[1] ")]
    assert second == [f"uno {long}last"]
    # In the order of their ends.
    assert [line[:3] for line in lines] == ["[0]", "[0]", "[1]"]
    assert err.splitlines() == [
        "[0] ended: length, 3 prompt tokens, 2 new",
        "[1] ended: length, 3 prompt tokens, 2 new",
    ]


def test_a_pipe_folds_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    printer = choose_printer(as_json_lines=False, items=2, sequences=1, console=pipe())
    line = "a line of many words " * 10
    texts = (line[:50], line[50:], f"\n\n  {line}\n", "end ")
    show(printer, *(tokens(0, text) for text in texts), tokens(1, "x" * 500), *finished(0))
    out = capsys.readouterr().out
    assert out == f"[0] {line}\n[0] \n[0]   {line}\n[0] end \n[1] {'x' * 500}\n"


def test_sequences_of_a_prompt_have_tags(capsys: pytest.CaptureFixture[str]) -> None:
    printer = choose_printer(as_json_lines=False, items=1, sequences=2, console=pipe())
    show(printer, tokens(0, "a"), tokens(0, "b", sequence=1))
    assert capsys.readouterr().out.splitlines() == ["[0.0] a", "[0.1] b"]


def test_broken_stream_prints_held_back_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printer = choose_printer(as_json_lines=False, items=2, sequences=1, console=pipe())

    def break_off() -> None:
        with printer:
            printer.show(tokens(1, "half a li"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        break_off()
    assert capsys.readouterr().out == "[1] half a li\n"


def test_single_stream_is_bare_text(capsys: pytest.CaptureFixture[str]) -> None:
    printer = choose_printer(as_json_lines=False, items=1, sequences=1, console=pipe())
    show(printer, tokens(0, "a\n"), tokens(0, f"b{ESCAPE}", offset=1), *finished(0))
    out, err = capsys.readouterr()
    assert out == f"a\nb{ESCAPE}\n"
    assert err.strip() == "ended: length, 3 prompt tokens, 2 new"


@pytest.mark.parametrize("items", [1, 2])
@pytest.mark.parametrize("console", [terminal(), pipe()], ids=["terminal", "no-terminal"])
def test_text_cannot_command_a_terminal(
    items: int,
    console: Console,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the environment has rich take the terminal for."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    printer = choose_printer(as_json_lines=False, items=items, sequences=1, console=console)
    show(printer, tokens(0, f"{ESCAPE}[2J\x9b2J\a\u3000é\t"), *finished(0))
    shown = capsys.readouterr().out
    if printer.redraws:
        assert isinstance(console.file, io.StringIO)
        shown = Console(file=io.StringIO()).render_str(console.file.getvalue()).plain
    assert "\\x1b[2J\\x9b2J\\x07\u3000é" in shown


def test_json_has_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    text = "".join(map(chr, range(0xB0)))
    printer = choose_printer(as_json_lines=True, items=1, sequences=1, console=pipe())
    show(printer, tokens(0, text))
    (line,) = capsys.readouterr().out.split("\n")[:-1]
    assert line.isprintable() or line.replace("\u00a0", " ").replace("\u00ad", "").isprintable()
    assert json.loads(line)["text"] == text


def test_regions_of_a_terminal_carry_their_tags() -> None:
    console = terminal()
    printer = choose_printer(as_json_lines=False, items=2, sequences=1, console=console)
    failed = ItemFailed(1, 0, QueueFull("the queue is full"), Usage())
    show(printer, Accepted(0, 0, "r", "m", 0), tokens(0, f"one{ESCAPE}"), tokens(1, "uno"), failed)
    assert isinstance(console.file, io.StringIO)
    final = Console(file=io.StringIO()).render_str(console.file.getvalue()).plain
    assert "one\\x1b" in final
    assert "[1] failed: QUEUE_FULL: the queue is full" in final


def test_json_lines_carry_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    printer = choose_printer(as_json_lines=True, items=2, sequences=1, console=pipe())
    error = QueueFull("full", worker="w", retry_after_ms=5)
    show(printer, tokens(1, "ä"), *finished(0), ItemFailed(1, 0, error, Usage(1, 2, 3)))
    first, second, third, fourth = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {
        "event": "tokens", "batch_index": 1, "sequence_index": 0, "token_offset": 0,
        "token_ids": [1], "text": "ä", "details": None,
    }  # fmt: skip
    assert (second["event"], second["reason"]) == ("sequence_finished", "length")
    assert third["usage"] == {
        "prompt_tokens": 3, "cached_prompt_tokens": 0, "generated_tokens": 2,
    }  # fmt: skip
    assert fourth["error"] == {
        "reason": "QUEUE_FULL", "message": "full", "worker": "w", "retry_after_ms": 5,
    }  # fmt: skip
