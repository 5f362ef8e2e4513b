"""Patterns of layers' names, against the expressions of PEFT."""

from __future__ import annotations

import re

import pytest
from trtmesh.chassis.errors import UnsupportedField
from trtmesh.chassis.layer_patterns import (
    MOST_ALTERNATIVES,
    MOST_PATTERN_CHARACTERS,
    MOST_REPEATING,
    MOST_TOKENS,
    LayerPatterns,
)

NAMES = [
    "model.layers.1.self_attn.q_proj",
    "model.layers.11.self_attn.q_proj",
    "model.layers.1.self_attn.k_proj",
    "model.layers.123.mlp.down_proj",
    "model.layers.123.mlp.xdown_proj",
    "transformer.h.0.attn.c_attn",
    "layers.1.self_attn.q_proj",
    "q_proj",
    "5.55.555",
    ".q_proj",
]


@pytest.mark.parametrize(
    "pattern",
    [
        "q_proj",
        "^q_proj",
        "q_proj$",
        "layers.1.self_attn.q_proj",
        r"layers\.1\.self_attn\.q_proj",
        r"^model\.layers\.1\..*",
        r".*\.q_proj",
        ".*",
        r"layers\.\d\..*proj",
        r"layers\.\d+\.self_attn\.(q|k)_proj",
        r"model\.layers\.(1|\d\d\d)\..*proj$",
        r"(?:^layers|h)\..*",
        "q_proj|down_proj",
        "^layers.*|c_attn$",
        r"\d+\d\d",
        r"\d+.\d+.*",
        r".*5.*5",
        r"(|x)down_proj",
        r"1.*\d+.*proj",
        r"..proj",
    ],
)
def test_pattern_matches_what_peft_matches(pattern: str) -> None:
    found = LayerPatterns("rank_pattern", {pattern: 3})
    told = {name: found.value(name, 0) == 3 for name in NAMES}
    assert told == {name: bool(re.fullmatch(rf"(.*\.)?({pattern})", name)) for name in NAMES}


def test_first_pattern_that_matches_counts() -> None:
    found = LayerPatterns("rank_pattern", {"k_proj": 1, r"layers\.\d+\..*": 2, "q_proj": 3})
    assert [found.value(NAMES[index], 9) for index in (0, 2, 3, 7, 5)] == [2, 1, 2, 3, 9]


@pytest.mark.parametrize(
    "pattern",
    [
        "(", "*", ")", "", "a|", "a||b", "a+", "a*", "a?", "a{9}", ".+", ".*?", ".*+", r"\d*", r"\w+", r"\D", "\\",
        "[ab]", "(a)+", "(a)*", "(a|b){2}", "(a)(b)", "((a))", "(?=a)", "(?i)a", "(?P<x>a)", "(?#a)", "a^", "$a",
        "^^a", "(a$)b", r".(*a)", r"\d(+a)", "a b", "(a+)+X", "([a-z_.0-9]+)+X",
    ],
)  # fmt: skip
def test_other_expressions_are_refused_by_field(pattern: str) -> None:
    with pytest.raises(UnsupportedField) as refused:
        LayerPatterns("alpha_pattern", {"q_proj": 1, pattern: 2})
    assert refused.value.field == "adapter_config.alpha_pattern"
    assert refused.value.value == pattern


@pytest.mark.parametrize(
    "patterns",
    [
        ["a" * (MOST_TOKENS + 1)],
        ["a|" * (MOST_PATTERN_CHARACTERS // 2) + "a"],
        [f"a{number}" for number in range(MOST_ALTERNATIVES + 1)],
        [f"a{number}.*" for number in range(MOST_REPEATING + 1)],
        [f"a{n}(" + "|".join(map(str, range(100))) + ")" for n in range(MOST_ALTERNATIVES // 100 + 1)],
    ],
    ids=["tokens", "characters", "alternatives", "repeating", "group"],
)  # fmt: skip
def test_number_and_length_of_patterns_are_bounded(patterns: list[str]) -> None:
    with pytest.raises(UnsupportedField) as refused:
        LayerPatterns("rank_pattern", dict.fromkeys(patterns, 1))
    assert refused.value.field == "adapter_config.rank_pattern"
    assert refused.value.limit


def test_repetitions_take_no_exponential_time() -> None:
    """By backtracking these would not end."""
    found = LayerPatterns("rank_pattern", {".*1" * 60 + "x": 1, r"\d+1" * 60 + "x": 2})
    assert found.value("1" * 250, 7) == 7
    assert found.value("1" * 249 + "x", 7) == 1
