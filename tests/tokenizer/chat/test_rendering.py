"""Conversations are rendered as transformers does, in a process that no template outlives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizer.chat.chat_templates import CHATML, DOCUMENTS, LLAMA_3, QWEN, TEMPLATES
from tokenizer.serving import Link, linked, served
from tokenizer.tokenizers_zoo import byte_level_bpe, ids_of, save_model_dir
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer
from trtmesh.chassis.errors import InvalidField, InvalidRequest
from trtmesh.tokenizer.chat import program
from trtmesh.tokenizer.chat import renderer as renderer_module
from trtmesh.tokenizer.chat.renderer import ChatRenderer
from trtmesh.tokenizer.chat.templates import ChatTemplates
from trtmesh.v1 import chat_pb2 as pb
from trtmesh.v1 import tokenizer_pb2

pytestmark = pytest.mark.slow

MOST_BYTES = 2**20
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": " Hi <b>&amp;</b> 'you' é🙂 "},
    {"role": "assistant", "content": "Hello.  ", "name": None, "tool_calls": None},
    {"role": "user", "content": "And\n\nnow?"},
]
CALLS = [
    TALK[0],
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": {"x": 1, "é": [2.5]}}}
        ],
    },
    {"role": "tool", "content": "42"},
]
REASONED = [TALK[0], {**TALK[1], "reasoning": "It greets."}, TALK[2]]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<>&é", "parameters": {}}}]


@asynccontextmanager
async def rendering(**by_name: str) -> AsyncIterator[ChatRenderer]:
    renderer = ChatRenderer(ChatTemplates(by_name, SPECIAL), MOST_BYTES)
    try:
        yield renderer
    finally:
        await renderer.close()


def chat(messages: Sequence[Any], **fields: Any) -> pb.Chat:
    texts = {
        name: json.dumps(value) for name, value in fields.items() if isinstance(value, (list, dict))
    }
    return pb.Chat(**{**fields, "messages": json.dumps(messages), **texts})


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokenizer adds a start of its own, which no template asked for."""
    tokenizer = byte_level_bpe()
    (start,) = ids_of(tokenizer, "<s>")
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    directory = save_model_dir(tokenizer, tmp_path_factory.mktemp("chat"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def save_template(model_dir: Path, template: str) -> Any:
    """Returns transformers' tokenizer with a template that the directory has too."""
    (model_dir / "chat_template.jinja").write_text(template)
    return AutoTokenizer.from_pretrained(model_dir)


@pytest.mark.parametrize("name", TEMPLATES)
async def test_ids_are_those_of_transformers(model_dir: Path, name: str) -> None:
    theirs = save_template(model_dir, TEMPLATES[name])
    async with served(model_dir) as server, linked(server.stub) as link:
        for number, (messages, fields) in enumerate(CASES):
            if name != "llama_3" or messages is not REASONED:
                expected = theirs.apply_chat_template(
                    messages, tokenize=True, return_dict=False, **_kwargs(fields)
                )
                answer = await encoded(link, number + 1, chat(messages, **fields))
                assert list(answer.token_ids) == expected, (name, number)
                text = theirs.decode(expected, skip_special_tokens=False)
                assert answer.text_end == text[-1024:]


CASES: list[tuple[list[Any], dict[str, Any]]] = [
    (TALK, {}),
    (TALK, {"add_generation_prompt": False}),
    (TALK[:2], {"continue_final_message": True}),
    (REASONED, {"template_kwargs": {"enable_thinking": False}}),
    (TALK[:1], {"tools": TOOLS}),
]


def _kwargs(fields: dict[str, Any]) -> dict[str, Any]:
    begins = fields.get("add_generation_prompt", not fields.get("continue_final_message"))
    more: dict[str, Any] = fields.get("template_kwargs", {})
    return (
        {k: v for k, v in fields.items() if k != "template_kwargs"}
        | more
        | {"add_generation_prompt": begins}
    )


async def encoded(link: Link, handle: int, asked: pb.Chat) -> tokenizer_pb2.Encoded:
    command = tokenizer_pb2.EncodeCommand(handle=handle, chat=asked)
    answer = await link.encode(tokenizer_pb2.TokenizerCommand(encode=command))
    assert not answer.HasField("error"), answer.error
    return answer


async def test_template_that_adds_arguments_to_text_gets_text() -> None:
    added = "{% for m in messages if m.tool_calls %}{{ '```' + m.tool_calls[0].function.arguments }}{% endfor %}"
    async with rendering(default=added, wrong="{{ 'a' + 1 }}") as renderer:
        assert await renderer.render(chat(CALLS)) == '```{"x": 1, "é": [2.5]}'
        with pytest.raises(InvalidRequest, match="TypeError: can only concatenate"):
            await renderer.render(chat(CALLS, template_name="wrong"))


@pytest.mark.parametrize("template", [LLAMA_3, QWEN])
async def test_tools_calls_and_answers(model_dir: Path, template: str) -> None:
    theirs = save_template(model_dir, template)
    async with rendering(default=template) as renderer:
        ours = await renderer.render(chat(CALLS, tools=TOOLS))
    assert "<>&é" in ours
    expected = theirs.apply_chat_template(
        CALLS, tools=TOOLS, tokenize=False, add_generation_prompt=True
    )
    assert ours == expected


async def test_parts_and_documents() -> None:
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]}
    ]
    async with rendering(default=DOCUMENTS) as renderer:
        told = await renderer.render(chat(parts, documents=[{"title": "t"}]))
        assert told == '[["title", "t"]]ab '
        assert await renderer.render(chat(parts, continue_final_message=True)) == "ab "


