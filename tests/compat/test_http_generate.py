"""`generate` and `generate_stream` over plain HTTP, on decoupled models."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from compat.plain_http import PlainHttp
from compat.test_streams import native_text
from compat.triton import Triton
from e2e.mesh import Mesh, eventually, scrape

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 30
PROMPT = "def fibonacci(n):"
LONG = {"text_input": "long", "max_tokens": 8000}
GENERATE = "/v2/models/{}/generate"
STREAM = "/v2/models/{}/generate_stream"
OF_ENSEMBLES = {"sequence_id": 0, "sequence_start": False, "sequence_end": False}


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
async def test_generate_returns_one_response(mesh: Mesh, http: PlainHttp, model: str) -> None:
    reply = await http.post(GENERATE.format(model), {"text_input": PROMPT, "max_tokens": TOKENS})
    assert (reply.status, reply.content_type) == (200, "application/json")
    told = {"model_name": model, "model_version": "1"}
    told |= {"text_output": PROMPT + await native_text(mesh, PROMPT, TOKENS)}
    assert reply.json == told | (OF_ENSEMBLES if model == "ensemble" else {})
    assert list(reply.json) == sorted(reply.json)


@pytest.mark.parametrize("version", ["", "/versions/1"])
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
async def test_generate_stream_sends_events(
    mesh: Mesh, http: PlainHttp, model: str, version: str
) -> None:
    body = {"text_input": PROMPT, "max_tokens": TOKENS, "stream": True, "id": "mine"}
    reply = await http.post(STREAM.format(model + version), body)
    assert (reply.status, reply.content_type) == (200, "text/event-stream; charset=utf-8")
    assert "".join(event["text_output"] for event in reply.events) == await native_text(
        mesh, PROMPT, TOKENS
    )
    assert {(event["model_name"], event["id"]) for event in reply.events} == {(model, "mine")}


async def test_parameters_object_is_merged(mesh: Mesh, http: PlainHttp) -> None:
    flat = {
        "text_input": PROMPT,
        "max_tokens": TOKENS,
        "stream": False,
        "exclude_input_in_output": True,
        "stop_words": ["zzz", "yyy"],
        "bad_words": [],
        "temperature": 1,
        "return_num_input_tokens": True,
        "any_other": "parameter",
    }
    nested = {"text_input": PROMPT, "parameters": flat}
    del flat["text_input"]
    one = await http.post(GENERATE.format("ensemble"), {"text_input": PROMPT, **flat})
    other = await http.post(GENERATE.format("ensemble"), nested)
    assert one.status == 200, one.body
    assert one.json == other.json
    assert one.json["text_output"] == await native_text(mesh, PROMPT, TOKENS)
    assert type(one.json["num_input_tokens"]) is int


async def test_token_ids_and_tensors_of_a_fixed_extent(mesh: Mesh, http: PlainHttp) -> None:
    """A flat list fills both rows of `stop_words_list`, like a nested list."""
    ids = {"input_ids": [7, 8], "input_lengths": 2, "request_output_len": 9}
    (item,) = await mesh.client.complete([[7, 8]], max_tokens=9, ignore_end_id=True)
    path = GENERATE.format("tensorrt_llm")
    assert (await http.post(path, ids)).json["output_ids"] == [7, 8, *item.token_ids]
    word = item.token_ids[4]
    for words in ([word, 1], [[word], [1]]):
        reply = await http.post(path, ids | {"stop_words_list": words})
        assert reply.json["output_ids"] == [7, 8, *item.token_ids[:5]]
        assert reply.json["sequence_length"] == 7


async def test_preprocessing_and_postprocessing(http: PlainHttp) -> None:
    body = {"QUERY": PROMPT, "REQUEST_OUTPUT_LEN": 5}
    reply = await http.post(GENERATE.format("preprocessing"), body)
    ids = reply.json["INPUT_ID"]
    assert reply.json["REQUEST_INPUT_LEN"] == len(ids)
    body = {"TOKENS_BATCH": ids, "SEQUENCE_LENGTH": len(ids)}
    reply = await http.post(GENERATE.format("postprocessing"), body)
    assert reply.json["OUTPUT"] == PROMPT


NOT_SIGNED = "attempt to access JSON non-signed-integer as signed-integer for input 'max_tokens'"
GOOD = {"text_input": "x", "max_tokens": 3}
REFUSED: list[tuple[str, Any, int, str]] = [
    ("nothing", GOOD, 404, "Request for unknown model: 'nothing' is not found"),
    ("ensemble/versions/2", GOOD, 404, "Request for unknown model: 'ensemble' version 2 is not found"),
    ("ensemble", {"max_tokens": 3}, 400, "missing required input(s) ['text_input']"),
    ("ensemble", GOOD | {"max_tokens": "3"}, 400, "Unable to parse 'data': " + NOT_SIGNED),
    ("ensemble", GOOD | {"max_tokens": True}, 400, "Unable to parse 'data': " + NOT_SIGNED),
    ("ensemble", GOOD | {"max_tokens": 3.0}, 400, "Unable to parse 'data': " + NOT_SIGNED),
    ("ensemble", GOOD | {"seed": "7"}, 400,
     "attempt to access JSON non-unsigned-integer as unsigned-integer for input 'seed'"),
    ("ensemble", GOOD | {"top_p": "0.5"}, 400,
     "Unable to parse 'data': attempt to access JSON non-number as double for input 'top_p'"),
    ("ensemble", GOOD | {"top_p": None}, 400, "attempt to access JSON non-number as double"),
    ("ensemble", GOOD | {"stop_words": {"a": "b"}}, 400, "Unable to parse JSON bytes array: "),
    ("ensemble", GOOD | {"max_tokens": 2**40}, 400, "'max_tokens' holds a value outside of INT32"),
    ("ensemble", GOOD | {"max_tokens": 0}, 400, "max_tokens must be a single value > 0"),
    ("ensemble", GOOD | {"text_input": 7}, 400,
     "Unable to parse JSON bytes array: attempt to access JSON non-string as string for input"),
    ("ensemble", GOOD | {"stream": 1}, 400,
     "Unable to parse 'data': attempt to access JSON non-boolean as boolean for input 'stream'"),
    ("ensemble", GOOD | {"text_input": ["x", "y"]}, 400, "batch size does not match other inputs"),
    ("ensemble", GOOD | {"priority": [1]}, 400, "parameter 'priority' has invalid type. It should be"),
    ("ensemble", GOOD | {"triton_x": 1}, 400, "parameter keys starting with 'triton_' are reserved"),
    ("ensemble", GOOD | {"id": 7}, 400,
     "Unable to parse 'id': attempt to access JSON non-string as string"),
    ("ensemble", GOOD | {"parameters": 7}, 400,
     "Expected JSON object for keyword: 'parameters': attempt to access JSON non-object as object"),
    ("ensemble", GOOD | {"any": {}}, 400, "parameter 'any' has invalid type. It should be either"),
    ("ensemble", GOOD | {"timeout": "soon"}, 400,
     "parameter 'timeout' is 'soon' but must be an integer, at least 0"),
    ("ensemble", GOOD | {"priority": -1}, 400,
     "parameter 'priority' is -1 but must be an integer, at least 0"),
    ("ensemble", GOOD | {f"own{n}": n for n in range(257)}, 400,
     "parameter 'own256': a request must have at most 256 parameters"),
    ("ensemble", GOOD | {"temprature": 0.5}, 400,
     "temprature is no input of model 'ensemble'; did you mean temperature?"),
    ("ensemble", GOOD | {"parameters": {"runtime_top_k": 5}}, 400, "did you mean top_k?"),
    ("ensemble", GOOD | {"embedding_bias_words": ["a", "b"], "embedding_bias_weights": [1.0]}, 400,
     "embedding_bias_words, embedding_bias_weights have 2 and 1 entries but need a weight for each"),
    ("ensemble", GOOD | {"lora_path": "/x"}, 400,
     "lora_path is an input of other models, without effect in model 'ensemble'; leave it out"),
    ("ensemble", b'{"text_input": "x", "max_tokens": 3, "max_tokens": 4}', 400,
     "input 'max_tokens' already exists in request"),
    ("ensemble", GOOD | {"parameters": {"max_tokens": 3}}, 400,
     "input 'max_tokens' already exists in request"),
    ("ensemble", b'{"text_input": "x", "max_tokens": 3, "own": 1, "own": 1}', 400,
     "parameter 'own' already exists in request"),
    ("ensemble", GOOD | {"own": 1, "parameters": {"own": 1}}, 400,
     "parameter 'own' already exists in request"),
    ("ensemble", b'{"text_input": "\\ud83d", "max_tokens": 3}', 400,
     "failed to parse the request JSON buffer: "),
    ("ensemble", b"{", 400, "failed to parse the request JSON buffer"),
    ("ensemble", b"[]", 400, "failed to parse the request JSON buffer: it is not a JSON object"),
    ("ensemble", b"[" * 100_000, 400, "failed to parse the request JSON buffer"),
    ("tensorrt_llm", {"input_ids": [1], "input_lengths": 1, "request_output_len": 2,
                      "stop_words_list": [1, 2, 3]}, 400,
     "The schema can not convert input 'stop_words_list' to tensor with proper shape"),
    ("tensorrt_llm_bls", GOOD | {"image_input": [1.5, 1.5, 1.5]}, 400,
     "receiving FP16 data via JSON is not supported. Please use the binary data format for input"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "body", "status", "message"), REFUSED)
@pytest.mark.parametrize("endpoint", [GENERATE, STREAM])
async def test_invalid_generate_body_is_refused(
    http: PlainHttp, endpoint: str, model: str, body: Any, status: int, message: str
) -> None:
    reply = await http.post(endpoint.format(model), body)
    assert (reply.status, reply.content_type) == (status, "application/json"), reply.body
    assert list(reply.json) == ["error"]
    assert message in reply.json["error"]


async def test_unknown_keys_are_counted_and_logged_once(mesh: Mesh, http: PlainHttp) -> None:
    name = "x" * 70
    for _ in range(3):
        body = GOOD | {"user": "a", "parameters": {name: 1.5}}
        assert (await http.post(GENERATE.format("ensemble"), body)).status == 200
    for parameter in ("user", name[:64]):
        told = await scrape(mesh.router, parameter=parameter)
        assert told["trtmesh_router_unknown_parameters_total"] == 3
        line = f"request parameter '{parameter}' has no effect in model 'ensemble'"
        assert mesh.router.stderr.count(line) == 1


async def test_parameters_of_the_other_calls_are_counted_too(
    mesh: Mesh, triton: Triton, http: PlainHttp
) -> None:
    await triton.infer("ensemble", GOOD, parameters={"Streaming": True})
    inputs = [
        {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["x"]},
        {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [3]},
    ]
    body = {"inputs": inputs, "parameters": {"Streaming": True, "binary_data_output": False}}
    assert (await http.post("/v2/models/ensemble/infer", body)).status == 200
    told = await scrape(mesh.router, parameter="Streaming")
    assert told["trtmesh_router_unknown_parameters_total"] == 2
    assert not await scrape(mesh.router, parameter="binary_data_output")


async def test_parameters_with_an_effect_are_not_counted(mesh: Mesh, http: PlainHttp) -> None:
    known = {"priority": 1, "timeout": 60_000_000, "request_type": "context_and_generation"}
    assert (await http.post(GENERATE.format("ensemble"), GOOD | known)).status == 200
    assert not [name for name in known if await scrape(mesh.router, parameter=name)]
    pre = {"QUERY": "x", "REQUEST_OUTPUT_LEN": 1, "priority": 1}
    assert (await http.post(GENERATE.format("preprocessing"), pre)).status == 200
    told = await scrape(mesh.router, parameter="priority")
    assert told["trtmesh_router_unknown_parameters_total"] == 1


async def test_rows_of_a_batch_in_one_stream(mesh: Mesh, http: PlainHttp) -> None:
    prompts, lengths = ["first", "second prompt"], [5, 12]
    body = {"text_input": prompts, "max_tokens": lengths, "stream": [True, True]}
    reply = await http.post(STREAM.format("ensemble"), body)
    for index, prompt in enumerate(prompts):
        own = [event["text_output"] for event in reply.events if event["batch_index"] == index]
        assert "".join(own) == await native_text(mesh, prompt, lengths[index])


async def test_first_event_sets_the_status(http: PlainHttp) -> None:
    body = {"input_ids": [5] * 9000, "input_lengths": 9000, "request_output_len": 2}
    reply = await http.post(STREAM.format("tensorrt_llm"), body)
    assert (reply.status, reply.content_type) == (500, "text/event-stream; charset=utf-8")
    (event,) = reply.events
    assert event["error"].startswith("Prompt length (9000) exceeds maximum input length (8191)")


async def test_a_timeout_is_an_error(mesh: Mesh, http: PlainHttp) -> None:
    reply = await http.post(GENERATE.format("ensemble"), LONG | {"timeout": 50_000})
    assert reply.status == 504
    assert "timeout of 0.05 s" in reply.json["error"]
    await mesh.idle()


async def test_a_request_is_stopped_by_its_name(mesh: Mesh, http: PlainHttp) -> None:
    texts: list[str] = []
    before = await _finished(mesh, "stopped")
    body = LONG | {"stream": True, "id": "long"}
    async with aclosing(http.events(STREAM.format("ensemble"), body)) as events:
        async for event in events:
            if not texts:
                stop = {"stop": True, "id": "long"}
                reply = await http.post(GENERATE.format("tensorrt_llm_bls"), stop)
                told = {"id": "long", "model_name": "tensorrt_llm_bls", "model_version": "1"}
                assert (reply.status, reply.json) == (200, told)
            texts.append(event["text_output"])
    assert await _finished(mesh, "stopped") == before + 1
    text, whole = "".join(texts), await native_text(mesh, "long", 100)
    assert text[: len(whole)] == whole[: len(text)]
    await mesh.idle()


async def test_disconnect_during_a_stream_cancels_it(mesh: Mesh, http: PlainHttp) -> None:
    before = await _finished(mesh, "cancelled")
    async with aclosing(http.events(STREAM.format("ensemble"), LONG | {"stream": True})) as events:
        assert "text_output" in await anext(events)
    await eventually(lambda: _more_cancelled(mesh, before))
    await mesh.idle()
    assert "Traceback" not in mesh.router.stderr


async def test_disconnect_before_the_response_cancels_it(mesh: Mesh, http: PlainHttp) -> None:
    before = await _finished(mesh, "cancelled")
    asking = asyncio.create_task(http.post(GENERATE.format("ensemble"), LONG))
    await eventually(mesh.used_blocks)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await eventually(lambda: _more_cancelled(mesh, before))
    await mesh.idle()
    assert "Traceback" not in mesh.router.stderr


async def _finished(mesh: Mesh, reason: str) -> float:
    """Items that ended for a reason."""
    samples = await scrape(mesh.router, reason=reason)
    return samples.get("trtmesh_router_items_finished_total", 0)


async def _more_cancelled(mesh: Mesh, before: float) -> bool:
    return await _finished(mesh, "cancelled") > before


async def test_stopping_router_ends_streams_with_an_error(mesh: Mesh) -> None:
    """After the grace period, remaining streams end with an error."""
    peers = ("--engines", mesh.engines[0].address, "--tokenizers", mesh.tokenizers[0].address)
    router = await mesh.start("router", "--port", "0", *peers, "--grace-seconds", "0.1")
    async with PlainHttp(router.http_address) as http:
        await eventually(http.is_ready)
        told: list[Any] = []
        body = LONG | {"stream": True}
        async with aclosing(http.events(STREAM.format("ensemble"), body)) as events:
            async for event in events:
                if not told:
                    stopping = asyncio.create_task(router.stop())
                told.append(event)
    *texts, last = told
    assert all("text_output" in event for event in texts)
    assert last == {"error": "this router stops; resume the request on another"}
    assert await stopping == 0
    await mesh.idle()
