"""Ctrl-C while the command loads."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Ctrl-C in the block, which has nothing to clean up, ends the process. Python would print a KeyboardInterrupt and
    go on where it comes in a destructor or in the callback that each import has."""
    # In the background the signal is ignored, and stays so.
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
