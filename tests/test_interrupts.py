"""Tests can interrupt their children even where SIGINT is ignored: in the background and under nohup."""

from __future__ import annotations

import signal
import subprocess
import sys


def test_child_is_interrupted() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        child.send_signal(signal.SIGINT)
        assert child.wait() == -signal.SIGINT


def test_child_is_interrupted_where_the_run_ignores_sigint() -> None:
    test = f"{__file__}::{test_child_is_interrupted.__name__}"
    run = [sys.executable, "-m", "pytest", "-q", "--timeout=60", "-p", "no:cacheprovider", test]
    ignoring = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *run]
    done = subprocess.run(ignoring, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
