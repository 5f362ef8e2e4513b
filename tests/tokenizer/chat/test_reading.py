"""Answers are read as transformers reads them, however the text comes, in a process that no template outlives."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from forked_children import fork_children
from forks import fork_server
from tokenizer.chat.response_templates import COMMON, GEMMA, HARMONY, PIECES, QWEN, QWEN_CODER
from tokenizer.serving import served
from tokenizer.tokenizers_zoo import byte_level_bpe, save_model_dir
from transformers.utils.chat_parsing import parse_response
from trtmesh.chassis.errors import InternalError, InvalidField, ModelUnusable
from trtmesh.chassis.service import Runtime
from trtmesh.tokenizer.chat.answers import TemplateReader
from trtmesh.tokenizer.service import TokenizerService
from trtmesh.tokenizer.settings import TokenizerSettings
from trtmesh.v1 import tokenizer_pb2 as pb

pytestmark = pytest.mark.slow

TEXTS = 40
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]


PROGRAM = "trtmesh.tokenizer.chat.reading"


@pytest.fixture(autouse=True)
def processes_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their imports take more than a second."""
    fork_server((PROGRAM,)).wait_ready()
    # To be as they are after the test.
    for place, name in ((subprocess.Popen, "_execute_child"), (os, "waitpid")):
        monkeypatch.setattr(place, name, getattr(place, name))
    fork_children((PROGRAM,))


@asynccontextmanager
async def reading(template: Any) -> AsyncIterator[TemplateReader]:
    reader = TemplateReader(template, 2**20)
    try:
        yield reader
    finally:
        await reader.close()


async def parts(
    reader: TemplateReader, text: str, prompt: str = "", cuts: Iterable[int] = ()
) -> list[tuple[str, Any]]:
    """The parts of an answer that comes in pieces; neighbouring texts of a kind are one part."""
    places = [0, *sorted(cuts), len(text)]
    told: list[tuple[str, Any]] = []
    state = ""
    for number, (start, end) in enumerate(pairwise(places)):
        read = await reader.read(
            pb.AnswerText(
                text=text[start:end],
                is_end=number == len(places) - 2,
                state=state,
                prompt_end="" if state else prompt,
                tools=json.dumps(TOOLS),
            )
        )
        state = read.state
        for part in read.parts:
            kind = str(part.WhichOneof("part"))
            if kind == "call":
                told.append((kind, (part.call.name, json.loads(part.call.arguments))))
            elif told and told[-1][0] == kind:
                told[-1] = kind, told[-1][1] + getattr(part, kind)
            else:
                told.append((kind, getattr(part, kind)))
    return told


def as_message(told: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for kind, value in told:
        if kind == "call":
            message["calls"].append(value)
        else:
            message[kind] += value
    return message


@pytest.mark.parametrize("name", PIECES)
async def test_parts_do_not_depend_on_how_the_text_comes(name: str) -> None:
    template, prompts, pieces = PIECES[name]
    random_ = random.Random(36)
    compared = 0
    async with reading(template) as reader:
        for _ in range(TEXTS):
            text = "".join(random_.choices(pieces + COMMON, k=random_.randint(1, 7)))
            prompt = f"Some talk.{random_.choice(prompts)}"
            whole = await parts(reader, text, prompt)
            assert await parts(reader, text, prompt, range(1, len(text))) == whole, text
            cuts = random_.choices(range(len(text)), k=3)
            assert await parts(reader, text, prompt, cuts) == whole, text
            try:
                theirs = parse_response(text, template, prefix=prompt, tools=TOOLS)
            except ValueError:
                # Calls with a mistake are content here.
                continue
            functions = [each["function"] for each in theirs.get("tool_calls", ())]
            calls = [(each["name"], each["arguments"]) for each in functions]
            if all(isinstance(arguments, dict) for _, arguments in calls):
                compared += 1
                told = as_message(whole)
                assert told["calls"] == calls, text
                # Of several texts of a kind transformers keeps the last.
                assert told["content"].endswith(theirs.get("content", "")), text
                reasoning = theirs.get("reasoning_content", theirs.get("thinking", ""))
                assert told["reasoning"].endswith(reasoning), text
    assert compared > TEXTS // 4


REAL: list[tuple[Any, str, str, list[tuple[str, Any]]]] = [
    (
        GEMMA,
        "<|turn>model\n",
        "<|channel>thought\nHm.\n<channel|>Well. <|tool_call>call:get{a:1}<tool_call|><turn|>",
        [("reasoning", "Hm."), ("content", "Well."), ("call", ("get", {"a": 1}))],
    ),
    (
        GEMMA,
        "<|turn>model\n",
        "<|tool_call>call:get{a:}<tool_call|>So.",
        [("content", "<|tool_call>call:get{a:}<tool_call|>So.")],
    ),
    (
        GEMMA,
        "<|turn>model\n",
        "<|tool_call>call:get[1]<tool_call|>",
        [("content", "<|tool_call>call:get[1]<tool_call|>")],
    ),
    (
        GEMMA,
        "<|turn>model\n",
        "<|tool_call>call:get{a:1",
        [("content", "<|tool_call>call:get{a:1")],
    ),
    (GEMMA, "Begin: one", " two", [("content", "two")]),
    (GEMMA, "<|turn>model\none", " two <turn|>", [("content", " two")]),
    (
        QWEN_CODER,
        "<|im_start|>assistant\n<think>\n",
        (
            "Hm.</think>\n\n<tool_call>\n<function=get>\n<parameter=a>\n7\n</parameter>\n"
            "<parameter=b>\n7\n</parameter>\n</function>\n</tool_call><|im_end|>"
        ),
        [("reasoning", "Hm."), ("call", ("get", {"a": 7, "b": "7"}))],
    ),
    (
        HARMONY,
        "<|start|>assistant",
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.get <|constrain|>json<|message|>{"a": 1}<|call|>'
        ),
        [("reasoning", "Hm."), ("call", ("get", {"a": 1}))],
    ),
    (
        QWEN,
        "<|im_start|>assistant\n",
        '<tool_call>{"name": "get", "arguments": {"a": 1}}</tool_call><|im_end|>',
        [("call", ("get", {"a": 1}))],
    ),
    *(
        # Half of a surrogate pair is no text.
        (QWEN, "<|im_start|>assistant\n", call, [("content", call)])
        for call in (
            r'<tool_call>{"name": "\ud83d", "arguments": {}}</tool_call>',
            r'<tool_call>{"name": "get", "arguments": {"a": "\ud83d"}}</tool_call>',
        )
    ),
]


