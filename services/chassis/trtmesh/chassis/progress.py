"""What a starting process does now, for whoever started it."""

from __future__ import annotations

import json
import sys
from contextlib import suppress


def tell_progress(doing: str) -> None:
    """Prints a line of JSON after the announcement, such as {"progress": "reads the weights"}."""
    # Whoever reads the announcement alone may have closed the pipe.
    with suppress(OSError):
        sys.stdout.write(json.dumps({"progress": doing}) + "\n")
        sys.stdout.flush()
