"""`/v1/responses`, before a simulated engine: the specification judges every answer and every event."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
from compat.openai_schemas import check, need_specification
from compat.plain_http import PlainHttp, Reply
from compat.test_openai import CHAT, drawn_body
from e2e.mesh import Mesh
from trtmesh.client import chat_item

pytestmark = pytest.mark.asyncio(loop_scope="module")

RESPONSES = "/v1/responses"
DRAWN = {"max_output_tokens": 7, "temperature": 0.8, "seed": 5}
WHOLE = ["created", "in_progress", "output_item.added", "content_part.added"]
ENDED = ["output_text.done", "content_part.done", "output_item.done"]


def events_of(reply: Reply) -> list[Any]:
    """The events of a stream, each under its name and with the next number."""
    assert (reply.status, reply.content_type) == (200, "text/event-stream; charset=utf-8")
    *told, rest = reply.body.decode().split("\n\n")
    assert rest == ""
    events = []
    for number, lines in enumerate(told):
        name, data = lines.split("\n")
        event = json.loads(data.removeprefix("data: "))
        check("ResponseStreamEvent", event)
        assert (event["type"], event["sequence_number"]) == (name.removeprefix("event: "), number)
        events.append(event)
    return events


def text_of(response: Any) -> str:
    (message,) = response["output"]
    (part,) = message["content"]
    return str(part["text"])


async def test_input_is_answered_as_its_conversation(mesh: Mesh, http: PlainHttp) -> None:
    talk: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "reasoning_content": "Who?",
            "content": "Hello\nyou",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "assistant", "content": "42."},
        {"role": "user", "content": "Go on"},
    ]
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Who?"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "content": [
                {"type": "output_text", "text": "Hello", "annotations": []},
                {"type": "refusal", "refusal": "you"},
            ],
        },
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
        {"role": "assistant", "content": "42."},
        {"role": "user", "content": [{"type": "input_text", "text": "Go on"}]},
    ]
    (expected,) = await mesh.client.complete(
        [chat_item(talk)], max_tokens=7, seed=5, temperature=0.8
    )
    body = {"model": "demo", "instructions": "Be brief.", "input": items, **DRAWN}
    reply = (await http.post(RESPONSES, body)).json
    check("Response", reply)
    assert text_of(reply) == expected.text
    assert reply["usage"]["input_tokens"] == expected.usage.prompt_tokens
    assert (reply["status"], reply["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert reply["temperature"] == pytest.approx(0.8)
    assert (reply["instructions"], reply["store"]) == ("Be brief.", False)
    plain = (await http.post(RESPONSES, {"input": "Hi", **DRAWN})).json
    (alone,) = await mesh.client.complete(
        [chat_item(talk[1:2])], max_tokens=7, seed=5, temperature=0.8
    )
    assert text_of(plain) == alone.text


async def test_stream_tells_the_same(http: PlainHttp) -> None:
    body = {"input": "Hi", **DRAWN, "stop": None}
    whole = (await http.post(RESPONSES, body)).json
    events = events_of(await http.post(RESPONSES, body | {"stream": True}))
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert deltas >= 1
    assert kinds == [*WHOLE, *["output_text.delta"] * deltas, *ENDED, "incomplete"]
    text = "".join(e["delta"] for e in events if e["type"].endswith("delta"))
    assert text == text_of(whole) == events[-4]["text"]
    last = events[-1]["response"]
    check("Response", last)
    assert text_of(last) == text
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert events[0]["response"]["output"] == []
    assert len({json.dumps(e["item_id"]) for e in events if "item_id" in e}) == 1
    stopped = body | {"stop": text[2:4], "stream": True, "metadata": {"a": "b"}}
    ended = events_of(await http.post(RESPONSES, stopped))[-1]
    assert (ended["type"], ended["response"]["metadata"]) == ("response.completed", {"a": "b"})
    assert text_of(ended["response"]) == text[: text.index(text[2:4])]


WALKS = 60


async def test_every_answer_is_of_the_specification(http: PlainHttp) -> None:
    need_specification()
    random_ = random.Random(37)
    statuses: Counter[int] = Counter()
    for _ in range(WALKS):
        chat = drawn_body(random_, CHAT)
        chat.pop("n", None)
        chat.pop("return_token_ids", None)
        options = chat.pop("stream_options", None)
        body = chat | {"input": chat.pop("messages"), "max_output_tokens": chat.pop("max_tokens")}
        body = {k: v for k, v in body.items() if k not in ("messages", "max_tokens")}
        for item in body["input"]:
            if item["role"] == "tool":
                item |= {"type": "function_call_output", "call_id": "c", "output": "x"}
        if options:
            body["reasoning"] = {"summary": "auto"}
        reply = await http.post(RESPONSES, body)
        statuses[reply.status] += 1
        if reply.status != 200:
            assert reply.status == 400, (body, reply.body)
            check("ErrorResponse", reply.json)
        elif body.get("stream"):
            check("Response", events_of(reply)[-1]["response"])
        else:
            check("Response", reply.json)
    assert statuses[200] > WALKS / 3, statuses
    assert statuses[400] > WALKS / 10, statuses


REFUSED = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [1]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"instructions": "x", "input": [{"role": "x", "content": "x"}]}, "input[0].role"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0]",
    ),
    ({"input": [{"type": "function_call", "call_id": "x", "name": "f"}]}, "input[0].arguments"),
    (
        {
            "instructions": "x",
            "input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "x"}],
        },
        "input[0].arguments",
    ),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function", "name": "?"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools"),
    ({"reasoning": {"effort": "x"}}, "reasoning.effort"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "x"}}}, "text.format.type"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"n": 2}, "n"),
    ({"messages": []}, "messages"),
]


@pytest.mark.parametrize(("change", "param"), REFUSED)
async def test_error_names_its_field(http: PlainHttp, change: dict[str, Any], param: str) -> None:
    for streamed in (False, True):
        body = {"input": "x", "max_output_tokens": 3, "stream": streamed, **change}
        reply = await http.post(RESPONSES, body)
        check("ErrorResponse", reply.json)
        assert (reply.status, reply.json["error"]["param"]) == (400, param), reply.json


async def test_nothing_is_asked_for(http: PlainHttp) -> None:
    neutral = {
        "store": True,
        "truncation": "disabled",
        "background": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "stream_options": {"include_obfuscation": False},
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "max_tool_calls": 3,
    }
    reply = await http.post(RESPONSES, {"input": "x", "max_output_tokens": 3, **neutral})
    assert reply.status == 200, reply.body
    check("Response", reply.json)
