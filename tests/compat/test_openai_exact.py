"""One request by the native, the KServe and the OpenAI door has equal tokens, texts and log-probabilities."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from compat.openai_schemas import check, need_specification
from compat.plain_http import PlainHttp
from compat.test_openai import CHAT, COMPLETIONS, parts_of
from compat.test_openai_responses import RESPONSES, events_of
from e2e.mesh import INSIDE, PATIENT, SMALL, Mesh, running_mesh
from trtmesh.client import chat_item

pytestmark = pytest.mark.asyncio(loop_scope="module")

TORCH = (*SMALL, "--torch-threads", "1", "--torch-kv-cache-tokens", "8192")
PROMPT = "def load_json(path):"
TALK = [{"role": "user", "content": "Load a file of JSON."}]
NEARLY = 1e-4
"""Prompts with cached blocks are computed in other batches."""
DRAWS: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "top_p": 0.95, "seed": 7}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}},
}
SCHEMA |= {"required": ["name"], "additionalProperties": False}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[Mesh]:
    """A torch engine, and a router with the tokenizer inside."""

    async def start(mesh: Mesh) -> None:
        await mesh.start_engine(*TORCH)
        hermes = {"TRTMESH_TOKENIZER_TOOL_FORMAT": "hermes"}
        await mesh.start_router(*PATIENT, env={**INSIDE, **hermes})
        await mesh.ready(1, 1)

    async with running_mesh(start=start) as mesh:
        yield mesh


async def test_three_doors_say_the_same(mesh: Mesh, http: PlainHttp) -> None:
    (item,) = await mesh.client.complete([PROMPT], log_probs=True, top_log_probs=2, **DRAWS)
    native = item.sequences[0]
    body = {"prompt": PROMPT, "logprobs": 2, "return_token_ids": True, **DRAWS}
    whole = (await http.post(COMPLETIONS, body)).json
    check("CreateCompletionResponse", whole)
    choice = whole["choices"][0]
    assert (choice["text"], choice["token_ids"]) == (native.text, list(native.token_ids))
    found = choice["logprobs"]
    assert found["token_logprobs"] == pytest.approx(native.log_probs, abs=NEARLY)
    assert "".join(found["tokens"]) == native.text
    ends = [*found["text_offset"][1:], len(native.text)]
    pieces = zip(found["text_offset"], ends, strict=True)
    assert [native.text[start:end] for start, end in pieces] == found["tokens"]
    parts = parts_of(await http.post(COMPLETIONS, body | {"stream": True}))
    told = [part["choices"][0]["logprobs"] for part in parts]
    for name in found:
        assert [value for each in told if each for value in each[name]] == found[name]
    triton = {"text_input": PROMPT, "return_log_probs": True, **DRAWS}
    reply = (await http.post("/v2/models/ensemble/generate", triton)).json
    assert reply["text_output"].removeprefix(PROMPT) == native.text
    assert reply["output_log_probs"] == pytest.approx(found["token_logprobs"], abs=NEARLY)


async def test_chat_has_log_probabilities_with_bytes(mesh: Mesh, http: PlainHttp) -> None:
    (item,) = await mesh.client.complete([chat_item(TALK)], log_probs=True, **DRAWS)
    body = {"messages": TALK, "logprobs": True, "top_logprobs": 3, **DRAWS}
    whole = (await http.post(CHAT, body)).json
    check("CreateChatCompletionResponse", whole)
    choice = whole["choices"][0]
    assert choice["message"]["content"] == item.text
    content = choice["logprobs"]["content"]
    assert [each["logprob"] for each in content] == pytest.approx(
        item.sequences[0].log_probs, abs=NEARLY
    )
    assert b"".join(bytes(each["bytes"]) for each in content).decode() == item.text
    assert {len(each["top_logprobs"]) for each in content} == {3}
    parts = parts_of(
        await http.post(CHAT, body | {"stream": True, "return_tokens_as_token_ids": True})
    )
    for part in parts:
        check("CreateChatCompletionStreamResponse", part)
    streamed = [p["choices"][0]["logprobs"] for p in parts]
    told = [each for found in streamed if found for each in found["content"]]
    assert [each["bytes"] for each in told] == [each["bytes"] for each in content]
    assert [each["token"] for each in told] == [
        f"token_id:{i}" for i in item.sequences[0].token_ids
    ]


@pytest.mark.parametrize(
    "asked",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            }
        },
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"regex": "[0-9]{3}"}},
    ],
)
async def test_answer_follows_the_guide(http: PlainHttp, asked: dict[str, Any]) -> None:
    body = {"messages": TALK, "max_tokens": 120, "seed": 3, "temperature": 0.5, **asked}
    replies = [await http.post(CHAT, body), await http.post(CHAT, body | {"stream": True})]
    text = replies[0].json["choices"][0]["message"]["content"]
    deltas = [part["choices"][0]["delta"] for part in parts_of(replies[1])]
    assert "".join(delta.get("content", "") for delta in deltas) == text
    if "choice" in asked.get("structured_outputs", {}):
        assert text in ("yes", "no")
    elif "regex" in asked.get("structured_outputs", {}):
        assert len(text) == 3
        assert text.isdecimal()
    elif replies[0].json["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)
    else:
        assert text.lstrip().startswith("{")


PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"enum": [1, 2]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GREET: dict[str, Any] = {"type": "function", "function": {"name": "greet", "parameters": PERSON}}
LEAVE: dict[str, Any] = {"type": "function", "function": {"name": "leave", "strict": True}}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "greet"}}]
)
async def test_model_that_must_call_a_tool_calls_it(http: PlainHttp, choice: Any) -> None:
    body = {"messages": TALK, "tools": [GREET, LEAVE], "tool_choice": choice, "n": 2}
    body |= {"max_tokens": 200, "seed": 5, "temperature": 1.2}
    headers = {"X-Request-Id": "mine"}
    whole = (await http.call("POST", CHAT, body, headers=headers)).json
    check("CreateChatCompletionResponse", whole)
    reply = await http.call("POST", CHAT, body | {"stream": True}, headers=headers)
    parts = parts_of(reply)
    for index, each in enumerate(whole["choices"]):
        assert each["message"]["content"] is None
        told: dict[int, dict[str, Any]] = {}
        for part in parts:
            check("CreateChatCompletionStreamResponse", part)
            for one in part["choices"]:
                for call in one["delta"].get("tool_calls", ()) if one["index"] == index else ():
                    have = told.setdefault(call["index"], call | {"function": {"arguments": ""}})
                    have["function"]["arguments"] += call["function"]["arguments"]
                    have["function"]["name"] = call["function"].get(
                        "name", have["function"].get("name")
                    )
        assert [
            call | {"index": number} for number, call in enumerate(each["message"]["tool_calls"])
        ] == [*told.values()]
        if each["finish_reason"] == "length":
            # Its last call is cut off.
            told.popitem()
        else:
            assert each["finish_reason"] == "tool_calls"
        assert len(told) == 1 or choice == "required"
        for call in told.values():
            arguments = json.loads(call["function"]["arguments"])
            assert isinstance(arguments, dict)
            if call["function"]["name"] == "greet":
                assert arguments.keys() == {"name", "age"}
                assert arguments["age"] in (1, 2)


async def test_calls_and_log_probabilities_are_items_of_responses(http: PlainHttp) -> None:
    tool = {"type": "function", **GREET["function"], "strict": True}
    choice = {"type": "function", "name": "greet"}
    body: dict[str, Any] = {"input": TALK, "tools": [tool], "tool_choice": choice, "seed": 5}
    body |= {"max_output_tokens": 200}
    headers = {"X-Request-Id": "mine"}
    whole = (await http.call("POST", RESPONSES, body, headers=headers)).json
    check("Response", whole)
    (call,) = whole["output"]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "greet", "completed")
    assert json.loads(call["arguments"]).keys() == {"name", "age"}
    assert (whole["status"], whole["tools"], whole["tool_choice"]) == ("completed", [tool], choice)
    reply = await http.call("POST", RESPONSES, body | {"stream": True}, headers=headers)
    told = events_of(reply)
    deltas = [e["delta"] for e in told if e["type"] == "response.function_call_arguments.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == call["arguments"]
    kinds = [e["type"].removeprefix("response.") for e in told if not e["type"].endswith("delta")]
    ended = ["function_call_arguments.done", "output_item.done", "completed"]
    assert kinds == ["created", "in_progress", "output_item.added", *ended]
    assert told[-1]["response"]["output"][0] | {"id": call["id"]} == call
    allowed: dict[str, Any] = {"type": "allowed_tools", "mode": "required"}
    allowed |= {"tools": [{"type": "function", "name": "greet"}]}
    either = [tool, {"type": "function", "name": "leave"}]
    one = body | {"tools": either, "tool_choice": allowed, "parallel_tool_calls": False}
    found = (await http.post(RESPONSES, one)).json
    check("Response", found)
    assert [each["name"] for each in found["output"]] == ["greet"]
    allowed["tools"][0]["name"] = "f"
    wrong = (await http.post(RESPONSES, one)).json
    assert wrong["error"]["param"] == "tool_choice.tools.name"
    talk = [
        *TALK,
        call,
        {"type": "function_call_output", "call_id": call["call_id"], "output": "!"},
    ]
    plain = {"input": talk, "max_output_tokens": 5, "seed": 5, "top_logprobs": 2}
    answer = (await http.post(RESPONSES, plain)).json
    check("Response", answer)
    events = events_of(await http.post(RESPONSES, plain | {"stream": True}))
    streamed = [one for e in events if e["type"].endswith("text.delta") for one in e["logprobs"]]
    for found in (answer["output"][0]["content"][0]["logprobs"], streamed):
        assert len(found) == 5
        assert {len(each["top_logprobs"]) for each in found} == {2}


async def test_schema_that_cannot_be_kept_names_its_tool(http: PlainHttp) -> None:
    parameters = {"type": "object", "properties": {"a": {"not": {}}}}
    tools = [GREET, {"type": "function", "function": {"name": "f", "parameters": parameters}}]
    body = {"messages": TALK, "tools": tools, "max_tokens": 5}
    assert (await http.post(CHAT, body)).status == 200
    error = (await http.post(CHAT, body | {"tool_choice": "required"})).json["error"]
    assert error["param"] == "tools[1].function.parameters"
    assert error["message"].startswith("tools[1].function.parameters at /properties/a cannot be")
    named = [{"type": "function", **tool["function"]} for tool in tools]
    asked = {"input": "x", "tools": named, "tool_choice": "required"}
    error = (await http.post(RESPONSES, asked)).json["error"]
    assert error["message"].startswith("tools[1].parameters at /properties/a cannot be followed")


def many_tools(count: int) -> list[Any]:
    """Tools with ten properties each, as programs have them."""
    kinds: list[Any] = [{"type": kind} for kind in ("string", "integer", "number", "boolean")]
    kinds += [{"type": "array", "items": {"type": "string"}}, {"enum": ["low", "high"]}]
    about = {"description": "What this is for, in a sentence of the usual length."}
    functions = [
        {
            "name": f"tool_{number}",
            "parameters": {
                "type": "object",
                "properties": {
                    f"p{number}_{place}": kinds[place % len(kinds)] | about for place in range(10)
                },
                "additionalProperties": False,
            },
        }
        for number in range(count)
    ]
    return [{"type": "function", "function": each} for each in functions]


async def test_a_model_may_have_many_tools(http: PlainHttp) -> None:
    body = {"messages": TALK, "tool_choice": "required", "max_tokens": 40, "n": 2}
    found = await http.post(CHAT, body | {"tools": many_tools(128)})
    (call,) = found.json["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"].startswith("tool_")
    error = (await http.post(CHAT, body | {"tools": many_tools(400)})).json["error"]
    assert error["param"] == "tools"
    assert "must be at most 262144; send fewer tools" in error["message"]


WALKS = 40


def drawn_chat(random_: random.Random) -> dict[str, Any]:
    """A chat with tools and formats, some of which do not go together."""
    named = {"type": "function", "function": {"name": "greet"}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    fields: dict[str, list[Any]] = {
        "tools": [[GREET, LEAVE], [GREET], [{"type": "function"}], []],
        "tool_choice": ["auto", "required", "none", named, "any"],
        "parallel_tool_calls": [True, False],
        "response_format": [form, {"type": "json_object"}, {"type": "text"}, {"type": "x"}],
        "stream": [True],
        "n": [1, 2],
        "logprobs": [True],
        "include_reasoning": [False],
    }
    drawn = {name: random_.choice(of) for name, of in fields.items() if random_.random() < 0.5}
    return {"messages": TALK, "max_tokens": random_.randint(1, 60), "seed": 5, **drawn}


async def test_walk_over_tools_and_formats(http: PlainHttp) -> None:
    need_specification()
    random_, statuses = random.Random(36), Counter[int]()
    for _ in range(WALKS):
        body = drawn_chat(random_)
        reply = await http.post(CHAT, body)
        statuses[reply.status] += 1
        if reply.status != 200:
            assert reply.status == 400, (body, reply.body)
            check("ErrorResponse", reply.json)
        elif body.get("stream"):
            for part in parts_of(reply):
                assert "error" not in part, (body, part)
                check("CreateChatCompletionStreamResponse", part)
        else:
            check("CreateChatCompletionResponse", reply.json)
            assert len(reply.json["choices"]) == body.get("n", 1)
    assert statuses[200] > WALKS / 4, statuses
    assert statuses[400] > WALKS / 10, statuses


async def test_response_names_the_schema_that_cannot_be_kept(http: PlainHttp) -> None:
    form = {"type": "json_schema", "name": "f", "schema": {"type": "x"}}
    reply = await http.post(RESPONSES, {"input": "x", "text": {"format": form}})
    assert (reply.status, reply.json["error"]["param"]) == (400, "text.format"), reply.json


async def test_bias_bans_and_stops(http: PlainHttp) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, "return_token_ids": True}
    (first, *_) = (await http.post(COMPLETIONS, body)).json["choices"][0]["token_ids"]
    biased = (await http.post(COMPLETIONS, body | {"logit_bias": {str(first): -100}})).json
    assert first not in biased["choices"][0]["token_ids"]
    stopped = (await http.post(COMPLETIONS, body | {"stop_token_ids": [first]})).json["choices"][0]
    assert (stopped["finish_reason"], len(stopped["token_ids"])) == ("stop", 1)
    for wrong in ({}, {"regex": "("}, {"regex": "a", "choice": ["a"]}):
        reply = await http.post(COMPLETIONS, body | {"structured_outputs": wrong})
        assert (reply.status, reply.json["error"]["param"]) == (400, "structured_outputs")


@pytest.mark.parametrize("parts", [False, True])
async def test_expected_answer_changes_nothing_but_its_cost(http: PlainHttp, parts: bool) -> None:
    body = {"messages": TALK, "temperature": 0, "max_tokens": 24}
    plain = (await http.post(CHAT, body)).json
    text = plain["choices"][0]["message"]["content"]
    content = [{"type": "text", "text": text}] if parts else text
    answer = (
        await http.post(CHAT, body | {"prediction": {"type": "content", "content": content}})
    ).json
    check("CreateChatCompletionResponse", answer)
    assert answer["choices"] == plain["choices"]
    told = answer["usage"]["completion_tokens_details"]
    assert told["accepted_prediction_tokens"] > 8
    wrong = await http.post(CHAT, body | {"prediction": {"type": "x"}})
    assert (wrong.status, wrong.json["error"]["param"]) == (400, "prediction.type")
