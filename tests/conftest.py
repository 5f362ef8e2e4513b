"""A run is the same on every machine.

The environment is nobody's: what a developer or a CI has set reaches no process. Hypothesis draws the same examples.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext, redirect_stderr
from io import StringIO

import pytest
from hypothesis import HealthCheck, settings
from log_lines import LogLine, log_lines
from tiers import ProcessGuard, is_fast
from trtmesh.chassis.logs import set_up_logs

FOREIGN = (
    # Settings of the services and of the command.
    "TRTMESH_",
    # How a program prints: colours, sizes, and that a pipe be taken for a terminal.
    *("FORCE_COLOR", "NO_COLOR", "CLICOLOR", "PY_COLORS", "COLUMNS", "LINES", "TTY_", "GITHUB_ACTIONS"),
    # Services would compile their modules again at every start, and pytest every test.
    "PYTHONDONTWRITEBYTECODE",
    # gRPC and urllib would ask a proxy for 127.0.0.1.
    *("http_proxy", "https_proxy", "grpc_proxy", "all_proxy"),
)  # fmt: skip
"""Beginnings of the names of variables, in either case, that change what is tested."""

for name in [*os.environ]:
    if name.lower().startswith(tuple(map(str.lower, FOREIGN))):
        del os.environ[name]
# Engines that each take all cores wait for each other in loops.
os.environ["OMP_NUM_THREADS"] = "1"
# Children inherit an ignored SIGINT, as of a run in the background or under nohup, and then no test can interrupt them.
signal.signal(signal.SIGINT, signal.default_int_handler)
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

guard = ProcessGuard()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and is_fast(item):
            item.add_marker("fast")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with guard.on() if item.get_closest_marker("fast") else nullcontext():
        return (yield)


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
