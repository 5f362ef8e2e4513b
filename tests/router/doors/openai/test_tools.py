"""Answers of models that call tools and reason, as clients of chats get them: whole, in parts and over a loss."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from compat.openai_schemas import check
from compat.plain_http import PlainHttp, Reply
from e2e.mesh import eventually
from router.scripted import READY, ScriptedEngine, serving_engine, serving_router, until_states
from router.scripted_tokenizer import ScriptedTokenizer, serving_tokenizer
from trtmesh.router.doors.openai.answer import StreamedAnswer
from trtmesh.v1 import generation_pb2 as pb

CHAT = "/v1/chat/completions"
STOP, LENGTH = pb.FINISH_REASON_END_ID, pb.FINISH_REASON_LENGTH
FIELDS = (
    *("stopping.max_tokens", "sampling.temperature", "sampling.num_return_sequences"),
    *("guided_decoding.guide", "guided_decoding.guide_type", "sampling.seed"),
)
GET = {"name": "get", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [{"type": "function", "function": GET}],
    "max_tokens": 500,
}


class Talk:
    """A router between clients and scripted peers."""

    def __init__(
        self,
        engine: ScriptedEngine,
        tokenizer: ScriptedTokenizer,
        http: PlainHttp,
        encode: Callable[[str], list[int]] = lambda text: list(map(ord, text)),
    ) -> None:
        self.engine, self.tokenizer, self.http = engine, tokenizer, http
        self._encode = encode
        self.submits = 0

    async def whole(self, body: dict[str, Any], *texts: str, reason: Any = STOP) -> Any:
        """The choices of an answer with these texts."""
        reply = await self._answered(body, texts, reason, size=1_000)
        check("CreateChatCompletionResponse", reply.json)
        return reply.json["choices"]

    async def parts(
        self, body: dict[str, Any], *texts: str, reason: Any = STOP, size: int = 1
    ) -> list[Any]:
        """The parts of a stream of tokens, `size` at once."""
        reply = await self._answered(body | {"stream": True}, texts, reason, size)
        *events, done, rest = reply.body.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        parts = [json.loads(event.removeprefix("data: ")) for event in events]
        for part in parts:
            check("CreateChatCompletionStreamResponse", part)
        return parts

    async def _answered(
        self, body: dict[str, Any], texts: Sequence[str], reason: Any, size: int
    ) -> Reply:
        headers = {"X-Request-Id": "mine"}
        calling = asyncio.create_task(self.http.call("POST", CHAT, body, headers=headers))
        engine = self.engine
        self.submits += 1
        handle = (await engine.submitted(self.submits))[-1].handle
        tokens = list(map(self._encode, texts))
        for offset in range(0, max(map(len, tokens)), size):
            pieces = [
                (handle + number, offset, ids[offset : offset + size])
                for number, ids in enumerate(tokens)
                if offset < len(ids)
            ]
            await engine.step(*pieces)
        await engine.step(ends=[(handle + number, reason) for number, _ in enumerate(texts)])
        return await calling

    @property
    def last(self) -> pb.GenerationConfig:
        """The config that the engine got."""
        return self.engine.submits[-1].config


@asynccontextmanager
async def talking(
    tool_format: str,
    reasoning: str = "none",
    end: str = "",
    fields: Sequence[str] = FIELDS,
    **settings: Any,
) -> AsyncIterator[Talk]:
    engine = ScriptedEngine(supported_fields=fields)
    tokenizer = ScriptedTokenizer(
        tool_format=tool_format,
        reasoning_format=reasoning,
        chat_template="enable_thinking",
        fingerprint="f1",
    )
    tokenizer.last_text, tokenizer.text_end = "", end
    async with (
        serving_engine(engine) as address,
        serving_tokenizer(tokenizer) as texts,
        serving_router([address], [texts], http={"port": 0}, **settings) as client,
        PlainHttp(client.http_address) as http,
    ):
        await until_states(client, [READY], [READY])
        yield Talk(engine, tokenizer, http)


def gathered(parts: Sequence[Any], choice: int = 0) -> dict[str, Any]:
    """A message from its deltas, as clients gather it, and its end."""
    message: dict[str, Any] = {}
    for part in parts:
        for each in part["choices"]:
            if each["index"] != choice:
                continue
            for name, value in each["delta"].items():
                if name != "tool_calls":
                    message[name] = message.get(name, "") + value
                    continue
                calls = message.setdefault("tool_calls", [])
                for call in value:
                    if call["index"] == len(calls):
                        calls.append({k: v for k, v in call.items() if k != "index"})
                    else:
                        told = calls[call["index"]]["function"]
                        told["arguments"] += call["function"]["arguments"]
            message["finish_reason"] = each["finish_reason"]
    return message


HERMES = '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>'
REAL = [
    ("hermes", f"Well.\n{HERMES}\n{HERMES.replace('1', '2')}", "Well.", ['{"a": 1}', '{"a": 2}']),
    ("llama3_json", '{"name": "get", "parameters": {"a": 1}}', None, ['{"a": 1}']),
    ("mistral", '[TOOL_CALLS]get[ARGS]{"a": 1}', None, ['{"a": 1}']),
    (
        "mistral_list",
        '[TOOL_CALLS][{"name": "get", "arguments": {"a": 1}}]',
        None,
        ['{"a": 1}'],
    ),
    ("hermes", "No tool, 1 < 2.", "No tool, 1 < 2.", []),
]


@pytest.mark.parametrize(("form", "text", "content", "arguments"), REAL)
async def test_calls_are_told_whole_and_in_parts(
    form: str, text: str, content: str | None, arguments: list[str]
) -> None:
    async with talking(form) as talk:
        (choice,) = await talk.whole(BODY, text)
        assert not talk.last.HasField("guided_decoding")
        message = choice["message"]
        calls = message.get("tool_calls", [])
        assert message["content"] == content
        assert [call["function"] for call in calls] == [
            {"name": "get", "arguments": each} for each in arguments
        ]
        assert len({call["id"] for call in calls}) == len(calls)
        if form.startswith("mistral"):
            assert all(len(call["id"]) == 9 and call["id"].isalnum() for call in calls)
        assert choice["finish_reason"] == ("tool_calls" if arguments else "stop")
        for size in (1, 7):
            told = gathered(await talk.parts(BODY, text, size=size))
            assert told.pop("finish_reason") == choice["finish_reason"]
            assert told == {"role": "assistant", "content": content or ""} | (
                {"tool_calls": calls} if calls else {}
            )


async def test_call_that_is_cut_off() -> None:
    text = HERMES[:-16]
    async with talking("hermes") as talk:
        (choice,) = await talk.whole(BODY, text, reason=LENGTH)
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "length")
        required = BODY | {"tool_choice": "required"}
        (choice,) = await talk.whole(required, text, reason=LENGTH)
        (call,) = choice["message"]["tool_calls"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")
        assert call["function"] == {"name": "get", "arguments": '{"a": '}
        told = gathered(await talk.parts(required, text, reason=LENGTH))
        assert told["tool_calls"] == [call]
        assert told["finish_reason"] == "length"


THOUGHT = "<think>\nLet me see.\n</think>\n\n"


@pytest.mark.parametrize(
    ("end", "text", "reasoning", "content"),
    [
        ("assistant\n", f"{THOUGHT}Four.", "Let me see.", "Four."),
        ("assistant\n<think>\n", f"{THOUGHT[8:]}Four.", "Let me see.", "Four."),
        ("assistant\n<think>\n", "Let me", "Let me", None),
        ("<think>\n\n</think>\n\n", "Four.", None, "Four."),
        ("assistant\n", f"{THOUGHT}{HERMES}", "Let me see.", None),
    ],
)
async def test_reasoning_is_apart_under_both_names(
    end: str, text: str, reasoning: str | None, content: str | None
) -> None:
    async with talking("hermes", "think", end) as talk:
        (choice,) = await talk.whole(BODY, text)
        message = choice["message"]
        assert message["content"] == content
        assert message.get("reasoning") == message.get("reasoning_content") == reasoning
        assert ("tool_calls" in message) == text.endswith(HERMES)
        told = gathered(await talk.parts(BODY, text))
        assert told.get("reasoning") == told.get("reasoning_content") == reasoning
        assert told["content"] == (content or "")
        assert told.get("tool_calls") == message.get("tool_calls")
        (choice,) = await talk.whole(BODY | {"include_reasoning": False}, text)
        assert "reasoning" not in choice["message"]
        assert choice["message"]["content"] == (content if content or HERMES in text else "")


async def test_tokens_of_reasoning_are_counted() -> None:
    async with talking("none", "think") as talk:
        talk.tokenizer.texts = {1: "<think>", 2: "</think>"}
        for text, count in (("\1Hm.\2Four.", 5), ("Four.", None)):
            parts = await talk.parts(
                BODY | {"tools": None, "stream_options": {"include_usage": True}}, text
            )
            details = parts[-1]["usage"].get("completion_tokens_details", {})
            assert details.get("reasoning_tokens") == count


async def test_each_choice_has_a_reader_of_its_own() -> None:
    texts = [f"a{HERMES}", HERMES.replace("1", "2")]
    async with talking("hermes") as talk:
        choices = await talk.whole(BODY | {"n": 2}, *texts)
        parts = await talk.parts(BODY | {"n": 2}, *texts, size=3)
        ids = set()
        for index, choice in enumerate(choices):
            told = gathered(parts, index)
            (call,) = choice["message"]["tool_calls"]
            assert told["tool_calls"] == [call]
            assert call["function"]["arguments"] == f'{{"a": {index + 1}}}'
            assert told["content"] == (choice["message"]["content"] or "") == "a" * (not index)
            ids.add(call["id"])
        assert len(ids) == 2


OTHER = {"type": "function", "function": {"name": "other", "strict": True}}
STRICT = {"type": "function", "function": GET | {"strict": True}}
NAMED = {"type": "function", "function": {"name": "get"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
JSON = {"type": "json_object"}


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({"tool_choice": "required"}, ["tags_with_separator"]),
        ({"tool_choice": NAMED}, ["tags_with_separator", "stop_after_first"]),
        ({"tools": [STRICT]}, ["triggered_tags", "integer"]),
        ({"tools": [*BODY["tools"], OTHER], "tool_choice": ALLOWED}, ["triggered_tags"]),
        ({"parallel_tool_calls": False}, ["triggered_tags", "stop_after_first"]),
        ({"response_format": JSON}, ["or", "tags_with_separator"]),
        ({"response_format": JSON, "tools": None}, []),
        ({}, []),
    ],
)
@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral", "mistral_list"])
async def test_grammar_sees_to_what_a_model_must(
    form: str, change: dict[str, Any], kinds: list[str]
) -> None:
    if form == "llama3_json" and "or" in kinds:
        # Refused: test_guides.py.
        return
    async with talking(form, "think", "<think>\n") as talk:
        await talk.whole(BODY | change, "x</think>\n\n")
        guide = talk.last.guided_decoding
        if not kinds:
            assert guide.guide == "" or "tools" in change
            return
        assert guide.guide_type == pb.GUIDE_TYPE_STRUCTURAL_TAG
        told = json.loads(guide.guide)["format"]
        thought, answer = told["elements"]
        assert thought["elements"][0]["end"] == "</think>"
        text = json.dumps(answer).replace("token_triggered_tags", "triggered_tags")
        assert all(f'"{kind}"' in text for kind in kinds)
        assert ('"stop_after_first": true' in text) == ("stop_after_first" in kinds)
        assert "other" not in text


async def test_template_gets_what_it_wants() -> None:
    call: dict[str, Any] = {"id": "c1", "type": "function"}
    call["function"] = {"name": "get", "arguments": '{"a": 1}'}
    call["function"] |= {"parsed_arguments": None}
    talked: list[Any] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "assistant", "content": "Four.", "tool_calls": []},
        {"role": "user", "content": "So?"},
    ]
    body = BODY | {"messages": talked, "reasoning_effort": "none"}
    async with talking("hermes") as talk:
        await talk.whole(body | {"chat_template_kwargs": {"x": 1}}, "Four.")
        chat = talk.tokenizer.encodes[-1].chat
        called = {"name": "get", "arguments": {"a": 1}}
        assert json.loads(chat.messages) == [
            talked[0],
            {**talked[1], "content": "", "tool_calls": [{**call, "function": called}]},
            {**talked[2], "name": "get"},
            {"role": "assistant", "content": "Four."},
            talked[4],
        ]
        assert json.loads(chat.tools) == BODY["tools"]
        assert json.loads(chat.template_kwargs) == {
            **dict.fromkeys(("enable_thinking", "thinking"), False),
            "x": 1,
        }


DEEP = '{"a":' * 300 + "{}" + "}" * 300
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": []}, "tools"),
    ({"tools": [1]}, "tools[0]"),
    ({"tools": [{"type": "custom"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": BODY["tools"] * 2}, "tools"),
    ({"tools": [{"type": "function", "function": GET | {"x": 1}}]}, "tools[0].function.x"),
    ({"tools": None, "tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": {"type": "custom"}}, "tool_choice.type"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "no"}}},
        "tool_choice.function.name",
    ),
    ({"functions": [GET]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"reasoning_effort": "much"}, "reasoning_effort"),
    ({"messages": [{"role": "assistant", "tool_calls": 1}]}, "messages[0].tool_calls"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}]},
        "messages[0].tool_calls[0].function.name",
    ),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": DEEP}}, "structured_outputs.json"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice"),
    (
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": []},
            }
        },
        "tool_choice.allowed_tools.tools",
    ),
    (
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [NAMED | {"type": "custom"}]},
            }
        },
        "tool_choice.allowed_tools.tools[0].type",
    ),
    *(
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "get", "arguments": arguments}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        )
        for arguments in ("[1]", DEEP)
    ),
]


@pytest.mark.parametrize("reasoning", ["none", "think"])
async def test_engine_without_guides_cannot_keep_to_a_form(reasoning: str) -> None:
    async with talking("hermes", reasoning, fields=FIELDS[:3]) as talk:
        (choice,) = await talk.whole(BODY, HERMES)
        assert choice["finish_reason"] == "tool_calls"
        reply = await talk.http.post(CHAT, BODY | {"tool_choice": "required"})
        assert (reply.status, reply.json["error"]["param"]) == (501, "tools"), reply.json


async def test_errors_name_their_field() -> None:
    async with talking("hermes", "think") as talk:
        for change, param in REFUSED:
            reply = await talk.http.post(CHAT, BODY | change)
            check("ErrorResponse", reply.json)
            assert (reply.status, reply.json["error"]["param"]) == (400, param), reply.json
    async with talking("none") as talk:
        reply = await talk.http.post(CHAT, BODY)
        assert (reply.status, reply.json["error"]["param"]) == (400, "tools")
        assert "tokenizer.tool_format" in reply.json["error"]["message"]
        (choice,) = await talk.whole(BODY | {"tool_choice": "none"}, HERMES)
        assert choice["message"]["content"] == HERMES


async def test_limited_caller_costs_no_rendering() -> None:
    limit = {"items_per_second": 0.001, "burst_items": 1}
    async with talking("hermes", "think", rate_limit=limit) as talk:
        await talk.whole(BODY, "Four.")
        rendered = len(talk.tokenizer.encodes)
        reply = await talk.http.post(CHAT, BODY)
        assert (reply.status, reply.json["error"]["code"]) == (429, "rate_limit_exceeded")
        assert len(talk.tokenizer.encodes) == rendered


async def test_defect_within_a_stream_ends_it_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = StreamedAnswer.text

    def fail_at_x(self: StreamedAnswer, choice: int, text: str) -> bytes:
        if "x" in text:
            raise RuntimeError("a defect")
        return written(self, choice, text)

    monkeypatch.setattr(StreamedAnswer, "text", fail_at_x)
    async with talking("none") as talk:
        body = BODY | {"tools": None, "stream": True}
        url = f"http://{talk.http.address}{CHAT}"
        posting = asyncio.create_task(talk.http.session.post(url, json=body))
        (submit,) = await talk.engine.submitted(1)
        await talk.engine.step((submit.handle, 0, [ord("a")]))
        async with await posting as response:
            await talk.engine.step((submit.handle, 1, [ord("x")]))
            await eventually(lambda: is_stopped(talk.engine))
            await talk.engine.step(ends=[(submit.handle, pb.FINISH_REASON_STOPPED)])
            *_, error, done, rest = (await response.read()).decode().split("\n\n")
        told = json.loads(error.removeprefix("data: "))
        check("ErrorResponse", told)
        assert told["error"]["message"] == "RuntimeError: a defect"
        assert (done, rest) == ("data: [DONE]", "")


async def is_stopped(engine: ScriptedEngine) -> bool:
    return bool(engine.stops)
