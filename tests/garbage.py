"""`pytest --garbage` fails if a service process leaves reference cycles behind, as `reference_cycles.py` finds them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from reference_cycles import PLACE


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--garbage", action="store_true", help="fail if a service process leaves cycles"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--garbage"):
        os.environ.setdefault(PLACE, tempfile.mkdtemp(prefix="trtmesh-garbage-"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--garbage") and reports():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if config.getoption("--garbage") and (found := reports()):
        terminalreporter.section("cycles left by service processes")
        terminalreporter.write("\n".join(sorted(found)) + "\n")


def reports() -> set[str]:
    """A line for each kind of cycle that was found."""
    return {
        line
        for path in Path(os.environ[PLACE]).iterdir()
        for line in path.read_text().split("\n")
        if line
    }
