"""Shows the progress of a start: in a terminal in a changing line, in a pipe line by line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from trtmesh.cli.output import say

Tell = Callable[[str, str], None]
"""Takes the name of a process and the present activity."""

SERVES = "serves"


@contextmanager
def progress(console: Console | None = None) -> Iterator[Tell]:
    """Yields a function for the length of the block."""
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

    # Lines of logs appear above.
    with Live(spinner, console=console, transient=True, redirect_stdout=False):
        yield tell