@pytest.mark.parametrize(("template", "prompt", "text", "told"), REAL)
async def test_answers_of_models(
    template: Any, prompt: str, text: str, told: list[tuple[str, Any]]
) -> None:
    async with reading(template) as reader:
        for cuts in (range(0), range(1, len(text))):
            assert await parts(reader, text, prompt, cuts) == told


async def test_template_harms_its_own_answers_alone() -> None:
    endless = {
        "start_anchor": "a",
        "fields": {"content": {"open": "b", "close_pattern": "(?:a|a)+[bc]"}},
    }
    async with reading(endless) as reader:
        with pytest.raises(InternalError, match="more than 2 s of CPU time"):
            await reader.read(pb.AnswerText(text="b" + "a" * 50 + "d"))
        assert await parts(reader, "bdac") == [("content", "d")]
        with pytest.raises(InternalError, match="response_template of the model failed"):
            await reader.read(pb.AnswerText(text="x", state="{}x"))
        with pytest.raises(InvalidField, match="at most 1048576"):
            await reader.read(pb.AnswerText(text="x" * 2**20))
    async with reading(None) as reader:
        with pytest.raises(InvalidField, match="which the model lacks"):
            await reader.read(pb.AnswerText(text="x"))


async def test_another_process_reads_on() -> None:
    async with reading(GEMMA) as reader:
        first = await reader.read(pb.AnswerText(text="<|channel>thought\nOne "))
        process = reader._program._process
        assert process is not None
        process.kill()
        await process.wait()
        rest = pb.AnswerText(text=" two.<channel|>Three.", is_end=True, state=first.state)
        told = [part for read in (first, await reader.read(rest)) for part in read.parts]
        assert "".join(part.reasoning for part in told) == "One  two."
        assert told[-1].content == "Three."


async def test_model_says_how_it_is_read(tmp_path: Path) -> None:
    directory = save_model_dir(byte_level_bpe(), tmp_path)
    file = directory / "tokenizer_config.json"
    config = json.loads(file.read_text())
    cases: list[tuple[Any, dict[str, Any], str | None]] = [
        (None, {}, "none"),
        (GEMMA, {}, "response_template"),
        (GEMMA, {"tool_format": "hermes"}, "hermes"),
        ({"fields": {}}, {}, "none"),
        ({"fields": {}}, {"tool_format": "response_template"}, None),
        (None, {"tool_format": "response_template"}, None),
    ]
    for template, settings, expected in cases:
        file.write_text(json.dumps(config | {"response_template": template}))
        if expected is None:
            with pytest.raises(ModelUnusable, match="tool_format response_template"):
                await TokenizerService(
                    TokenizerSettings.model_validate({"model_dir": directory, **settings}),
                    Runtime(),
                ).start()
            continue
        async with served(directory, **settings) as server:
            assert (
                await server.stub.GetTokenizer(pb.GetTokenizerRequest())
            ).tool_format == expected
