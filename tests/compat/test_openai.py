"""The door for OpenAI's clients over plain HTTP, before a simulated engine."""

from __future__ import annotations

import asyncio
import json
import random
import re
import resource
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from compat.openai_schemas import check, need_specification
from compat.plain_http import PlainHttp, Reply
from e2e.mesh import (
    DEMO,
    INSIDE,
    PATIENT,
    SIMULATED,
    WIDE_TOKENS,
    Mesh,
    eventually,
    running_mesh,
    scrape,
)
from trtmesh.chassis.errors import InvalidField
from trtmesh.client import GenerateItem, Prompt, Tokens, chat_item

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPTS = ["Once upon a time", "def f(x):"]
DRAWN = {"max_tokens": 7, "seed": 5, "temperature": 0.8, "n": 2}


def parts_of(reply: Reply) -> list[Any]:
    """The parts of a stream that ends as it must."""
    assert (reply.status, reply.content_type) == (200, "text/event-stream; charset=utf-8")
    *events, done, rest = reply.body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def told_natively(mesh: Mesh, prompts: Sequence[str], **options: Any) -> list[str]:
    items = await mesh.client.complete(prompts, max_tokens=7, seed=5, temperature=0.8, **options)
    return [sequence.text for item in items for sequence in item.sequences]


async def test_root_says_what_is_served(http: PlainHttp) -> None:
    reply = await http.get("/")
    assert reply.status == 200
    assert {"/v2", "/v1/models", COMPLETIONS} <= reply.json["serves"].keys()
    assert (await http.get("/health")).status == 200


async def test_models_are_listed_and_described(http: PlainHttp) -> None:
    reply = await http.get("/v1/models")
    check("ListModelsResponse", reply.json)
    (model,) = reply.json["data"]
    assert (model["id"], model["parent"], model["max_model_len"]) == ("demo", None, 8192)
    assert (await http.get("/v1/models/demo")).json == model


async def test_no_model_is_absent_before_a_worker_was_ready() -> None:
    async def start(mesh: Mesh) -> None:
        await mesh.start_router()

    async with running_mesh(start=start) as mesh, PlainHttp(mesh.router.http_address) as http:
        reply = await http.post(
            CHAT, {"model": "demo", "messages": [{"role": "user", "content": "x"}]}
        )
        assert (reply.status, reply.json["error"]["code"]) == (503, "no_worker")
        assert (await http.get("/health")).status == 503


async def test_each_prompt_has_its_choices(mesh: Mesh, http: PlainHttp) -> None:
    reply = await http.post(COMPLETIONS, {"model": "demo", "prompt": PROMPTS, **DRAWN})
    check("CreateCompletionResponse", reply.json)
    texts = [choice["text"] for choice in reply.json["choices"]]
    assert texts == await told_natively(mesh, PROMPTS, num_return_sequences=2)
    assert [choice["index"] for choice in reply.json["choices"]] == [0, 1, 2, 3]
    assert {choice["finish_reason"] for choice in reply.json["choices"]} == {"length"}
    assert reply.json["usage"]["completion_tokens"] == 4 * 7


