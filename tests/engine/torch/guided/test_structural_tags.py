"""Structural tags in xgrammar's notation: what xgrammar 0.2.8 accepts of these texts is followed, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from e2e.mesh import DEMO
from tokenizers import Tokenizer
from trtmesh.chassis.errors import InvalidField
from trtmesh.chassis.vocabulary import GuidedDecoding
from trtmesh.engine.backends.torch.guided import guidance
from trtmesh.engine.backends.torch.guided.grammars import Matcher
from trtmesh.engine.backends.torch.guided.guidance import GuidanceCompiler, compiler_for
from trtmesh.engine.backends.torch.guided.structural_tags import Readers, tag_grammar
from trtmesh.v1 import generation_pb2 as pb

pytestmark = pytest.mark.slow

Format = dict[str, Any]


def form(kind: str, **members: Any) -> Format:
    return {"type": kind, **members}


def tag(begin: str, content: Format, end: Any = "</f>") -> Format:
    return form("tag", begin=begin, content=content, end=end)


DIGITS = form("regex", pattern="[0-9]+")
ANY = form("any_text")
SEVEN = form("json_schema", json_schema={"type": "object", "properties": {"a": {"const": 7}}})
A, B = tag("<f=a>", DIGITS), tag("<f=b>", SEVEN)
TRIGGERED = form("triggered_tags", triggers=["<f="], tags=[A, B])
SEPARATED = form("tags_with_separator", tags=[A, B], separator=", ")
TOKEN = form("token", token="<|reserved_0|>")
CALLED = form("tag", begin=TOKEN, content=DIGITS, end=";")
BY_TOKEN = form("token_triggered_tags", trigger_tokens=["<|reserved_0|>"], tags=[CALLED])
BALANCED = 'root ::= "x" | "(" root ")"'

CASES: list[tuple[Format, list[str], list[str]]] = [
    (form("const_string", value='a"b/c\n'), ['a"b/c\n'], ["", "a"]),
    (DIGITS, ["1", "12"], ["", "a"]),
    (form("regex", pattern="a/b|c\n"), ["a/b", "c\n"], ["a", "c"]),
    (SEVEN, ['{"a":7}', '{"a": 7}', "{}"], ['{"a":8}', ""]),
    (form("json_schema", json_schema=True, style="json"), ["[1]", "null"], ["", "{"]),
    (ANY, ["", "any\ntext"], []),
    (form("any_text", excludes=["no", "</"]), ["", "n<o/"], ["no", "a</b"]),
    (form("grammar", grammar=BALANCED), ["x", "((x))"], ["((x)", ""]),
    (form("sequence", elements=[form("const_string", value="a"), DIGITS, ANY]),
     ["a1", "a1 text"], ["a", "1"]),
    (form("sequence", elements=[form("regex", pattern=""), DIGITS]), ["1"], [""]),
    (form("sequence", elements=[form("regex", pattern="a*"), form("const_string", value="ab")]),
     ["ab", "aaaab"], ["b", "aa"]),
    (form("or", elements=[DIGITS, SEVEN, form("const_string", value="no")]),
     ["5", "{}", "no"], ["5no", ""]),
    (form("sequence", elements=[form("optional", content=DIGITS), form("star", content=A)]),
     ["", "5", "5<f=a>1</f><f=a>2</f>"], ["<f=a>1"]),
    (form("plus", content=B), ["<f=b>{}</f>", "<f=b>{}</f><f=b>{}</f>"], [""]),
    (form("repeat", content=SEVEN, min=2, max=3), ["{}{}", "{}{}{}"], ["{}", "{}{}{}{}"]),
    (form("repeat", content=DIGITS, min=0, max=-1), ["", "123"], ["a"]),
    (tag("<t>", ANY, ["</t>", "</u>"]), ["<t></t>", "<t>a < b</u>"], ["<t>a</t></t>", "<t>a"]),
    (tag("<t>", form("grammar", grammar=BALANCED)), ["<t>(x)</f>"], ["<t>(x</f>"]),
    (tag("<t>", ANY, ""), ["<t>", "<t>and so on"], ["", "t"]),
    (TRIGGERED, ["", "hi", "x<f=a>1</f>", "<f=a>1</f>y<f=b>{}</f>z"], ["x<f=c", "<f=a>1"]),
    (TRIGGERED | {"at_least_one": True}, ["<f=a>1</f>", "<f=a>1</f>y<f=b>{}</f>"],
     ["", "x<f=a>1</f>"]),
    (TRIGGERED | {"stop_after_first": True}, ["", "hi", "x<f=a>1</f>"], ["<f=a>1</f>y"]),
    (TRIGGERED | {"at_least_one": True, "stop_after_first": True}, ["<f=b>{}</f>"],
     ["", "<f=b>{}</f>y", "x<f=b>{}</f>"]),
    (TRIGGERED | {"excludes": ["bad"]}, ["ok<f=a>1</f>ba"], ["bad", "<f=a>1</f>bad"]),
    (tag("<t>", TRIGGERED, "</t>"), ["<t></t>", "<t>q<f=a>2</f>z</t>"], ["<t>q", "<t>q</t>z"]),
    (form("sequence", elements=[tag("<think>", ANY, "</think>"), TRIGGERED]),
     ["<think>hm</think>", "<think>hm</think>x<f=a>1</f>"], ["x", "<think>x<f=a>1</f>"]),
    (SEPARATED | {"separator": ""}, ["", "<f=a>1</f><f=b>{}</f>"], ["<f=a>1</f>, <f=b>{}</f>"]),
    (form("sequence", elements=[tag("", ANY, "!")] * 5 + [SEPARATED]),
     ["!!!!!", "a!<!!b!!<f=a>1</f>"], ["!!!!", "!!!!!b"]),
    (SEPARATED, ["", "<f=a>1</f>", "<f=a>1</f>, <f=b>{}</f>"], ["<f=a>1</f>, ", "<f=a>1</f>x"]),
    (SEPARATED | {"at_least_one": True, "stop_after_first": True}, ["<f=a>1</f>"],
     ["", "<f=a>1</f>, <f=a>1</f>"]),
    (TOKEN, ["<|reserved_0|>"], ["", "<|reserved_1|>"]),
    (BY_TOKEN, ["", "hi", "<|reserved_0|>1;", "x<|reserved_0|>1;y<|reserved_0|>2;z"],
     ["x<|reserved_0|>a;", "x<|reserved_0|>1", "x<|reserved_1|>"]),
    (BY_TOKEN | {"stop_after_first": True}, ["", "x<|reserved_0|>1;"], ["<|reserved_0|>1;y"]),
    (tag("<t>", BY_TOKEN, "</t>"), ["<t></t>", "<t>q<|reserved_0|>2;z</t>"],
     ["<t>q", "<t>q</t>z"]),
    (form("tags_with_separator", tags=[CALLED], separator=""),
     ["", "<|reserved_0|>1;<|reserved_0|>2;"], ["1;"]),
]  # fmt: skip


@pytest.fixture(scope="module")
def compiler() -> GuidanceCompiler:
    found = compiler_for(DEMO, 6144, [0])
    assert found
    return found


def compiled(compiler: GuidanceCompiler, value: Format) -> Matcher:
    guide = json.dumps({"type": "structural_tag", "format": value})
    return compiler(GuidedDecoding(pb.GUIDE_TYPE_STRUCTURAL_TAG, guide))


@pytest.mark.parametrize(
    ("value", "whole", "other"), CASES, ids=[str(n) for n in range(len(CASES))]
)
def test_texts_of_a_format(
    value: Format, whole: list[str], other: list[str], compiler: GuidanceCompiler
) -> None:
    start, tokenizer = compiled(compiler, value), Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    for text in (*whole, *other):
        place, ids = start.copy(), tokenizer.encode(text).ids
        fits = place.accept(ids) == len(ids) and place.may_end
        assert fits == (text in whole), text


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (form("any_tokens"), "at /format/type must be one of const_string, "),
        (form("token", token="<|tool|>"), "at /format/token is no special token"),
        (
            BY_TOKEN | {"trigger_tokens": ["<|reserved_1|>"]},
            "at /format/tags/0/begin is none of the trigger tokens",
        ),
        (form("sequence", elements=[ANY, DIGITS]), "at /format/elements/0 has no end"),
        (form("star", content=ANY), "at /format/content has no end"),
        (form("sequence", elements=[]), "at /format/elements is empty"),
        (form("regex"), "at /format/pattern is missing"),
        (form("regex", pattern="(a"), "unclosed group"),
        (form("any_text", max_tokens=5), "at /format/max_tokens is missing, or not taken"),
        (SEVEN | {"style": "qwen_xml"}, "at /format/style is missing, or not taken"),
        (DIGITS | {"colour": "red"}, "at /format/colour is not known"),
        (
            form("or", elements=[A, tag("<t>", SEVEN | {"json_schema": {"items": {"x": 1,
             "uniqueItems": True}}})]),
            "at /format/elements/1/content/json_schema/items cannot be followed: Unimplemented",
        ),
        (
            tag("<t>", SEVEN | {"json_schema": {"items": {"minProperties": 2}}}),
            "at /format/content/json_schema/items/minProperties asks",
        ),
        (tag("<t>", SEVEN | {"json_schema": False}), "/content/json_schema allows nothing"),
        (form("tag", begin={"type": "token", "token": 5}, content=ANY, end=""), "at /format/begin"),
        (TRIGGERED | {"triggers": ["<f=", "<g="]}, "at /format/triggers/1 begins no structure"),
        (TRIGGERED | {"triggers": ["<f=a"]}, "at /format/tags/1/begin starts with none"),
        (TRIGGERED | {"tags": [ANY]}, "at /format/tags/0 must be a tag"),
        (form("grammar", grammar="start: %json {}"), "%json"),
        (form("repeat", content=DIGITS, min=2, max=1), "at /format must have 0 <= min <= max"),
        (TRIGGERED | {"excludes": ["x"] * 33}, "at /format/excludes has more than 32 texts"),
        (TRIGGERED | {"triggers": ["<f="] * 33}, "at /format/triggers has more than 32 texts"),
        (tag("<t>", ANY, ["x"] * 33), "at /format/end has more than 32 texts"),
    ],
    ids=str,
)  # fmt: skip
def test_format_that_cannot_be_followed_is_refused_with_its_path(
    value: Format, words: str, compiler: GuidanceCompiler
) -> None:
    with pytest.raises(InvalidField) as refused:
        compiled(compiler, value)
    assert words in refused.value.problem


def separated(depth: int) -> Format:
    content = separated(depth - 1) if depth else form("const_string", value="a" * 50)
    return form("tags_with_separator", tags=[tag("", content, "")], separator=",")


@pytest.mark.parametrize(
    "of_size",
    [
        separated,
        lambda size: form(
            "triggered_tags",
            triggers=[f"<{number}>" for number in range(2 * size)],
            tags=[tag(f"<{number}>", DIGITS) for number in range(2 * size)],
        ),
    ],
    ids=["separators", "triggers"],
)
def test_grammar_grows_with_its_tag_and_no_faster(of_size: Callable[[int], Format]) -> None:
    def size(number: int) -> int:
        guide = json.dumps({"type": "structural_tag", "format": of_size(number)})
        readers = Readers({}, str, lambda pattern: f"/{pattern}/", lambda _: None)
        return len(tag_grammar(guide, readers).text)

    assert size(16) < 2.5 * size(8)


def test_large_tag_is_tried_first_and_once(
    compiler: GuidanceCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No part of a tag refers to itself, but thousands may take seconds together."""
    small, large = (form("or", elements=[form("const_string", value="a")] * n) for n in (200, 2000))
    problems = ["it takes long", ""]
    monkeypatch.setattr(guidance, "problem_of_trial", lambda _grammar, _check: problems.pop(0))
    compiled(compiler, small)
    with pytest.raises(InvalidField, match="cannot be followed: it takes long"):
        compiled(compiler, large)
    for _ in range(3):
        compiled(compiler, large)
    assert not problems
