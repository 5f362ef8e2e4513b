"""A run is the same on every machine.

The environment is nobody's: what a developer or a CI has set reaches no process. Hypothesis draws the same examples.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from io import StringIO

import pytest
from hypothesis import HealthCheck, settings
from log_lines import LogLine, log_lines
from trtmesh.chassis.logs import set_up_logs

FOREIGN = (
    # Settings of the services and of the command.
    "TRTMESH_",
    # How a program prints: colours, sizes, and that a pipe be taken for a terminal.
    *("FORCE_COLOR", "NO_COLOR", "CLICOLOR", "PY_COLORS", "COLUMNS", "LINES", "TTY_", "GITHUB_ACTIONS"),
    # gRPC and urllib would ask a proxy for 127.0.0.1.
    *("http_proxy", "https_proxy", "grpc_proxy", "all_proxy"),
)  # fmt: skip
"""Beginnings of the names of variables, in either case, that change what is tested."""

for name in [*os.environ]:
    if name.lower().startswith(tuple(map(str.lower, FOREIGN))):
        del os.environ[name]
# Engines that each take all cores wait for each other in loops.
os.environ["OMP_NUM_THREADS"] = "1"
# A terminal of a test can do what any can, whatever the tests were started from.
os.environ["TERM"] = "xterm"

# A run is judged by what is right and not by luck or by the machine's speed: the same examples every time, however long
# they take. `pytest --hypothesis-profile=default` draws new ones.
settings.register_profile(
    "same examples every time",
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("same examples every time")


@pytest.fixture
def logged() -> Iterator[Callable[[], list[LogLine]]]:
    """Gives what this process has logged so far, as a service would have written it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with redirect_stderr(StringIO()) as written:
        set_up_logs("test", "info", "json")
    yield lambda: log_lines(written.getvalue())
    root.handlers[:] = handlers
    root.setLevel(level)
