"""Log lines as text and JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Literal

import pytest
from trtmesh.chassis.logs import Occasionally, caller_bound, request_id_bound, set_up_logs


@pytest.fixture(autouse=True)
def _restored_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


log = logging.getLogger("trtmesh.example")


def test_text_lines_have_service_and_request_id(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs("engine", "info", "text")
    log.info("before")
    with request_id_bound("r-1"):
        log.warning("inside %d", 5)
    log.debug("unseen")
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("info engine - trtmesh.example: before")
    assert second.endswith("warning engine r-1 trtmesh.example: inside 5")


@pytest.mark.parametrize("form", ["text", "json"])
def test_lines_name_the_caller(
    capsys: pytest.CaptureFixture[str], form: Literal["text", "json"]
) -> None:
    set_up_logs("router", "info", form)
    with request_id_bound("r-1"), caller_bound("alice"):
        log.info("inside")
    log.info("outside")
    first, second = capsys.readouterr().err.splitlines()
    if form == "text":
        assert first.endswith("info router alice/r-1 trtmesh.example: inside")
        assert second.endswith("info router - trtmesh.example: outside")
    else:
        callers = [json.loads(line)["caller"] for line in (first, second)]
        assert callers == ["alice", "-"]


def test_request_id_cannot_forge_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs("engine", "info", "text")
    with request_id_bound("r\n2030 info engine - root: all is well"):
        log.info("told\r\nso")
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_exception_cannot_forge_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs("engine", "info", "text")
    try:
        raise ValueError("no\n2030 info engine - root: all is well")
    except ValueError:
        log.exception("failed")
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.endswith("trtmesh.example: failed")
    assert all(line.startswith("  ") for line in rest)
    assert "all is well" in rest[-1]


def test_json_lines_have_the_same_parts(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs("router", "info", "json")
    with request_id_bound("r-1"):
        try:
            raise ValueError("bad")
        except ValueError:
            log.exception("failed\nbadly")
    (line,) = capsys.readouterr().err.splitlines()
    record = json.loads(line)
    assert record["service"] == "router"
    assert record["request_id"] == "r-1"
    assert record["level"] == "error"
    assert record["logger"] == "trtmesh.example"
    assert record["message"] == "failed\nbadly"
    assert "ValueError: bad" in record["exception"]


@pytest.mark.parametrize("form", ["text", "json"])
def test_lines_command_no_terminal_and_have_an_end(
    form: Literal["text", "json"], capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_logs("engine", "info", form)
    with request_id_bound("id\x1b[2J" + "x" * 2**20):
        try:
            raise ValueError("\x1b[31m\u202e" + "y" * 2**20)
        except ValueError:
            log.exception("model \x9b5m\u202e\ud800 %s", "z" * 2**20)
    written = capsys.readouterr().err
    assert all(line.isprintable() for line in written.splitlines())
    assert len(written) < 2**15


def test_one_line_of_a_kind_in_a_period(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = 0.0
    occasionally = Occasionally(log, 1.0, lambda: now)
    for now in (0.0, 0.1, 0.9):
        occasionally("full", logging.INFO, "full at %g", now)
        occasionally("slow", logging.INFO, "slow at %g", now)
    now = 1.0
    occasionally("full", logging.INFO, "full at %g", now)
    now = 2.5
    occasionally("full", logging.INFO, "full at %g", now)
    assert [record.getMessage() for record in caplog.records] == [
        "full at 0",
        "slow at 0",
        "full at 1 (2 like it were left out)",
        "full at 2.5",
    ]
