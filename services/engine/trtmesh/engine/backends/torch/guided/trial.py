"""Compiles a grammar in a process first, because a process can be killed and a thread in the library cannot.

The library's limits bound the work for most guides to some tenths of a second. But the rules of a grammar may refer to
each other, and schemas and grammars may ask for what many expressions have in common, which can take minutes within
these limits. The vocabulary of the process has bytes alone, for a quick start.
"""

from __future__ import annotations

import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from subprocess import DEVNULL, Popen, TimeoutExpired
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

PROGRAM = "trtmesh.engine.backends.torch.guided.trial"
SMALL_BYTES, SMALL_TAG_BYTES = 1024, 4096
"""Sizes at which a grammar and a tag take less time than a process."""
CPU_SECONDS = 1.0
"""Most CPU time of the process."""
MOST_SECONDS = 30.0
"""Most time until its end, on a machine that hardly lets it compute."""
MEMORY_BYTES = 2**31
"""Most address space of the process."""
CHECK_SECONDS = 0.02
"""Time between two checks whether the result is still wanted."""

MAX_LEXER_STATES = 16_384
"""Most states of the lexer, of a kilobyte or two each."""
INITIAL_LEXER_FUEL = 30_000
"""Bounds the largest expression. With the library's million, `((a{1000}){1000})` takes a second of CPU time."""
MAX_ROW_ITEMS = 400
"""Most open readings of a text under a grammar; more readings multiply the time per token. With the library's 2,000, a
token of `start: a` and `a: a a | /[a-z ]/ | a a a` takes up to three seconds. The parts of a schema do not count."""


def limits(max_row_items: int | None) -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        initial_lexer_fuel=INITIAL_LEXER_FUEL,
        verbose_errors=False,
        max_items_in_row=max_row_items,
    )


def problem_of_trial(grammar: str, check: Callable[[], None]) -> str:
    """Returns why the process could not compile a grammar, or ''. Raises the exceptions of `check`."""
    last = time.monotonic() + MOST_SECONDS
    # A file, since a pipe may hold less than the grammar.
    with TemporaryFile() as given:
        given.write(grammar.encode())
        given.seek(0)
        process = _begun(given)
    try:
        while process.poll() is None:
            check()
            if time.monotonic() > last:
                return f"the process that compiles it takes more than {MOST_SECONDS:g} s"
            with suppress(TimeoutExpired):
                process.wait(CHECK_SECONDS)
    finally:
        process.kill()
        process.wait()
    if process.returncode == -signal.SIGPROF:
        return f"it takes more than {CPU_SECONDS:g} s of CPU time to compile"
    status = process.returncode
    return f"the process that compiles it ended with status {status}" if status else ""


def _begun(grammar: IO[bytes]) -> Popen[bytes]:
    command = (sys.executable, "-m", PROGRAM)
    return Popen(command, stdin=grammar, stdout=DEVNULL)  # noqa: S603 - the command has no input of a client


def main() -> None:
    from llguidance import LLMatcher, LLTokenizer

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    grammar = sys.stdin.buffer.read().decode()
    LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=limits(MAX_ROW_ITEMS))


if __name__ == "__main__":
    main()