async def test_stream_has_the_same_texts(mesh: Mesh, http: PlainHttp) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    body = {"model": "demo", "prompt": PROMPTS, **DRAWN}
    whole = (await http.post(COMPLETIONS, {**body, "return_token_ids": True})).json
    parts = parts_of(await http.post(COMPLETIONS, {**body, **options}))
    for part in parts:
        check("CreateCompletionResponse", part)
    *told, usage = parts
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"] | _cached(usage))
    assert len({(part["id"], part["created"], part["model"]) for part in parts}) == 1
    for choice in whole["choices"]:
        mine = [c for part in told for c in part["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert [i for part in mine for i in part["token_ids"]] == choice["token_ids"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
        assert mine[-1]["finish_reason"] == "length"


async def test_each_chunk_may_have_the_usage_so_far(http: PlainHttp) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": PROMPTS, **DRAWN, "stream": True, "stream_options": options}
    *told, last = parts_of(await http.post(COMPLETIONS, body))
    assert last["choices"] == []
    so_far = [part["usage"]["completion_tokens"] for part in told]
    assert so_far == sorted(so_far)
    total = last["usage"]
    assert 0 < so_far[0] <= so_far[-1] == total["completion_tokens"]
    assert told[-1]["usage"]["prompt_tokens"] == total["prompt_tokens"]


def _cached(part: Any) -> dict[str, Any]:
    """The second request finds the first one's blocks."""
    return {"prompt_tokens_details": part["usage"]["prompt_tokens_details"]}


async def test_token_ids_stop_texts_and_defaults(mesh: Mesh, http: PlainHttp) -> None:
    (item,) = await mesh.client.complete(PROMPTS[:1], max_tokens=16, seed=5, temperature=1.0)
    body = {"prompt": PROMPTS[0], "seed": 5}
    first = (await http.post(COMPLETIONS, body)).json
    assert first["choices"][0]["text"] == item.text
    assert first["usage"]["completion_tokens"] == 16
    stop = item.text[5:8]
    reply = (await http.post(COMPLETIONS, {**body, "stop": stop})).json
    assert reply["choices"][0] | {"text": ""} == first["choices"][0] | {
        "text": "",
        "finish_reason": "stop",
    }
    assert reply["choices"][0]["text"] == item.text[: item.text.index(stop)]
    for ids in ([5, 6, 7], [[5, 6, 7], [8]]):
        reply = (await http.post(COMPLETIONS, {"prompt": ids})).json
        assert reply["usage"]["prompt_tokens"] == (4 if isinstance(ids[0], list) else 3)


TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "Once"}, {"type": "text", "text": "upon"}],
    },
    {"role": "assistant", "content": None, "refusal": "No.", "tool_calls": None},
    {"role": "user", "content": "Go on", "name": "me"},
]
AS_TEMPLATES_GET_IT: list[dict[str, Any]] = [
    TALK[0],
    {"role": "user", "content": "Once\nupon"},
    {"role": "assistant", "content": "No."},
    {"role": "user", "content": "Go on"},
]


