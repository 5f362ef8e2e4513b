"""A process for converting files for a command: ends with the command, and reports a reason of failure."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from trtmesh.chassis.errors import ModelUnusable, StartupError, TrtmeshError


def run_conversion(convert: Callable[[], None]) -> int:
    """The exit status; the reason of a failure is the last line of standard error."""
    _end_with_parent()
    try:
        convert()
    except StartupError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_status
    except TrtmeshError as error:
        sys.stderr.write(f"{error}\n")
        return ModelUnusable.exit_status
    return 0


def _end_with_parent() -> None:
    """Ends the process at the end of the standard input."""

    def wait() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
