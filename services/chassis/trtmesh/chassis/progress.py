"""Announces the progress of a starting process to the parent."""

from __future__ import annotations

import json
import sys
from contextlib import suppress


def tell_progress(doing: str) -> None:
    """Prints a line of JSON after the announcement, such as {"progress": "reads the weights"}."""
    # The parent may have closed the pipe after the first announcement.
    with suppress(OSError):
        sys.stdout.write(json.dumps({"progress": doing}) + "\n")
        sys.stdout.flush()