async def test_chat_answers_as_the_native_api_does(mesh: Mesh, http: PlainHttp) -> None:
    native = [chat_item(AS_TEMPLATES_GET_IT)]
    items = await mesh.client.complete(
        native, max_tokens=7, seed=5, temperature=0.8, num_return_sequences=2
    )
    expected = [sequence.text for sequence in items[0].sequences]
    body = {"model": "demo", "messages": TALK, **DRAWN}
    whole = (await http.post(CHAT, body)).json
    check("CreateChatCompletionResponse", whole)
    assert [choice["message"]["content"] for choice in whole["choices"]] == expected
    assert whole["usage"]["prompt_tokens"] == items[0].usage.prompt_tokens
    parts = parts_of(
        await http.post(CHAT, {**body, "stream": True, "stream_options": {"include_usage": True}})
    )
    for part in parts:
        check("CreateChatCompletionStreamResponse", part)
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"]["completion_tokens"] == 14
    for index, text in enumerate(expected):
        mine = [c for part in parts for c in part["choices"] if c["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(part["delta"].get("content", "") for part in mine) == text
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["length"]


async def test_sdk_chats(mesh: Mesh) -> None:
    talk = AS_TEMPLATES_GET_IT[:2]
    async with aclosing(mesh.client.chat(talk, max_tokens=7, seed=5, temperature=0.8)) as events:
        told = [event.text async for event in events if isinstance(event, Tokens)]
    (item,) = await mesh.client.complete([chat_item(talk)], max_tokens=7, seed=5, temperature=0.8)
    assert "".join(told) == item.text
    both = GenerateItem(chat=chat_item(talk).chat, prompt=Prompt(text="x"))
    with pytest.raises(InvalidField, match="exclude each other"):
        await mesh.client.complete([both])


CHAT_BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
CHAT_REFUSED = [
    ({"messages": None}, "invalid_field", "messages"),
    ({"messages": []}, "invalid_field", "messages"),
    ({"messages": ["x"]}, "invalid_field", "messages[0]"),
    ({"messages": [{"role": "x"}]}, "invalid_field", "messages[0].role"),
    ({"messages": [{"role": "user", "content": 1}]}, "invalid_field", "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "invalid_field",
        "messages[0].content[0]",
    ),
    ({"messages": [{"role": "user"}]}, "invalid_request", "messages"),
    ({"tools": []}, "invalid_field", "tools"),
    ({"tool_choice": "auto"}, "invalid_field", "tool_choice"),
    ({"top_logprobs": 1}, "invalid_field", "top_logprobs"),
    ({"response_format": {"type": "json_schema"}}, "invalid_field", "response_format.json_schema"),
    ({"response_format": {"type": "x"}}, "invalid_field", "response_format.type"),
    ({"chat_template": "x"}, "invalid_field", "chat_template"),
    ({"chat_template_kwargs": {"tools": []}}, "invalid_field", "chat_template_kwargs"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "invalid_field",
        "add_generation_prompt",
    ),
    ({"max_completion_tokens": 0}, "invalid_field", "max_completion_tokens"),
    ({"max_tokens": 0}, "invalid_field", "max_tokens"),
    ({"logprobs": True, "top_logprobs": -1}, "invalid_field", "top_logprobs"),
    ({"prompt": "x"}, "invalid_request", "prompt"),
    ({"verbosity": "low"}, "invalid_field", "verbosity"),
]


@pytest.mark.parametrize(("change", "code", "param"), CHAT_REFUSED)
async def test_chat_error_names_its_field(
    http: PlainHttp, change: dict[str, Any], code: str, param: str
) -> None:
    for streamed in (False, True):
        reply = await http.post(CHAT, {**CHAT_BODY, "stream": streamed, **change})
        check("ErrorResponse", reply.json)
        error = reply.json["error"]
        assert (reply.status, error["code"], error["param"]) == (400, code, param), error


@pytest.mark.parametrize(
    ("path", "field"), [(CHAT, "messages"), (CHAT, "prediction"), (COMPLETIONS, "prompt")]
)
async def test_text_that_no_tokenizer_takes_is_named(
    http: PlainHttp, path: str, field: str
) -> None:
    text = "x" * 5_000_000
    large = {
        "messages": [{"role": "user", "content": text}],
        "prediction": {"type": "content", "content": text},
        "prompt": text,
    }
    own = BODY if path == COMPLETIONS else CHAT_BODY
    body = json.dumps(own | {field: large[field]}).encode()
    reply = await http.call("POST", path, BytesIO(body))
    assert (reply.status, reply.json["error"]["param"]) == (400, field)


async def test_chat_takes_what_asks_for_nothing(http: PlainHttp) -> None:
    neutral = {"tool_choice": "none", "parallel_tool_calls": True, "modalities": ["text"]}
    neutral |= {"verbosity": "medium"}
    plain = {"response_format": {"type": "text"}, "max_completion_tokens": 2, "documents": []}
    reply = await http.post(CHAT, CHAT_BODY | neutral | plain)
    assert reply.json["usage"]["completion_tokens"] == 2
    developer = [{"role": "developer", "content": "x"}]
    assert (await http.post(CHAT, CHAT_BODY | {"messages": developer})).status == 200


async def test_embeddings_are_not_served(http: PlainHttp) -> None:
    reply = await http.post("/v1/embeddings", {"input": "x"})
    check("ErrorResponse", reply.json)
    assert (reply.status, reply.headers["x-should-retry"]) == (501, "false")


async def test_texts_and_conversations_are_tokenized(http: PlainHttp) -> None:
    told = (await http.post("/tokenize", {"prompt": PROMPTS[0]})).json
    assert told["count"] == len(told["tokens"]) == 6
    assert told["max_model_len"] == 8192
    reply = await http.post("/detokenize", {"tokens": told["tokens"]})
    assert reply.json == {"prompt": PROMPTS[0]}
    assert (await http.post("/detokenize", {"tokens": []})).json == {"prompt": ""}
    talk = (await http.post("/tokenize", {"messages": CHAT_BODY["messages"]})).json
    counted = (await http.post(CHAT, CHAT_BODY)).json["usage"]["prompt_tokens"]
    assert talk["count"] == counted
    for path, body, param in (
        ("/tokenize", {"text": "x"}, "messages"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [5, 2**31, 6]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1], "model": "nope"}, "model"),
    ):
        reply = await http.post(path, body)
        check("ErrorResponse", reply.json)
        assert reply.json["error"]["param"] == param


