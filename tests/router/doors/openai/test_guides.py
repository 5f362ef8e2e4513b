"""What the grammars of tools let a model say."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from router.doors.openai.test_answer_parser import told, written
from trtmesh.chassis.errors import InvalidField
from trtmesh.engine.backends.torch.guided.structural_tags import Readers, tag_grammar
from trtmesh.router.doors.openai.answer_parser import Reading
from trtmesh.router.doors.openai.answer_parts import CallBegun, Content
from trtmesh.router.doors.openai.call_formats import FORMATS
from trtmesh.router.doors.openai.fields import Fields
from trtmesh.router.doors.openai.tools import guided, read_tools, reading_of
from trtmesh.v1 import generation_pb2 as pb

TOKENIZER = Path(__file__).parents[4] / "models" / "demo" / "tokenizer.json"
INTEGER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
GET = {"type": "function", "function": {"name": "get", "parameters": INTEGER}}
STRICT = {"type": "function", "function": {"name": "set", "parameters": INTEGER, "strict": True}}
CALL, OTHER, WRONG = ("get", '{"a": 1}'), ("set", '{"a": 2}'), ("get", '{"a": "x"}')


SPECIALS = ("[TOOL_CALLS]", "[ARGS]")


@cache
def plain_tokenizer() -> Any:
    """The demo model's."""
    from llguidance import LLTokenizer

    return LLTokenizer(TOKENIZER.read_text(encoding="utf-8"))


@cache
def tokenizer() -> Any:
    """The same, with Mistral's special tokens."""
    from llguidance import LLTokenizer

    told = json.loads(TOKENIZER.read_text(encoding="utf-8"))
    first = (
        max(*told["model"]["vocab"].values(), *(each["id"] for each in told["added_tokens"])) + 1
    )
    for token_id, name in enumerate(SPECIALS, first):
        told["added_tokens"].append({**told["added_tokens"][0], "id": token_id, "content": name})
    return LLTokenizer(json.dumps(told))


def id_of(name: str) -> int | None:
    return int(tokenizer().tokenize_str(name)[0]) if name in SPECIALS else None


def fits(guide: str, text: str, *, special: bool = False) -> bool:
    """Whether a text is whole under a guide; `special` says whether names of special tokens are such."""
    from llguidance import LLMatcher

    options = {"whitespace_flexible": True, "whitespace_pattern": "[ \n]{1,2}"}
    grammar = tag_grammar(guide, Readers(options, str, str, id_of))
    assert not grammar.is_ambiguous
    matcher = LLMatcher(tokenizer(), grammar.text, log_level=0)
    assert not matcher.get_error()
    ids = (tokenizer() if special else plain_tokenizer()).tokenize_str(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def guide_of(form: str, reading: Reading | None = None, kind: int = 0, **body: Any) -> str:
    use = read_tools(Fields({"tools": [GET, STRICT], **body}), form)
    config = pb.GuidedDecodingConfig(guide_type=pb.GuideType.ValueType(kind))
    assert guided(config, use, reading or reading_of(use, reasons=False)).is_guided
    return config.guide


@pytest.mark.parametrize("form", FORMATS)
def test_grammars_of_calls(form: str) -> None:
    def text(*calls: tuple[str, str]) -> str:
        return written(FORMATS[form][0], calls)

    named = {"type": "function", "function": {"name": "get"}}
    one, two = text(CALL), text(CALL, OTHER)
    free = [text(WRONG), "", "x", one, f"x {one}"]
    must = [
        (guide_of(form, tool_choice="required"), [one, two], ["", "x", text(WRONG), f"x{one}"]),
        (guide_of(form, tool_choice=named), [one], ["", two, text(OTHER)]),
    ]
    may = [
        (guide_of(form), free, [text(("set", "{}")), f"x {text(('set', '{}'))}"]),
        (guide_of(form, parallel_tool_calls=False), ["x", one], [f"{one} x", f"{one}{one}"]),
    ]
    if form == "llama3_json":
        with pytest.raises(InvalidField, match="does not go with tools"):
            guide_of(form, kind=pb.GUIDE_TYPE_JSON)
    else:
        guide = guide_of(form, kind=pb.GUIDE_TYPE_JSON)
        may.append((guide, ['{"b": 1}', one, two], ["", "x", f"{one}x"]))
    # A model that may call writes its special tokens; one that must call is held to any of their spellings.
    is_special = bool(FORMATS[form][0].specials)
    for cases, special in ((must, False), (may, is_special)):
        for guide, right, wrong in cases:
            for each in right:
                assert fits(guide, each, special=special), each
            for each in wrong:
                assert not fits(guide, each, special=special), each
    for guide, _, _ in may if is_special else ():
        # Spelled by other tokens, a call would be followed by no grammar.
        assert not fits(guide, one)
    reading = Reading(formats=FORMATS[form], tools=frozenset({"get", "set"}), is_guided=True)
    said = told(reading, [two])
    assert [each.name for each in said if isinstance(each, CallBegun)] == ["get", "set"]
    assert not [each for each in said if isinstance(each, Content)]


def test_grammars_let_a_model_reason_first() -> None:
    one = written(FORMATS["hermes"][0], [CALL])
    begun, free = Reading(reasons=True, is_thinking=True), Reading(reasons=True)
    for reading, right, wrong in (
        (begun, [f"Hm, <tool_call>.</think>\n\n{one}"], [one, f"{one}</think>"]),
        (free, [one, f"<think>Hm.</think>\n\n{one}"], [f"Hm.</think>\n\n{one}", f"Hm. {one}"]),
    ):
        guide = guide_of("hermes", reading, tool_choice="required")
        for each in right:
            assert fits(guide, each), each
        for each in wrong:
            assert not fits(guide, each), each
    config = pb.GuidedDecodingConfig(guide_type=pb.GUIDE_TYPE_CHOICE, guide='["yes", "no"]')
    assert not guided(config, None, begun).is_guided
    assert fits(config.guide, "Well.</think>\n\nyes")
    assert not fits(config.guide, "yes")
    assert json.loads(config.guide)["type"] == "structural_tag"
