"""What a model says, from a text in any pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trtmesh.router.doors.openai.answer_parser import AnswerParser, Reading
from trtmesh.router.doors.openai.answer_parts import (
    AnswerPart,
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Reasoning,
)
from trtmesh.router.doors.openai.call_formats import FORMATS, CallFormat

TOOLS = frozenset({"get", "get_all"})
READINGS = [
    Reading(reasons, is_thinking, formats, TOOLS, is_guided)
    for reasons, is_thinking in ((False, False), (True, False), (True, True))
    for formats in ((), *FORMATS.values())
    for is_guided in (False, True)
]
PIECES = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]"),
    *(
        '{"name": "get", "arguments": ',
        '{"name": "get_all", "parameters": ',
        "get[ARGS]",
        "get_all",
    ),
    *('{"a": "}{<tool_call>"}', '{"a": [1, {}]}', "{}", "{", "}", "[", "]", ", ", "; ", '"', "\\"),
    *("<", "\n", " ", "Well", "é🙂", "[CALL_ID]abc", "\x1c", "name", '{"name": "no"}'),
    *("<|eot_id|>", "</s>", "</"),
)


def told(reading: Reading, pieces: Iterable[str]) -> list[AnswerPart]:
    """What is said, with neighbours of a kind as one."""
    parser = AnswerParser(reading)
    said = [each for piece in pieces for each in parser.feed(piece)]
    merged: list[AnswerPart] = []
    for each in [*said, *parser.end()]:
        last = merged[-1] if merged else None
        texts = (Content, Reasoning, CallArguments)
        if isinstance(each, texts) and isinstance(last, texts) and type(last) is type(each):
            merged[-1] = replace(each, text=last.text + each.text)
        else:
            merged.append(each)
    assert parser.calls == sum(isinstance(each, CallBegun) for each in merged)
    return merged


def call(index: int, name: str, arguments: Any) -> list[AnswerPart]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return [CallBegun(index, name), CallArguments(index, text), CallEnded(index)]


HERMES, LLAMA, MISTRAL = (FORMATS[name] for name in ("hermes", "llama3_json", "mistral"))
QWEN3 = Reading(reasons=True, formats=HERMES, tools=TOOLS)
R1 = Reading(reasons=True, is_thinking=True)
LLAMA3 = Reading(formats=LLAMA, tools=TOOLS)
NEMO = Reading(formats=MISTRAL, tools=TOOLS)
REAL: Sequence[tuple[str, Reading, str, list[AnswerPart]]] = [
    (
        "Qwen3 thinks, then calls twice",
        QWEN3,
        (
            "<think>\nOkay, the weather. I need <get>.\n</think>\n\n"
            '<tool_call>\n{"name": "get", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "get_all", "arguments": {}}\n</tool_call>'
        ),
        [
            Reasoning("Okay, the weather. I need <get>."),
            *call(0, "get", {"city": "Zürich"}),
            *call(1, "get_all", {}),
        ],
    ),
    (
        "Qwen3 was told not to think",
        QWEN3,
        (
            "Let me look.\n<tool_call>\n"
            '{"arguments": {"x": "</tool_call>"}, "name": "get"}\n</tool_call>\nDone.'
        ),
        [Content("Let me look."), *call(0, "get", {"x": "</tool_call>"}), Content("Done.")],
    ),
    ("a call has arguments", QWEN3, '<tool_call>{"name": "get"}', []),
    (
        "arguments as text",
        QWEN3,
        '<tool_call>{"name": "get", "arguments": "{\\"a\\": 1}"}</tool_call> ',
        call(0, "get", {"a": 1}),
    ),
    (
        "bad JSON, then good",
        QWEN3,
        '<tool_call>\n{"name": get}\n</tool_call>\n<tool_call>{"name":"get","arguments":{}}',
        [Content('<tool_call>\n{"name": get}\n</tool_call>'), *call(0, "get", {})],
    ),
    (
        "half of a surrogate pair is no name",
        QWEN3,
        r'<tool_call>{"name": "\ud83d", "arguments": {}}</tool_call>',
        [],
    ),
    (
        "unfinished JSON",
        QWEN3,
        'Hm.\n<tool_call>\n{"name": "get", "arguments": {"a',
        [Content('Hm.\n<tool_call>\n{"name": "get", "arguments": {"a')],
    ),
    (
        "R1 after a prompt that has begun the thoughts",
        R1,
        "Let me see.\n</think>\n\nThe answer is 4.",
        [Reasoning("Let me see."), Content("The answer is 4.")],
    ),
    ("R1 says the mark again", R1, "<think>\nYes.</think>No.", [Reasoning("Yes."), Content("No.")]),
    ("R1 is cut off", R1, "Let me", [Reasoning("Let me")]),
    (
        "Llama 3.1",
        LLAMA3,
        '{"name": "get", "parameters": {"city": "Bern"}}; {"name": "get_all", "parameters": {}}',
        [*call(0, "get", {"city": "Bern"}), *call(1, "get_all", {})],
    ),
    (
        "Llama 3.1 with a tag",
        LLAMA3,
        'Sure.<|python_tag|>{"name": "other", "parameters": {"a": 1}}',
        [Content("Sure."), *call(0, "other", {"a": 1})],
    ),
    (
        "Llama answers in JSON",
        LLAMA3,
        '{"name": "Bern", "parameters": {}}',
        [Content('{"name": "Bern", "parameters": {}}')],
    ),
    (
        "Mistral up to v3",
        NEMO,
        '[TOOL_CALLS] [{"name": "get", "arguments": {"a": "]"}}, {"name": "get_all", "arguments": {}}]',
        [*call(0, "get", {"a": "]"}), *call(1, "get_all", {})],
    ),
    (
        "Mistral from v11",
        NEMO,
        'I look.[TOOL_CALLS]get[ARGS]{"a": 1}[TOOL_CALLS]get_all[CALL_ID]x12345678[ARGS]{}',
        [Content("I look."), *call(0, "get", {"a": 1}), *call(1, "get_all", {})],
    ),
    ("Mistral without a mark", NEMO, '[TOOL_CALLS]get{"a": 1}', call(0, "get", {"a": 1})),
    (
        "ends of answers",
        LLAMA3,
        'Hi <|eot_id|>{"name": "get", "parameters": {}}<|eom_id|>',
        [Content('Hi {"name": "get", "parameters": {}}')],
    ),
    (
        "the end of a call",
        LLAMA3,
        '{"name": "get", "parameters": {}}<|eom_id|>',
        call(0, "get", {}),
    ),
    ("the end of a call of Mistral", NEMO, "[TOOL_CALLS]get[ARGS]{}</s>", call(0, "get", {})),
    ("no call", NEMO, "[TOOL_CALLS]! {}", [Content("[TOOL_CALLS]! {}")]),
]


@pytest.mark.parametrize(
    ("reading", "text", "expected"), [each[1:] for each in REAL], ids=[each[0] for each in REAL]
)
def test_real_answers(reading: Reading, text: str, expected: list[AnswerPart]) -> None:
    expected = expected or [Content(text)]
    assert told(reading, [text]) == expected
    assert told(reading, text) == expected


@given(st.data())
def test_pieces_do_not_matter_and_nothing_is_lost(data: st.DataObject) -> None:
    reading = data.draw(st.sampled_from(READINGS))
    pieces = data.draw(st.lists(st.sampled_from(PIECES), max_size=24))
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    split = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = told(reading, [text])
    assert told(reading, split) == told(reading, text) == whole
    if all(isinstance(each, Content) for each in whole) and not reading.reasons:
        ends = reading.formats[0].ends if reading.formats else ()
        content = re.sub("|".join(map(re.escape, ends)), "", text) if ends else text
        assert "".join(each.text for each in whole if isinstance(each, Content)) == content
    for each in whole:
        if isinstance(each, CallArguments) and not reading.is_guided:
            assert isinstance(json.loads(each.text), dict)


@given(st.data())
def test_guided_calls_are_told_as_they_come(data: st.DataObject) -> None:
    """Each character that is an argument's for certain is told at once, and a text that is cut off anywhere says the
    beginning of what the whole says."""
    form = data.draw(st.sampled_from([formats[0] for formats in FORMATS.values()]))
    names = data.draw(st.lists(st.sampled_from(sorted(TOOLS)), min_size=1, max_size=3))
    values = st.recursive(
        st.none() | st.integers() | st.text(), lambda each: st.lists(each, max_size=3)
    )
    arguments = data.draw(
        st.lists(
            st.dictionaries(st.text(), values, max_size=3),
            min_size=len(names),
            max_size=len(names),
        )
    )
    texts = [json.dumps(each, ensure_ascii=False) for each in arguments]
    reading = Reading(formats=(form,), tools=TOOLS, is_guided=True, must_call=True)
    text = written(form, list(zip(names, texts, strict=True)))
    whole = [
        each
        for index, (name, arguments_) in enumerate(zip(names, texts, strict=True))
        for each in call(index, name, arguments_)
    ]
    assert told(reading, text) == told(reading, [text]) == whole
    parser = AnswerParser(reading)
    start = len(form.opening + form.head(names[0]))
    parser.feed(text[:start])
    for character in texts[0]:
        (piece, *_) = parser.feed(character)
        assert piece == CallArguments(0, character)
    for cut in range(len(text)):
        beginning = told(reading, [text[:cut]])
        for each, complete in zip(beginning, whole[: len(beginning)], strict=True):
            if isinstance(each, CallArguments) and isinstance(complete, CallArguments):
                assert complete.text.startswith(each.text)
            else:
                assert each == complete


def written(form: CallFormat, calls: Sequence[tuple[str, str]]) -> str:
    """Calls as a grammar has them."""
    told_ = [form.head(name) + arguments + form.tail for name, arguments in calls]
    if form.separator:
        return form.opening + form.separator.join(told_) + form.closing
    return form.between.join(form.opening + each + form.closing for each in told_)
