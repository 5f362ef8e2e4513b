"""What strangers send to the HTTP door: each answer is an error in JSON, and none of it reaches the log unescaped."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from http.client import HTTPConnection
from typing import Any

import pytest
import pytest_asyncio
from compat.plain_http import PlainHttp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from process_constants import constants
from processes import ServiceProcess, service_process
from searches import examples

pytestmark = pytest.mark.asyncio(loop_scope="module")

JSON_BYTES = 2**17
GENERATE = "/v2/models/ensemble/generate"
INFER = "/v2/models/ensemble/infer"
NOT_READY = 503
"""The status of a valid request: the router has no worker."""
VALID = {"text_input": "x", "max_tokens": 3}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router() -> AsyncIterator[ServiceProcess]:
    flags = ("--port", "0", "--engines", "127.0.0.1:1", *constants(max_json_bytes=JSON_BYTES))
    allowed = ("--http-allowed-origins", "https://chat.example")
    async with service_process("router", *flags, *allowed) as router:
        yield router


@pytest_asyncio.fixture(loop_scope="module")
async def http(router: ServiceProcess) -> AsyncIterator[PlainHttp]:
    async with PlainHttp(router.http_address) as http:
        yield http


@pytest.mark.parametrize(
    "body",
    [
        b'{"text_input": "\\ud800", "max_tokens": 3}',
        b'{"text_input": "x", "max_tokens": 3, "id": "\\udc00"}',
        b'{"text_input": "x", "max_tokens": 3, "\\ud83d": 1}',
        b'{"text_input": "x", "max_tokens": 3, "parameters": {"a": "\\ud83dx"}}',
        b'{"text_input": "\xed\xa0\x80", "max_tokens": 3}',
    ],
)
async def test_half_of_a_surrogate_pair_is_a_400(http: PlainHttp, body: bytes) -> None:
    for path in (GENERATE, INFER, "/v2/logging"):
        reply = await http.post(path, body)
        assert reply.status == 400, reply.body
        assert "failed to parse the request JSON buffer" in reply.json["error"]


async def test_json_is_limited_and_binary_data_behind_it_is_not(http: PlainHttp) -> None:
    empty = len(json.dumps({**VALID, "text_input": ""}))
    most = json.dumps({**VALID, "text_input": "x" * (JSON_BYTES - empty)}).encode()
    assert len(most) == JSON_BYTES
    assert (await http.post(GENERATE, most)).status == NOT_READY
    reply = await http.post(GENERATE, most + b" ")
    assert reply.status == 400
    assert f"must have at most {JSON_BYTES};" in reply.json["error"]
    text = b"x" * (2 * JSON_BYTES)
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1, 1]}
    size = {"parameters": {"binary_data_size": len(text) + 4}}
    tokens = {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [3]}
    head = json.dumps({"inputs": [{**tensor, **size}, tokens]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    body = head + len(text).to_bytes(4, "little") + text
    assert (await http.post(INFER, body, headers=headers)).status == NOT_READY


async def test_many_keys_are_refused_at_once(http: PlainHttp) -> None:
    body = {**VALID, **{f"k{number}": 1 for number in range(5000)}}
    reply = await http.post(GENERATE, body)
    assert reply.status == 400
    assert "more than 1024 keys" in reply.json["error"]


async def test_web_pages_elsewhere_may_not_send_requests(http: PlainHttp) -> None:
    async def status(**headers: str) -> int:
        return (await http.post(GENERATE, VALID, headers=headers)).status

    assert await status() == NOT_READY
    assert await status(Origin="https://chat.example") == NOT_READY
    for origin in ("https://evil.example", "null", "https://chat.example.evil", "http://["):
        assert await status(Origin=origin) == 403
    plain = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
    reply = await http.post(GENERATE, json.dumps(VALID).encode(), headers=plain)
    assert reply.status == 403
    assert "(http.allowed_origins)" in reply.json["error"]


PAGE = "https://chat.example"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


@pytest.mark.parametrize("path", [GENERATE, "/v1/chat/completions", "/v1/responses", "/nothing"])
async def test_browsers_are_told_what_pages_may_do(http: PlainHttp, path: str) -> None:
    reply = await http.call("OPTIONS", path, headers={"Origin": PAGE, **PREFLIGHT})
    assert (reply.status, reply.body) == (204, b"")
    told = reply.headers
    assert told["Access-Control-Allow-Origin"] == PAGE
    assert told["Access-Control-Allow-Methods"] == "GET, POST"
    assert told["Access-Control-Allow-Headers"] == PREFLIGHT["Access-Control-Request-Headers"]
    elsewhere = {"Origin": "https://evil.example", **PREFLIGHT}
    reply = await http.call("OPTIONS", path, headers=elsewhere)
    assert reply.status == 403
    assert "(http.allowed_origins)" in reply.body.decode()
    assert not [name for name in reply.headers if name.startswith("Access-Control")]
    for no_preflight in (PREFLIGHT, {"Origin": PAGE}):
        reply = await http.call("OPTIONS", path, headers=no_preflight)
        assert reply.status == (404 if path == "/nothing" else 405)


async def test_allowed_pages_read_answers_and_errors(http: PlainHttp) -> None:
    for path in ("/v2", "/v1/models", "/nothing"):
        reply = await http.call("GET", path, headers={"Origin": PAGE})
        assert reply.headers["Access-Control-Allow-Origin"] == PAGE
        assert reply.headers["Access-Control-Expose-Headers"] == "*"
        assert "Access-Control-Allow-Credentials" not in reply.headers
        for others in (
            {},
            {"Origin": "https://evil.example"},
            {"Origin": f"http://{http.address}"},
        ):
            reply = await http.call("GET", path, headers=others)
            assert reply.headers["Vary"] == "Origin"
            assert "Access-Control-Allow-Origin" not in reply.headers


async def test_pages_of_the_port_itself_may_send_requests_unless_a_name_leads_to_it(
    http: PlainHttp,
) -> None:
    """The owner of a name has it point anywhere, and browsers take the page and the port for one origin then."""

    async def status(host: str) -> int:
        headers = {"Host": host, "Origin": f"http://{host}"}
        return (await http.post(GENERATE, VALID, headers=headers)).status

    for host in (http.address, "localhost:8000", "[::1]:8000", "192.0.2.7"):
        assert await status(host) == NOT_READY
    for host in (
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "2130706433",
    ):
        assert await status(host) == 403


async def test_long_names_are_echoed_in_part(http: PlainHttp, router: ServiceProcess) -> None:
    before = len(router.stderr)
    for path, body in (
        (f"/v2/models/{'m' * 7000}/generate", VALID),
        (GENERATE, {**VALID, "id": "i" * 2**15}),
        (GENERATE, {**VALID, "p" * 1000: {}}),
    ):
        reply = await http.post(path, body)
        assert reply.status in (400, 404)
        assert len(reply.body) < 1000
    assert all(len(line) < 2000 for line in router.stderr[before:].splitlines())


TEXTS = st.text() | st.sampled_from(["\x1b[2J", "\u202e", "ensemble", "9" * 5000, "x" * 2000])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=10,
)
KEYS = st.sampled_from(
    [
        *("text_input", "max_tokens", "id", "parameters", "inputs", "outputs", "stop_words"),
        *("embedding_bias", "beam_width", "temperature", "stream", "bad_words", "top_k", "seed"),
    ]
)
TENSORS = st.fixed_dictionaries(
    {},
    optional={
        "name": KEYS | TEXTS,
        "datatype": st.sampled_from(["BYTES", "INT32", "FP32", "BOOL", "FP16", ""]) | TEXTS,
        "shape": st.lists(st.integers(-2, 5) | st.integers(), max_size=20) | VALUES,
        "data": VALUES,
        "parameters": st.dictionaries(TEXTS | st.just("binary_data_size"), VALUES, max_size=3),
    },
)
BODIES = (
    st.dictionaries(KEYS | TEXTS, VALUES, max_size=8)
    | st.fixed_dictionaries(
        {key: st.just(value) for key, value in VALID.items()},
        optional={"id": VALUES, "top_k": VALUES, "seed": VALUES},
    )
    | st.fixed_dictionaries({"inputs": st.lists(TENSORS, max_size=3)})
    | VALUES
)
RAW = BODIES.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=200)


async def test_every_answer_is_json_and_no_5xx(router: ServiceProcess) -> None:
    host, _, port = router.http_address.rpartition(":")
    connection = HTTPConnection(host, int(port), timeout=60)
    before = len(router.stderr)

    @settings(
        max_examples=examples(120, soak=300), deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.sampled_from([GENERATE, INFER, GENERATE + "_stream", "/v2/logging"]), RAW, st.data())
    def fuzz(path: str, body: bytes, data: Any) -> None:
        if data.draw(st.booleans()) and body:
            cut = data.draw(st.integers(0, len(body)))
            body = body[:cut] + data.draw(st.binary(max_size=4)) + body[cut:]
        connection.request("POST", path, body)
        answer = connection.getresponse()
        content = answer.read()
        assert answer.status == NOT_READY or answer.status < 500 or answer.status == 501, content
        text = content.decode()
        for part in text.split("\n\n"):
            if part:
                assert isinstance(json.loads(part.removeprefix("data: ")), dict)

    try:
        await asyncio.to_thread(fuzz)
    finally:
        connection.close()
    written = router.stderr[before:]
    assert "Traceback" not in written
    assert all(line.isprintable() for line in written.splitlines())