async def test_operator_names_models_and_the_model_gives_defaults(tmp_path: Path) -> None:
    model_dir = tmp_path / "demo"
    shutil.copytree(DEMO, model_dir)
    (model_dir / "generation_config.json").write_text('{"temperature": 0, "max_new_tokens": 5}')
    settings = {
        "TRTMESH_TOKENIZER_MODEL_DIR": str(model_dir),
        "TRTMESH_TOKENIZER_ALLOW_REQUEST_TEMPLATES": "true",
        "TRTMESH_ROUTER_OPENAI_ALIASES": '{"gpt-5": "other", "gone": "nowhere", "other": "other"}',
        "TRTMESH_ROUTER_MODELS": "demo,other",
        "TRTMESH_ROUTER_OPENAI_UNKNOWN_FIELDS": "report",
    }

    async def start(mesh: Mesh) -> None:
        flags = (*SIMULATED, *WIDE_TOKENS)
        await asyncio.gather(
            mesh.start_engine(*flags), mesh.start_engine(*flags, "--model", "other")
        )
        await mesh.start_router(*PATIENT, env=INSIDE | settings)
        await mesh.ready(2, 1)

    async with running_mesh(start=start) as mesh, PlainHttp(mesh.router.http_address) as http:
        listed = (await http.get("/v1/models")).json["data"]
        assert [(each["id"], each["root"], each["parent"]) for each in listed] == [
            ("demo", "demo", None),
            ("gpt-5", "other", None),
            ("other", "other", None),
        ]
        template = "Say: {{ messages[0].content }}"
        body = {"messages": CHAT_BODY["messages"], "chat_template": template}
        answers = [
            (await http.post(CHAT, body | {"model": name})).json for name in ("demo", "gpt-5")
        ]
        prompt = [chat_item(CHAT_BODY["messages"], template=template)]
        for answer, model in zip(answers, ("demo", "other"), strict=True):
            (item,) = await mesh.client.complete(prompt, model=model, max_tokens=5, temperature=0)
            assert answer["choices"][0]["message"]["content"] == item.text
        assert answers[1]["model"] == "gpt-5"
        longer = await http.post(CHAT, body | {"temperature": 1, "max_completion_tokens": 9})
        assert longer.json["usage"]["completion_tokens"] == 9
        completed = await http.post(COMPLETIONS, {"prompt": "x"})
        assert completed.json["usage"]["completion_tokens"] == 16
        for more in ({}, {"stream": True}):
            reply = await http.post(COMPLETIONS, {"prompt": "x", "é\n": 1, "wish": [2], **more})
            assert (reply.status, reply.headers["x-ignored-fields"]) == (
                200,
                '["\\u00e9\\n", "wish"]',
            )
        tokens = await http.post("/tokenize", {"prompt": "x", "wish": 1})
        assert (tokens.status, tokens.headers["x-ignored-fields"]) == (200, '["wish"]')
        for limit in ("guided_json", "format"):
            limited = await http.post(COMPLETIONS, {"prompt": "x", limit: "json"})
            assert (limited.status, limited.json["error"]["param"]) == (400, limit)
        gone = await http.post(COMPLETIONS, {"prompt": "x", "model": "gone"})
        assert (gone.status, gone.json["error"]["code"]) == (404, "model_not_found")


WALKS = 150
SCHEMAS = {
    COMPLETIONS: ("CreateCompletionResponse", "CreateCompletionResponse"),
    CHAT: ("CreateChatCompletionResponse", "CreateChatCompletionStreamResponse"),
}


