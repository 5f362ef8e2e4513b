"""Files of tests run in several processes as they do in one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent

COLLECTED = """
import os, pathlib
pathlib.Path("collected").open("a").write(f"{__name__}\\n")

@__import__("pytest").fixture(autouse=True)
def noted(tmp_path):
    pathlib.Path(f"worker_of_{__name__}").write_text(f"{os.getpid()} {tmp_path.parent}")
"""
FIRST = f"""{COLLECTED}
def test_passes(capfd):
    print("told")
    assert capfd.readouterr() == ("told\\n", "")

def test_fails():
    print("what it saw")
    assert "x" == "y"
"""
ENDING_IN_A_TEST = """
import signal, time

def test_ends_its_process():
    # What it leaves behind has all its files open.
    if os.fork():
        os.kill(os.getpid(), signal.SIGKILL)
    until = time.monotonic() + 200
    while time.monotonic() < until and not pathlib.Path("after_the_end").exists():
        time.sleep(0.01)
    os._exit(0)

def test_after_the_end():
    pathlib.Path("after_the_end").touch()
    while not pathlib.Path("worker_of_test_second").exists():
        time.sleep(0.01)
"""
SECOND = f"""{COLLECTED}
import pytest, time

def test_is_skipped():
    pytest.skip("for a reason")

def test_waits():
    while not pathlib.Path("worker_of_test_first").exists():
        time.sleep(0.01)
"""


WAITING = """
import pathlib, pytest, time

@pytest.fixture
def thing():
    yield
    pathlib.Path("torn down").touch()

def test_waits_for_the_end(thing):
    pathlib.Path("worker_of_test_second").touch()
    pathlib.Path("waits").touch()
    time.sleep(200)
"""
AFTER_IT = """
import pathlib, time

def pytest_runtest_setup(item):
    while item.path.name != "test_waiting.py" and not pathlib.Path("waits").exists():
        time.sleep(0.01)
"""
"""Nothing fails before another worker has begun to wait."""

ENDING = """
import os

def pytest_runtest_logfinish():
    os._exit(3)
"""


def run(directory: Path, *options: str, status: int = 1, first: str = FIRST) -> str:
    """Returns what pytest writes."""
    (directory / "test_first.py").write_text(first)
    (directory / "test_second.py").write_text(SECOND)
    (directory / "pytest.ini").touch()
    command = (sys.executable, "-m", "pytest", "-p", "workers", "-rA", *options)
    # Other plugins would be imported for nothing.
    alone = {"PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    env = {**os.environ, "PYTHONPATH": str(TESTS), **alone}
    done = subprocess.run(
        command, cwd=directory, env=env, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_outcomes_are_those_of_one_process(tmp_path: Path) -> None:
    told = run(tmp_path, "--workers=2", first=FIRST + ENDING_IN_A_TEST)
    assert "2 failed, 3 passed, 1 skipped" in told
    assert "PASSED test_first.py::test_passes" in told
    assert "what it saw" in told
    assert "AssertionError: assert 'x' == 'y'" in told
    assert "FAILED test_first.py::test_ends_its_process - worker 0 ended with -9" in told
    assert "PASSED test_first.py::test_after_the_end" in told
    assert "SKIPPED [1] test_second.py:12: for a reason" in told
    # The workers share the collection and no folder.
    assert (tmp_path / "collected").read_text().split() == ["test_first", "test_second"]
    first, second = (
        (tmp_path / f"worker_of_test_{each}").read_text().split() for each in ("first", "second")
    )
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_first_failure_ends_the_run(tmp_path: Path) -> None:
    told = run(tmp_path, "--workers=1", "-x")
    assert "stopping after 1 failures" in told
    assert re.search(r"1 failed, 1 passed in", told)


def test_fixtures_of_other_workers_are_torn_down(tmp_path: Path) -> None:
    (tmp_path / "test_waiting.py").write_text(WAITING)
    (tmp_path / "conftest.py").write_text(AFTER_IT)
    run(tmp_path, "--workers=3", "-x")
    assert (tmp_path / "torn down").exists()


def test_end_between_two_tests_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(ENDING)
    told = run(tmp_path, "--workers=1", status=3)
    assert "RuntimeError: worker 0 ended with 3 between two tests" in told
