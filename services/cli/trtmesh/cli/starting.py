"""Says how far a start is: in a terminal in one line that changes, in a pipe in lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from trtmesh.cli.output import say

Tell = Callable[[str, str], None]
"""Takes the name of a process and what it does now."""

SERVES = "serves"


@contextmanager
def progress(console: Console | None = None) -> Iterator[Tell]:
    """What it yields may be called as long as the block runs."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield lambda name, doing: say(f"{name} {doing}")
        return
    doings: dict[str, str] = {}
    spinner = Spinner("dots", "starting")

    def tell(name: str, doing: str) -> None:
        doings[name] = doing
        busy = [f"{each} {does}" for each, does in doings.items() if does != SERVES]
        spinner.update(text="; ".join(busy) or "connecting")

    # Lines of logs appear above it.
    with Live(spinner, console=console, transient=True, redirect_stdout=False):
        yield tell