def drawn_body(random_: random.Random, path: str) -> dict[str, Any]:
    """Any fields, now and then with a value that is refused."""
    texts = ["x", "Once upon a time", "é🙂\n", "", "def f(x):\n    "]
    fields: dict[str, list[Any]] = {
        "n": [1, 2, 3, 0, "2"],
        "temperature": [0, 0.5, 1, 2, -1],
        "top_p": [0.1, 1, 1.5],
        "top_k": [-1, 0, 5],
        "seed": [1, -1, 2**63],
        "stop": ["e", ["a", " t"], [], None],
        "max_tokens": [1, 5, 20, 0],
        "stream": [True, False, True],
        "presence_penalty": [0.5, -2],
        "frequency_penalty": [1, "1"],
        "ignore_eos": [True],
        "min_tokens": [2],
        "user": ["me"],
        "logit_bias": [{}],
        "return_token_ids": [True],
        "cache_salt": ["mine"],
        "priority": [-3, 3],
        "wish": [None, None, None, 1],
    }
    body = {
        name: random_.choice(values) for name, values in fields.items() if random_.random() < 0.3
    }
    body.setdefault("max_tokens", 4)
    if body.get("stream") is True and random_.random() < 0.5:
        body["stream_options"] = {"include_usage": random_.random() < 0.7}
    if path == CHAT:
        roles = random_.choices(
            ["system", "user", "assistant", "tool", "developer"], k=random_.randint(1, 4)
        )
        return body | {"messages": [{"role": r, "content": random_.choice(texts)} for r in roles]}
    return body | {
        "prompt": random_.choice([random_.choice(texts), texts[:3], [5, 6], [[5], [7, 8]]])
    }


async def test_every_answer_is_of_the_specification(http: PlainHttp) -> None:
    need_specification()
    random_ = random.Random(36)
    statuses: Counter[int] = Counter()
    for _ in range(WALKS):
        path = random_.choice([COMPLETIONS, CHAT])
        body = drawn_body(random_, path)
        reply = await http.post(path, body)
        statuses[reply.status] += 1
        whole, part_schema = SCHEMAS[path]
        if reply.status != 200:
            assert reply.status == 400, (body, reply.body)
            check("ErrorResponse", reply.json)
        elif not body.get("stream"):
            check(whole, reply.json)
            prompts = body.get("prompt")
            many = (
                len(prompts) if isinstance(prompts, list) and not isinstance(prompts[0], int) else 1
            )
            assert len(reply.json["choices"]) == many * body.get("n", 1)
        else:
            *parts, last = parts_of(reply)
            for part in parts:
                check(part_schema, part)
            check("ErrorResponse" if "error" in last else part_schema, last)
    assert statuses[200] > WALKS / 3, statuses
    assert statuses[400] > WALKS / 10, statuses


