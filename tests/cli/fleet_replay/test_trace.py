"""Reading of trace files."""

from __future__ import annotations

from pathlib import Path

import pytest
from router.traces import recorded_item
from trtmesh.chassis.errors import InvalidRequest
from trtmesh.router.recorder import Recorder
from trtmesh.tools.fleet_replay.trace import Arrival, read_trace


def test_mooncake_trace_is_read(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}\n'
        "\n"
        '{"timestamp": 1000, "input_length": 512, "output_length": 0, "hash_ids": [1]}\n'
    )
    assert read_trace(file) == [
        Arrival(0.0, 512, 0, 512, (1,)),
        Arrival(2.0, 1100, 5, 512, (1, 2)),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nonsense", ":1 is not JSON"),
        ("[]", ":1 is not an object"),
        ('{"timestamp": 1, "output_length": 1}', ":1: input_length is None"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "input_length is 0"),
        ('{"timestamp": "x", "input_length": 1, "output_length": 1}', "timestamp is 'x'"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', ":1: timestamp is nan"),
        ('{"timestamp": -Infinity, "input_length": 1, "output_length": 1}', "timestamp is -inf"),
        ('{"timestamp": 1e400, "input_length": 1, "output_length": 1}', "timestamp is inf"),
        ('{"timestamp": 1%s, "input_length": 1, "output_length": 1}' % ("0" * 400), "timestamp"),
        ('{"timestamp": 1, "input_length": 1%s, "output_length": 1}' % ("0" * 400), "input_length"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": ["a"]}', "hash_ids"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "adapter": 7}', "adapter is 7"),
        (
            '{"timestamp": 1, "input_length": 1, "output_length": 1, "adapter_rank": -1}',
            "adapter_rank is -1",
        ),
        ("", "no arrivals"),
    ],
)
def test_wrong_trace_is_refused_with_its_line(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(InvalidRequest, match=words):
        read_trace(file)


def test_unservable_items_are_left_out(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "trace.jsonl", 10_000)
    recorder.note(recorded_item())
    recorder.note(recorded_item(error="PROMPT_EMPTY", prompt_tokens=None, new_tokens=None))
    recorder.note(recorded_item(error="QUEUE_TIMEOUT", prompt_tokens=None, new_tokens=None))
    recorder.flush()
    recorder.close()
    assert [a.guessed for a in read_trace(tmp_path / "trace.jsonl")] == [False, True]


def test_several_traces_are_merged_by_time(tmp_path: Path) -> None:
    lines = [f'{{"timestamp": {t}, "input_length": {t}, "output_length": 1}}\n' for t in (1, 2, 3)]
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text(lines[0] + lines[2])
    two.write_text(lines[1])
    assert [each.prompt_tokens for each in read_trace(one, two)] == [1, 2, 3]


def test_deeply_nested_line_is_refused_with_its_number(tmp_path: Path) -> None:
    file = tmp_path / "nested"
    file.write_text("[" * 100_000 + "\n")
    with pytest.raises(InvalidRequest, match="nested too deeply") as refused:
        read_trace(file)
    assert refused.value.field == f"{file}:1"
