"""`trtmesh chat` as a program would use it: lines in, answers out."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from cli.commands import STOP_SECONDS, read_until_closed, running_stack, start_command, trtmesh

FLAGS = ("--max-tokens", "6", "--temperature", "0.8", "--seed", "3")


def chat(router: str, *lines: str, flags: tuple[str, ...] = FLAGS) -> tuple[int, str, str]:
    result = trtmesh(
        "chat", "--router", router, *flags, stdin="".join(f"{line}\n" for line in lines)
    )
    return result.returncode, result.stdout, result.stderr


def test_model_sees_what_was_said(router: str) -> None:
    status, first, problem = chat(router, "Hello")
    assert (status, problem) == (0, "")
    assert first.endswith("\n")
    _, both, _ = chat(router, "Hello", "Go on")
    assert both.startswith(first)
    _, anew, _ = chat(router, "Hello", "/new", "Go on", "/quit", "never read")
    assert anew.startswith(first)
    assert anew != both
    _, alone, _ = chat(router, "Go on")
    assert anew == first + alone


def test_problem_is_told_and_the_talk_goes_on(router: str) -> None:
    status, out, problem = chat(router, "/model nope", "Hello", "/model demo", "/what", "Hello")
    assert status == 0
    assert "MODEL_NOT_FOUND" in problem
    assert "no command /what" in problem
    assert out == chat(router, "Hello")[1]
    assert chat(router, "/model nope", "Hello")[0] == 1


def test_answer_is_stopped(router: str) -> None:
    endless = ("--max-tokens", "8000", "--end-id", "5")
    status, out, problem = chat(router, "Hello", "/stop", flags=endless)
    assert (status, problem) == (0, "")
    assert len(out) < 20_000


ESCAPE_ID = "223"
"""Of the demo model's tokenizer, for the control character of terminals."""
ONLY_ESCAPES = {
    f"TRTMESH_ENGINE_SIMULATED_VOCABULARY_{which}_TOKEN_ID": ESCAPE_ID
    for which in ("FIRST", "LAST")
}
ENDLESS = ("--max-tokens", "8000", "--end-id", "5")
CTRL_C = "\x03"


@pytest.fixture(scope="module")
def hostile() -> Iterator[str]:
    """A router whose model answers with escape characters alone."""
    with running_stack("--port", "0", env=ONLY_ESCAPES) as stack:
        yield stack.wait_ready()


class Terminal:
    """A terminal in which a command runs, and what it has shown."""

    status: int

    def __init__(self, leader: int) -> None:
        self.leader, self.shown, self._seen = leader, "", 0

    def type(self, text: str) -> None:
        os.write(self.leader, text.encode())

    def wait_for(self, text: str) -> None:
        """Waits until it shows a text after those of earlier waits."""
        while (at := self.shown.find(text, self._seen)) < 0:
            self.shown += os.read(self.leader, 65536).decode(errors="replace")
        self._seen = at + len(text)

    def wait_for_more(self, characters: int) -> None:
        while len(self.shown) < self._seen + characters:
            self.shown += os.read(self.leader, 65536).decode(errors="replace")


IN_FRONT = "import fcntl, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
"""Makes the terminal that it reads from that of its session, as it starts."""


@contextmanager
def terminal(*command: str, input_from: int | None = None) -> Iterator[Terminal]:
    """Runs a command in a session of its own to its end, as the foreground process of the terminal that it reads."""
    leader, follower = pty.openpty()
    with ExitStack() as stack:
        path = os.environ.get("PYTHONPATH", "")
        if input_from is None:
            starts = stack.enter_context(TemporaryDirectory())
            Path(starts, "sitecustomize.py").write_text(IN_FRONT)
            path = os.pathsep.join([starts, path])
        env = {**os.environ, "PYTHONPATH": path}
        process = stack.enter_context(
            start_command(
                *command,
                env=env,
                stdin=follower if input_from is None else input_from,
                stdout=follower,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )
        os.close(follower)
        try:
            running = Terminal(leader)
            yield running
            running.shown += read_until_closed(leader)
            process.wait(STOP_SECONDS)
        finally:
            process.kill()
    running.status = process.returncode


@pytest.mark.parametrize("piped", [False, True])
def test_answers_cannot_command_the_terminal(hostile: str, piped: bool) -> None:
    """Nor where the messages come from a pipe."""
    reading, writing = os.pipe()
    given = reading if piped else None
    with terminal("chat", "--router", hostile, *FLAGS, input_from=given) as chat:
        os.write(writing if piped else chat.leader, b"Hello\n/quit\n")
        os.close(writing)
    os.close(reading)
    assert chat.status == 0
    assert r"\x1b" * 6 in chat.shown
    assert "\x1b" not in chat.shown
    assert trtmesh("chat", "--router", hostile, *FLAGS, stdin="Hello").stdout == "\x1b" * 6 + "\n"


def test_generated_text_cannot_command_the_terminal(hostile: str) -> None:
    for form in ((), ("--json",)):
        with terminal("generate", "--router", hostile, *FLAGS, *form, "Hello") as generate:
            pass
        assert generate.status == 0
        assert r"1b" in generate.shown
        assert "\x1b" not in generate.shown


def test_ctrl_c_ends_the_answer_and_not_the_talk(router: str) -> None:
    with terminal("chat", "--router", router, *ENDLESS) as chat:
        for _ in range(2):
            chat.wait_for("> ")
            chat.type("Hello\n")
            chat.wait_for("Hello\r\n")
            chat.wait_for_more(200)
            chat.type(CTRL_C)
            chat.wait_for("^C")
        chat.wait_for("> ")
        chat.type(CTRL_C)
    assert chat.status == 130
    assert len(chat.shown) < 20_000
    assert "Traceback" not in chat.shown
