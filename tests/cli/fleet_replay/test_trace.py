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
    ("content", "expected"),
    [
        (
            (
                "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,GPT-4,472,18,490,API log\n"
                "45,GPT-4,100,0,100,API log\n47.5,GPT-4,30,20,50,API log\n"
            ),
            [(0.0, 472, 18), (42.5, 30, 20)],
        ),
        (
            (
                "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.5000000,4808,10\n"
                "2023-11-16 18:17:05.0000000,3180,8\n"
            ),
            [(0.0, 4808, 10), (1.5, 3180, 8)],
        ),
    ],
)
def test_traces_of_burstgpt_and_azure_are_read(
    tmp_path: Path, content: str, expected: list[tuple[float, int, int]]
) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(content)
    assert [(a.seconds, a.prompt_tokens, a.new_tokens) for a in read_trace(file)] == expected


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nonsense", ":1 is not JSON"),
        ("[]", ":1 Input should be"),
        ('{"timestamp": 1, "output_length": 1}', ":1: input_length Field required"),
        (
            '{"timestamp": 1, "input_length": 0, "output_length": 1}',
            ":1: input_length Input should be greater",
        ),
        (
            '{"timestamp": "x", "input_length": 1, "output_length": 1}',
            ":1: timestamp Input should be a valid number",
        ),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', ":1 is not JSON"),
        ('{"timestamp": -Infinity, "input_length": 1, "output_length": 1}', ":1 is not JSON"),
        ('{"timestamp": 1e400, "input_length": 1, "output_length": 1}', ":1"),
        (
            '{"timestamp": 1%s, "input_length": 1, "output_length": 1}' % ("0" * 400),
            ":1 is not JSON",
        ),
        (
            '{"timestamp": 1, "input_length": 1%s, "output_length": 1}' % ("0" * 400),
            ":1 is not JSON",
        ),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": ["a"]}', "hash_ids"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "adapter": 7}', ":1: adapter "),
        (
            '{"timestamp": 1, "input_length": 1, "output_length": 1, "adapter_rank": -1}',
            ":1: adapter_rank ",
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
    recorder = Recorder(tmp_path / "trace.jsonl")
    recorder.note(**recorded_item())
    recorder.note(**recorded_item(error="PROMPT_EMPTY", prompt_tokens=None, new_tokens=None))
    recorder.note(**recorded_item(error="QUEUE_TIMEOUT", prompt_tokens=None, new_tokens=None))
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
    with pytest.raises(InvalidRequest, match="is not JSON") as refused:
        read_trace(file)
    assert refused.value.field == f"{file}:1"
