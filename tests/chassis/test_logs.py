"""Log lines as text and JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
from trtmesh.chassis.logs import request_id_bound, set_up_logs


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