BODY = {"model": "demo", "prompt": "x", "max_tokens": 3}
REFUSED = [
    ({"model": "nope"}, 404, "model_not_found", "model"),
    ({"prompt": None}, 400, "invalid_field", "prompt"),
    ({"prompt": []}, 400, "invalid_field", "prompt"),
    ({"prompt": [1, "x"]}, 400, "invalid_field", "prompt"),
    ({"prompt": ""}, 400, "prompt_empty", None),
    ({"prompt": [[6144]]}, 400, "token_out_of_vocabulary", "prompt"),
    ({"prompt": [[5] * 9000]}, 400, "context_length_exceeded", "prompt"),
    ({"max_tokens": 0}, 400, "invalid_field", "max_tokens"),
    ({"temperature": "hot"}, 400, "invalid_field", "temperature"),
    ({"temperature": -1}, 400, "invalid_field", "temperature"),
    ({"n": True}, 400, "invalid_field", "n"),
    ({"n": -1}, 400, "invalid_field", "n"),
    ({"stop": [1]}, 400, "invalid_field", "stop"),
    ({"stop": [""]}, 400, "invalid_field", "stop"),
    ({"logit_bias": {"5": 101}}, 400, "invalid_field", "logit_bias"),
    ({"logit_bias": {"five": 1}}, 400, "invalid_field", "logit_bias"),
    ({"echo": True}, 400, "invalid_field", "echo"),
    ({"best_of": 2}, 400, "invalid_field", "best_of"),
    ({"suffix": "x"}, 400, "invalid_field", "suffix"),
    ({"stream": False, "stream_options": {}}, 400, "invalid_field", "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, 400, "invalid_request", "stream_options.x"),
    ({"guided_json": {}}, 400, "invalid_request", "guided_json"),
    ({"logit_bias": {"5": 1}}, 501, "unsupported_field", "logit_bias"),
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("change", "status", "code", "param"), REFUSED)
async def test_error_has_its_status_and_names_its_field(
    http: PlainHttp,
    change: dict[str, Any],
    status: int,
    code: str,
    param: str | None,
    streamed: bool,
) -> None:
    reply = await http.post(COMPLETIONS, {**BODY, "stream": streamed, **change})
    check("ErrorResponse", reply.json)
    error = reply.json["error"]
    assert (reply.status, error["code"], error["param"]) == (status, code, param), error
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert reply.headers["x-should-retry"] == "false"
    assert reply.headers["x-request-id"]


async def test_other_errors_look_alike(http: PlainHttp) -> None:
    for method, path, body, status, code in (
        ("GET", "/v1/nothing", None, 404, "unknown_url"),
        ("GET", COMPLETIONS, None, 405, "unknown_url"),
        ("GET", "/v1/models/nope", None, 404, "model_not_found"),
        ("POST", COMPLETIONS, b"{", 400, "invalid_request"),
    ):
        reply = await http.call(method, path, body)
        check("ErrorResponse", reply.json)
        assert (reply.status, reply.json["error"]["code"]) == (status, code)


async def test_field_with_two_parts_is_named_once(http: PlainHttp) -> None:
    """The simulated engine has no guides, which are a type and a text."""
    reply = await http.post(CHAT, CHAT_BODY | {"response_format": {"type": "json_object"}})
    assert reply.status == 501
    assert reply.json["error"]["message"].startswith("response_format not supported")


async def test_connection_goes_on_after_errors_and_streams(http: PlainHttp) -> None:
    """All requests are sent at once, and answered in their order."""
    stream = json.dumps(CHAT_BODY | {"stream": True}).encode()
    asked = [
        ("POST", CHAT, b"{", 400),
        ("GET", CHAT, b"", 405),
        ("POST", "/v1/nothing", b"{}", 404),
        ("POST", CHAT, stream, 200),
        ("HEAD", "/v1/models", b"", 200),
        ("POST", COMPLETIONS, json.dumps(BODY | {"model": "nope"}).encode(), 404),
        ("POST", COMPLETIONS, json.dumps(BODY).encode(), 200),
    ]
    host, _, port = http.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for number, (method, path, body, _) in enumerate(asked):
        last = "Connection: close\r\n" if number == len(asked) - 1 else ""
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nX-Request-Id: r{number}\r\n{last}"
        writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    told = (await reader.read(-1)).decode()
    writer.close()
    heads = re.findall(r"HTTP/1\.1 (\d+) [^\0]*?x-request-id: (r\d)", told)
    assert heads == [(str(each[3]), f"r{number}") for number, each in enumerate(asked)]
    assert told.count("data: [DONE]\n\n\r\n0\r\n\r\n") == 1


async def test_absent_is_null_and_notes_are_taken(http: PlainHttp) -> None:
    notes = {"user": "me", "metadata": {"a": "b"}, "store": False, "suffix": None, "guided_x": None}
    neutral = {"echo": False, "best_of": 1, "top_k": -1, "logit_bias": {}}
    assert (await http.post(COMPLETIONS, BODY | notes | neutral)).status == 200


async def test_request_has_the_name_that_its_client_gives(http: PlainHttp) -> None:
    headers = {"X-Request-Id": "mine"}
    reply = await http.call("POST", COMPLETIONS, BODY, headers=headers)
    assert (reply.headers["x-request-id"], reply.json["id"]) == ("mine", "cmpl-mine")
    # A proxy's retry comes while the first call still runs.
    small = json.dumps(BODY | {"max_tokens": 200}).encode()
    for body in (small, small + b" " * 2**18):
        # Large ones are all read before the first of them runs.
        calls = [http.call("POST", COMPLETIONS, body, headers=headers) for _ in range(8)]
        assert [reply.status for reply in await asyncio.gather(*calls)] == [200] * 8


async def test_client_that_leaves_ends_its_request(mesh: Mesh, http: PlainHttp) -> None:
    body = {"prompt": PROMPTS, "max_tokens": 8000, "ignore_eos": True}
    async with http.session.post(
        f"http://{http.address}{COMPLETIONS}", json=body | {"stream": True}
    ) as response:
        await response.content.readline()
        assert (await mesh.gauges())["live_items"] == 2
    await mesh.idle()
    asked = asyncio.create_task(http.post(COMPLETIONS, body))
    await eventually(lambda: mesh.has_stage("generate"))
    asked.cancel()
    await asyncio.wait([asked])
    await mesh.idle()
    counted = await scrape(mesh.router, door="openai", status="499")
    assert counted["trtmesh_router_http_requests_total"] >= 1


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 4096, reason="each has a connection"
)
@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.soak)])
async def test_many_streams_at_once_tell_the_same(http: PlainHttp, count: int) -> None:
    body = {"prompt": PROMPTS[0], "max_tokens": 6, "seed": 5, "stream": True}
    async with aiohttp.TCPConnector(limit=0) as connector:
        url = f"http://{http.address}{COMPLETIONS}"

        async def text() -> str:
            async with session.post(url, json=body) as response:
                reply = Reply(response.status, response.headers, await response.read())
            return "".join(part["choices"][0]["text"] for part in parts_of(reply))

        async with aiohttp.ClientSession(connector=connector) as session:
            texts = await asyncio.gather(*(text() for _ in range(count)))
    whole = (await http.post(COMPLETIONS, body | {"stream": False})).json
    assert set(texts) == {whole["choices"][0]["text"]}


