from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from small_disk import full_beyond
from trtmesh.chassis.errors import SettingsError
from trtmesh.tools.bench.record import (
    Answer,
    AnswerOutcome,
    Disruption,
    Echo,
    Header,
    Load,
    Run,
    RunEnd,
    without_secrets,
)
from trtmesh.tools.bench.run_file import RunFile, as_line, read_runs

HEADER = Header(
    target="grpc://127.0.0.1:8001",
    protocol="grpc",
    load=Load("gamma", rate=3.5, shape={"burstiness": 0.5}),
    workload="64 prompts",
    seed=7,
    echo=Echo(16, (0.1, 0.2, 0.3), (0.01, 0.02, 0.03), 57600.0),
)
ANSWER = Answer(
    index=3,
    batch_index=1,
    request_id="a",
    planned_s=0.5,
    sent_s=0.6,
    ended_s=2.0,
    outcome=AnswerOutcome.OK,
    arrivals_s=(1.0, 1.5),
    tokens=(1, 4),
    lost=0,
)
END = RunEnd(9.0, disruptions=(Disruption("kill", "engine-1", 3.0, 3.1),))


def test_file_gives_back_the_runs(tmp_path: Path) -> None:
    failed = replace(ANSWER, outcome=AnswerOutcome.ERROR, error="lost", lost=None)
    with RunFile(tmp_path / "runs.jsonl") as file:
        for line in (HEADER, ANSWER, failed, END, replace(HEADER, seed=8), ANSWER):
            file.write(line)
    assert read_runs(tmp_path / "runs.jsonl") == [
        Run(HEADER, (ANSWER, failed), END),
        Run(replace(HEADER, seed=8), (ANSWER,), None),
    ]


def test_written_lines_survive_the_writer(tmp_path: Path) -> None:
    with RunFile(tmp_path / "runs.jsonl") as file:
        file.write(HEADER)
        file.write(ANSWER)
        assert read_runs(tmp_path / "runs.jsonl") == [Run(HEADER, (ANSWER,), None)]


def test_half_a_line_of_a_killed_run_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    file.write_bytes(as_line(HEADER) + as_line(ANSWER) + as_line(ANSWER)[:-9])
    assert read_runs(file) == [Run(HEADER, (ANSWER,), None)]


def test_a_full_disk_ends_the_file_and_not_the_run(tmp_path: Path) -> None:
    whole = len(as_line(HEADER)) + len(as_line(ANSWER))
    with RunFile(tmp_path / "runs.jsonl") as file, full_beyond(whole + 20):
        for line in (HEADER, ANSWER, ANSWER, ANSWER, END):
            file.write(line)
    assert "runs.jsonl ends early, since it cannot be written: File too large" in file.problem
    assert read_runs(tmp_path / "runs.jsonl") == [Run(HEADER, (ANSWER,), None)]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "has no run"),
        (as_line(ANSWER), "line 1: no line of kind 'run'"),
        (as_line(HEADER) + b'{"kind":"answer"}\n', "line 2: index: Field required"),
        (b"{]\n", "line 1"),
        (b'{"kind":"run","schema":2}\n', "schema 2 is newer than 1"),
        (b'{"kind":"other"}\n', "line 1: kind"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "runs.jsonl"
    file.write_bytes(content)
    with pytest.raises(SettingsError, match=says):
        read_runs(file)


def test_command_line_shows_no_user_of_a_url() -> None:
    shown = without_secrets(["bench", "serve", "openai://me:secret@host:1/v1", "--workload", "a b"])
    assert shown == "bench serve openai://host:1/v1 --workload 'a b'"
