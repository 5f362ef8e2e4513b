"""Requests from files of other tools, and drawn ones."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Coroutine, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer
from trtmesh.chassis.errors import InvalidRequest, SettingsError
from trtmesh.tools.bench.record import Plan
from trtmesh.tools.bench.workloads.lengths import MOST_TOKENS, read_lengths
from trtmesh.tools.bench.workloads.options import WorkloadOptions
from trtmesh.tools.bench.workloads.words import local_tokenizer, one_token_words

TOKENIZER = Path(__file__).parents[3] / "models" / "demo"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))


def read(path: Path, content: str, **options: object) -> Coroutine[Any, Any, tuple[Plan, ...]]:
    path.write_text(content, encoding="utf-8")
    return WorkloadOptions(workload=path, **options).plans(seed=1)  # type: ignore[arg-type]  # by name


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def told(plans: Sequence[Plan]) -> list[tuple[object, ...]]:
    """Text, length and time of each request."""
    assert [prompt.index for plan in plans for prompt in plan.prompts] == [*range(len(plans))]
    return [(p.prompts[0].text, p.prompts[0].max_tokens, p.planned_s) for p in plans]


async def test_single_turns_come_in_the_order_of_their_times(tmp_path: Path) -> None:
    content = lines(
        {"text": "b", "output_length": 5, "timestamp": 3500},
        {"text": "a", "output_length": 4, "timestamp": 1000, "delay": 500},
    )
    assert told(await read(tmp_path / "f.jsonl", content)) == [("a", 4, 0.0), ("b", 5, 2.0)]


async def test_turns_of_a_session_follow_each_other(tmp_path: Path) -> None:
    content = lines(
        {"session_id": "x", "turns": ["a", {"text": "b", "delay": 250}, "c"]},
        {"turns": [{"text": "d", "output_length": 9}]},
    )
    plans = await read(tmp_path / "f.jsonl", content, output_tokens="7")
    assert [(p.session, p.turn, p.delay_s, p.prompts[0].text) for p in plans] == [
        ("x", 0, 0.0, "a"),
        ("x", 1, 0.25, "b"),
        ("x", 2, 0.0, "c"),
        (f"{tmp_path}/f.jsonl:2", 0, 0.0, "d"),
    ]
    assert {p.prompts[0].max_tokens for p in plans} == {7}


async def test_blocks_of_mooncake_become_shared_prefixes(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    records = [
        {"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [7, 8, 9]},
        {"timestamp": 10, "input_length": 1030, "output_length": 0, "hash_ids": [7, 8, 30]},
        {"timestamp": 20, "input_length": 512, "output_length": 4, "hash_ids": [8]},
    ]
    plans = await read(tmp_path / "f.jsonl", lines(*records), tokenizer=TOKENIZER)
    ids = [tokenizer.encode(plan.prompts[0].text or "").ids for plan in plans]
    assert list(map(len, ids)) == [1100, 1030, 512]
    assert ids[0][:1024] == ids[1][:1024]
    assert ids[0][1024:1030] != ids[1][1024:]
    # Another position, and so no prefix, but the same words.
    assert ids[2][1:] == ids[0][513:1024]
    assert [(p.prompts[0].max_tokens, p.planned_s) for p in plans] == [
        (3, 0.0),
        (1, 0.01),
        (4, 0.02),
    ]
    again = await read(tmp_path / "other-name.jsonl", lines(*records), tokenizer=TOKENIZER)
    assert again == plans


BURST_GPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,100,0,100,Conversation log
47.5,GPT-4,30,20,50,API log
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (BURST_GPT, [(472, 18, 0.0), (30, 20, 42.5)]),
        (AZURE, [(4808, 10, 0.0), (3180, 8, 0.052)]),
    ],
)
async def test_traces_of_lengths_are_drawn_to_the_token(
    content: str, expected: list[tuple[int, int, float]], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    found = told(await read(tmp_path / "f.csv", content, tokenizer=TOKENIZER))
    counted = [(len(tokenizer.encode(str(text)).ids), most, at) for text, most, at in found]
    assert [(*each[:2], round(float(str(each[2])), 6)) for each in counted] == expected


async def test_answers_of_sharegpt_give_lengths(tmp_path: Path, tokenizer: Tokenizer) -> None:
    talks = [
        {"id": "1", "conversations": [{"from": "human", "value": "Hi"}]},
        {
            "id": "2",
            "conversations": [
                {"from": "human", "value": "Why?"},
                {"from": "gpt", "value": "def load(path): return open(path)"},
                {"from": "human", "value": "More"},
            ],
        },
    ]
    expected = len(tokenizer.encode("def load(path): return open(path)").ids)
    content = json.dumps(talks)
    plans = await read(tmp_path / "f.json", content, tokenizer=TOKENIZER)
    assert told(plans) == [("Why?", expected, None)]
    with pytest.raises(InvalidRequest, match=r"f\.json: \[1\].*--output-tokens or --tokenizer"):
        await read(tmp_path / "f.json", content)


async def test_samples_of_gpt_manager_benchmark(tmp_path: Path) -> None:
    samples = [
        {"input_len": 2, "input_ids": [5, 6], "output_len": 8, "task_id": -1},
        {"input_len": 1, "input_ids": [7], "output_len": 9, "task_id": 4},
    ]
    content = json.dumps({"metadata": {"workload_name": "w"}, "samples": samples})
    prompts = [plan.prompts[0] for plan in await read(tmp_path / "f.json", content)]
    assert [(p.ids, p.max_tokens, p.adapter) for p in prompts] == [((5, 6), 8, ""), ((7,), 9, "4")]


async def test_prompts_of_vllm_and_of_lines(tmp_path: Path) -> None:
    custom = await read(tmp_path / "f.jsonl", lines({"prompt": "a", "output_tokens": 4}))
    assert told(custom) == [("a", 4, None)]
    by_line = await read(tmp_path / "f.txt", "one\n\n two \nthree\n", output_tokens="3", requests=2)
    assert told(by_line) == [("one", 3, None), ("two", 3, None)]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("f.jsonl", lines({"text": "a", "output_length": 1}) + "{", "f.jsonl:2.*is not JSON"),
        ("f.jsonl", lines({"text": "a", "image": "x"}), "f.jsonl:1: image"),
        ("f.jsonl", lines({"text": ""}), "f.jsonl:1: text"),
        ("f.jsonl", lines({"text": "a", "output_length": 2**21}), "f.jsonl:1: output_length"),
        ("f.jsonl", lines({"text": "a", "timestamp": 1e300}), "f.jsonl:1: timestamp"),
        ("f.jsonl", lines({"text": "a"}), "f.jsonl:1.*--output-tokens"),
        ("f.jsonl", lines(["a"]), "f.jsonl:1.*turns, text, prompt, input_length"),
        ("f.jsonl", lines({"input_length": 5, "output_length": 1}), "f.jsonl:1: timestamp"),
        ("f.jsonl", lines({"timestamp": 1, "input_length": 5, "output_length": None}), "f.jsonl:1.*no length"),
        ("f.jsonl", "\n", "has no requests"),
        ("f.csv", "A,B\n1,2\n", "f.csv:1.*A, B.*neither BurstGPT's"),
        ("f.csv", AZURE + "2023-11-16 18:17:05,x,1\n", "f.csv:4: ContextTokens"),
        ("f.csv", AZURE + "2023-11-16\n", "f.csv:4: ContextTokens"),
        ("f.json", '{"samples": [{"input_ids": [1], "input_len": 2, "output_len": 1}]}', r"samples\[0\]"),
        ("f.json", "3", "must be a list of conversations"),
        ("f.txt", "a\n", "--output-tokens"),
        ("f.yaml", "a", "must end in one of"),
    ],
)  # fmt: skip
async def test_errors_name_file_and_line(
    name: str, content: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        await read(tmp_path / name, content)


async def test_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"none\.jsonl.*No such file"):
        await WorkloadOptions(workload=tmp_path / "none.jsonl").plans(seed=1)


async def test_lines_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtmesh.tools.records.MOST_LINE_BYTES", 40)
    content = lines({"text": "a", "output_length": 1}, {"text": "b" * 40, "output_length": 1})
    with pytest.raises(InvalidRequest, match=r"f\.jsonl:2.*longer than 40 bytes"):
        await read(tmp_path / "f.jsonl", content)


async def test_drawn_prompts_have_their_lengths_and_repeat(tokenizer: Tokenizer) -> None:
    options = WorkloadOptions(
        requests=40, input_tokens="20..30", output_tokens="50±20", tokenizer=TOKENIZER
    )
    plans = await options.plans(seed=3)
    lengths = [len(tokenizer.encode(plan.prompts[0].text or "").ids) for plan in plans]
    assert min(lengths) >= 20
    assert max(lengths) <= 30
    assert len(set(lengths)) > 5
    assert len({plan.prompts[0].text for plan in plans}) == 40
    assert all(plan.prompts[0].ignore_end_id for plan in plans)
    assert await options.plans(seed=3) == plans
    assert await options.plans(seed=4) != plans


async def test_groups_share_a_beginning_and_sessions_have_turns(tokenizer: Tokenizer) -> None:
    options = WorkloadOptions(
        requests=30,
        input_tokens="8",
        prefix_groups=2,
        prefix_tokens=40,
        turns=3,
        tokenizer=TOKENIZER,
    )
    plans = await options.plans(seed=1)
    ids = [tuple(tokenizer.encode(plan.prompts[0].text or "").ids) for plan in plans]
    assert [len(each) for each in ids] == [48, 8, 8] * 10
    assert len({each[:40] for each in ids[::3]}) == 2
    assert [plan.turn for plan in plans] == [0, 1, 2] * 10
    assert [*Counter(plan.session for plan in plans).values()] == [3] * 10


async def test_adapters_are_drawn_by_zipf_one_a_session(tmp_path: Path) -> None:
    options = WorkloadOptions(requests=3000, turns=3, adapter=["a", "b", "c"], adapter_skew=1.0)
    plans = await options.plans(seed=1)
    of_session = {(plan.session, plan.prompts[0].adapter) for plan in plans}
    assert len(of_session) == 1000
    counts = Counter(adapter for _, adapter in of_session)
    # Shares of 6, 3 and 2 elevenths.
    assert counts["a"] == pytest.approx(545, abs=50)
    assert counts["b"] == pytest.approx(273, abs=50)
    equal = await WorkloadOptions(requests=3000, adapter=["a", "b"], adapter_skew=0.0).plans(seed=1)
    assert Counter(p.prompts[0].adapter for p in equal)["a"] == pytest.approx(1500, abs=150)


async def test_schemas_are_given_in_turn(tmp_path: Path) -> None:
    file = tmp_path / "schemas.jsonl"
    file.write_text('{"type": "object"}\n\n{"type": "array"}\n')
    plans = await WorkloadOptions(requests=3, json_schema=f"@{file}").plans(seed=1)
    first, second = '{"type":"object"}', '{"type":"array"}'
    assert [plan.prompts[0].json_schema for plan in plans] == [first, second, first]
    file.write_text('{"type": "object"}\n3\n')
    with pytest.raises(InvalidRequest, match=r"schemas\.jsonl:2.*no schema"):
        await WorkloadOptions(requests=3, json_schema=f"@{file}").plans(seed=1)
    with pytest.raises(SettingsError, match="must be @FILE"):
        await WorkloadOptions(json_schema="x").plans(seed=1)


async def test_options_of_drawn_prompts_are_refused_beside_a_file(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--turns"):
        await WorkloadOptions(workload=tmp_path / "f.jsonl", turns=2).plans(seed=1)


@pytest.mark.parametrize(
    ("text", "least", "mean", "most"),
    [
        ("200", 200, 200, 200),
        ("100..300", 100, 200, 300),
        ("200±50", 1, 200, 500),
        ("200 +- 50", 1, 200, 500),
        ("lognormal:200±150", 1, 200, 4000),
        ("5±20", 1, 11.1, 120),
    ],
)
def test_lengths_follow_their_distribution(text: str, least: int, mean: float, most: int) -> None:
    lengths, draw = read_lengths(text, "--input-tokens"), Random(1)
    drawn = [lengths.draw(draw) for _ in range(20_000)]
    assert least <= min(drawn)
    assert max(drawn) <= most
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.03)


@pytest.mark.parametrize(
    "text", ["", "x", "0", "5..2", f"{MOST_TOKENS + 1}", "-3", "200±", "normal:3"]
)
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="--input-tokens"):
        read_lengths(text, "--input-tokens")


async def test_tokenizer_that_splits_every_word_is_refused() -> None:
    async def letters(texts: Sequence[str]) -> list[int]:
        return list(map(len, texts))

    with pytest.raises(InvalidRequest, match=r"0 of \d+ common words.*--tokenizer"):
        await one_token_words(letters)


async def test_special_tokens_belong_to_the_length() -> None:
    async def with_begin(texts: Sequence[str]) -> list[int]:
        return [1 + len(text.split()) for text in texts]

    options = WorkloadOptions(requests=2, input_tokens="9")
    plans = await options.plans(seed=1, count=with_begin)
    assert [len((plan.prompts[0].text or "").split()) for plan in plans] == [8, 8]


def test_wrong_tokenizers_are_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--tokenizer is .*, but must be a tokenizer\.json"):
        local_tokenizer(tmp_path)
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{")
    with pytest.raises(SettingsError, match="is not a usable tokenizer"):
        local_tokenizer(broken)


@pytest.mark.parametrize("name", ["other.json", "nonexistent.json", "no-such-folder", "tokenizer"])
def test_no_other_tokenizer_is_taken_than_the_named_one(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((TOKENIZER / "tokenizer.json").read_bytes())
    (tmp_path / "other.json").write_text("{}")
    local_tokenizer(tmp_path)
    local_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(SettingsError, match="must be a tokenizer"):
        local_tokenizer(tmp_path / name)
