"""Texts that begin calls again and again."""

from __future__ import annotations

import time

import pytest
from router.doors.openai.test_answer_parser import LLAMA3, NEMO, QWEN3, told


@pytest.mark.parametrize(
    "piece", ["<tool_call>{", '<tool_call>{"a"', "{", "\n", "<tool_call>[TOOL_"]
)
@pytest.mark.parametrize("end", ["", "}" * 20_000])
def test_hostile_text_takes_linear_time(piece: str, end: str) -> None:
    text = piece * 20_000 + end
    began = time.process_time()
    for reading in (QWEN3, LLAMA3, NEMO):
        told(reading, [text[at : at + 64] for at in range(0, len(text), 64)])
    assert time.process_time() - began < 6