async def test_tools_have_a_template_of_their_own() -> None:
    async with rendering(default="d", tool_use="t", rag="r") as renderer:
        assert await renderer.render(chat(TALK)) == "d"
        assert await renderer.render(chat(TALK, tools=TOOLS)) == "t"
        assert await renderer.render(chat(TALK, template_name="rag")) == "r"
        with pytest.raises(InvalidField, match="one of default, rag, tool_use"):
            await renderer.render(chat(TALK, template_name="x"))


HOSTILE = {
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "2 s of CPU time",
    "{{ 'x' * 999999999999 }}": "MemoryError",
    "{{ 'x' * 2000000 }}": "more than 1048576 bytes",
    "{{ ''.__class__.__mro__ }}": "SecurityError",
    "{{ messages.append(1) }}": "SecurityError",
    "{{ namespace(__class__=1) }}": "SecurityError",
    "{{ raise_exception('no system role') }}": "refused by the chat template: no system role",
    "{% if %}": "TemplateSyntaxError",
    "{{ messages[7].content }}": "UndefinedError",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
}


@pytest.mark.parametrize("template", HOSTILE)
async def test_template_harms_its_own_conversation_alone(template: str) -> None:
    async with rendering(default=template, good=CHATML) as renderer:
        good = chat(TALK, template_name="good")
        bad = [renderer.render(chat(TALK)), renderer.render(good), renderer.render(chat(TALK))]
        first, other, last = await asyncio.gather(*bad, return_exceptions=True)
        assert isinstance(first, InvalidRequest)
        assert HOSTILE[template] in first.message
        assert isinstance(other, str)
        assert other.startswith("<|im_start|>user")
        assert str(last) == str(first)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"messages": "{"}, "chat.messages is not JSON"),
        ({"messages": "[1]"}, "chat.messages must be a JSON array of objects"),
        ({"messages": "[]"}, "chat.messages must have one message or more"),
        ({"tools": "{}"}, "chat.tools must be"),
        (
            {"template_kwargs": '{"messages": []}'},
            "chat.template_kwargs must be a JSON object without",
        ),
        ({"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
        ({"continue_final_message": True, "messages": '[{"role": "user"}]'}, "needs a content"),
    ],
)
async def test_wrong_conversation_is_told(wrong: dict[str, Any], problem: str) -> None:
    async with rendering(default=CHATML) as renderer:
        with pytest.raises(InvalidRequest, match=problem.replace("{", "\\{")):
            await renderer.render(pb.Chat(**{"messages": json.dumps(TALK), **wrong}))


async def test_request_brings_a_template_where_that_is_allowed() -> None:
    own = chat(
        TALK, template="{{ messages[1].content }}{{ eos_token }}", add_generation_prompt=True
    )
    async with rendering(default=CHATML) as renderer:
        with pytest.raises(InvalidField, match=r"chat\.template is not taken"):
            await renderer.render(own)
    trusting = ChatRenderer(ChatTemplates({}, SPECIAL), MOST_BYTES, takes_templates=True)
    try:
        assert await trusting.render(own) == "Hello.  </s>"
        with pytest.raises(InvalidRequest, match="2 s of CPU time"):
            await trusting.render(chat(TALK, template=next(iter(HOSTILE))))
        with pytest.raises(InvalidRequest, match="has no chat template"):
            await trusting.render(chat(TALK))
    finally:
        await trusting.close()


async def test_model_without_a_template_says_so() -> None:
    async with rendering() as renderer:
        with pytest.raises(InvalidRequest, match="has no chat template"):
            await renderer.render(chat(TALK))


async def test_process_is_started_again_and_ends_with_its_owner() -> None:
    async with rendering(default="x") as renderer:
        assert await renderer.render(chat(TALK)) == "x"
        (child,) = _renderers()
        child.kill()
        with pytest.raises(Exception, match="ended with status -9"):
            await renderer.render(chat(TALK))
        assert await renderer.render(chat(TALK)) == "x"
    assert _renderers() == []


def _renderers() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if _renders(each)]


def _renders(process: psutil.Process) -> bool:
    # Other tests' processes may end meanwhile.
    with suppress(psutil.NoSuchProcess):
        return renderer_module.PROGRAM in process.cmdline()
    return False


async def test_process_is_killed_and_awaited_where_its_owner_closes_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rendering(default="x") as renderer:
        assert await renderer.render(chat(TALK)) == "x"
        (child,) = _renderers()
        child.suspend()
        monkeypatch.setattr(program, "WALL_SECONDS", 0.0)
        monkeypatch.setattr(program, "LAST_SECONDS", 600.0)
        rendered = asyncio.create_task(renderer.render(chat(TALK)))
        await asyncio.sleep(0.1)
    assert rendered.cancelled()
    assert not psutil.pid_exists(child.pid)


async def test_conversation_that_nobody_awaits_is_not_rendered() -> None:
    slow = next(iter(HOSTILE))
    async with rendering(default=CHATML, slow=slow) as renderer, asyncio.timeout(120):
        await renderer.render(chat(TALK))
        (process,) = _renderers()
        left = [
            asyncio.create_task(renderer.render(chat(TALK, template_name="slow"))) for _ in range(9)
        ]
        await asyncio.sleep(0)
        for each in left:
            each.cancel()
        assert (await renderer.render(chat(TALK))).startswith("<|im_start|>")
        # One that renders them is killed.
        assert _renderers() == [process]


async def test_large_conversation_is_refused_before_it_is_read() -> None:
    async with rendering(default=CHATML) as renderer:
        with pytest.raises(InvalidField, match="with all of the conversation but must have"):
            await renderer.render(pb.Chat(messages="[" * MOST_BYTES, tools="[]"))
        assert _renderers() == []