async def test_bad_prompt_is_told_after_the_choices_of_others(http: PlainHttp) -> None:
    body = {"prompt": ["x", ""], "max_tokens": 3}
    reply = await http.post(COMPLETIONS, body)
    assert (reply.status, reply.json["error"]["code"]) == (400, "prompt_empty")
    assert reply.json["error"]["message"].startswith("prompt[1]: ")
    *parts, last = parts_of(await http.post(COMPLETIONS, body | {"stream": True}))
    assert [c["finish_reason"] for part in parts for c in part["choices"]][-1] == "length"
    assert {c["index"] for part in parts for c in part["choices"]} == {0}
    assert last == reply.json


async def has_tokens(mesh: Mesh) -> bool:
    answer = await mesh.admin.list_requests()
    return any(item.generated_tokens for request in answer.requests for item in request.items)


async def test_stop_by_an_operator_is_an_error_and_no_end(mesh: Mesh, http: PlainHttp) -> None:
    """No finish reason of this API says that a text is cut off."""
    body = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True}
    for streamed in (False, True):
        headers = {"X-Request-Id": f"long-{streamed}"}
        running = asyncio.create_task(
            http.call("POST", COMPLETIONS, body | {"stream": streamed}, headers=headers)
        )
        # A stop before the first token is an answer of its own.
        await eventually(lambda: has_tokens(mesh))
        assert await mesh.client.stop(headers["X-Request-Id"])
        reply = await running
        if streamed:
            *parts, last = parts_of(reply)
            assert not any(c["finish_reason"] for part in parts for c in part["choices"])
            error = last["error"]
        else:
            assert reply.status == 400
            error = reply.json["error"]
        assert (error["code"], error["type"]) == ("cancelled", "invalid_request_error")
