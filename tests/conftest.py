"""Makes runs equal on every machine: environment settings do not reach processes, and Hypothesis draws the same
examples. Assigns every test to its tier.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from log_lines import LogLine, log_lines
from tiers import LEFT_OUT, ProcessGuard, is_fast, is_left_out, turns_of
from trtmesh.chassis.logs import set_up_logs

FOREIGN = (
    # Settings of the services and of the CLI.
    "TRTMESH_",
    # Colours, sizes, and pipes treated as terminals.
    *("FORCE_COLOR", "NO_COLOR", "CLICOLOR", "PY_COLORS", "COLUMNS", "LINES", "TTY_", "GITHUB_ACTIONS"),
    # Without byte code, every start of a service compiles its modules again.
    "PYTHONDONTWRITEBYTECODE",
    # gRPC and urllib would connect to 127.0.0.1 through a proxy.
    *("http_proxy", "https_proxy", "grpc_proxy", "all_proxy"),
)  # fmt: skip
"""Prefixes, in either case, of variables with an effect on tests."""

for name in [*os.environ]:
    # public_data.py reads one.
    if name.startswith("TRTMESH_TEST_"):
        continue
    if name.lower().startswith(tuple(map(str.lower, FOREIGN))):
        del os.environ[name]
# Without its byte code, every worker of every run rewrites the asserts of every test.
sys.dont_write_bytecode = False
# Engines with a thread for every core slow each other down.
os.environ["OMP_NUM_THREADS"] = "1"
# Where an engine has several, a thread that spins at a barrier keeps the core from the thread it waits for.
os.environ["OMP_WAIT_POLICY"] = "passive"


def pytest_worker_begins() -> None:
    """Commands would look for stacks of the user or of another worker, and stacks take other names beside them."""
    os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="trtmesh-tests-")


pytest_worker_begins()
# The workers of a run have one, with what `forks.py` starts.
os.environ.setdefault("TESTED_FORKS", tempfile.mkdtemp(prefix="trtmesh-forks-"))
# In the background and under nohup SIGINT is ignored, and children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Terminals of tests have equal abilities everywhere.
os.environ["TERM"] = "xterm"

# The same examples in every run, without a deadline. `pytest --hypothesis-profile=default`, as in `make soak`, draws
# new ones, and three times as many, or those of `searches.py`.
settings.register_profile(
    "same examples every time",
    max_examples=30,
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("same examples every time")

pytest_plugins = ["workers", "tested_loop", "garbage"]

guard = ProcessGuard()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spares the collector of garbage the modules and tests, which stay: it would walk them at every import, and
    then in every test. Tokenizers that modules train start no threads, which forked workers would lack."""
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("TOKENIZERS_PARALLELISM", "false")
            return (yield)
    finally:
        gc.freeze()
        gc.enable()


def is_check(config: pytest.Config) -> bool:
    return bool(config.getoption("markexpr") == "fast")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # Before output is captured.
    config.stash[standard_error] = os.dup(2)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Keeps `make check` from importing what it does not run. Paths named on the command line are not asked about."""
    return True if is_check(config) and is_left_out(collection_path) else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keeps what takes seconds to import out of a whole `make check`."""
    is_whole = session.config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if (
        is_whole
        and is_check(session.config)
        and (slow := {"torch", "transformers"} & {*sys.modules})
    ):
        raise pytest.UsageError(
            f"a file of `make check` imports {' and '.join(sorted(slow))}: import them where they are used, or name the"
            f" file in {LEFT_OUT.name}"
        )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and is_fast(item):
            item.add_marker("fast")
    slow = {item.path for item in items if not item.get_closest_marker("fast")}
    turns = turns_of([*dict.fromkeys(item.path for item in items)], slow)
    items.sort(key=lambda item: turns[item.path])


LAST_SECONDS = 120
"""Longest that a test may take to end once its timeout has struck."""

standard_error = pytest.StashKey[int]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Ends a process whose test outlasts its timeout, and shows where each thread stands: a timeout raises in the main
    thread, which cannot end a call of C, nor a thread that the end of the test waits for."""
    _end_if_stuck(item)
    try:
        with guard.on() if item.get_closest_marker("fast") else nullcontext():
            return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """pytest's plugin has cancelled it for a debugger; what the test has left to end may get stuck too."""
    if isinstance(node, pytest.Item):
        _end_if_stuck(node)


def _end_if_stuck(item: pytest.Item) -> None:
    marker = item.get_closest_marker("timeout")
    option = item.config.getoption("timeout")
    given = item.config.getini("timeout") if option is None else option
    if seconds := float(marker.args[0] if marker else given):
        file = item.config.stash[standard_error]
        faulthandler.dump_traceback_later(seconds + LAST_SECONDS, exit=True, file=file)


@pytest.fixture
def logged() -> Iterator[Callable[[], list[LogLine]]]:
    """Reads the log of this process so far, in the format of a service."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with redirect_stderr(StringIO()) as written:
        set_up_logs("test", "info", "json")
    yield lambda: log_lines(written.getvalue())
    root.handlers[:] = handlers
    root.setLevel(level)
