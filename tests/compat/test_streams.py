"""Decoupled models: a stream of responses for each request."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from compat.triton import Response, SyncStream, Triton, joined, request
from e2e.mesh import Mesh, scrape

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 40


async def native_text(mesh: Mesh, prompt: str, max_tokens: int = TOKENS) -> str:
    (item,) = await mesh.client.complete([prompt], max_tokens=max_tokens)
    return item.text


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
async def test_stream_sends_each_token(mesh: Mesh, triton: Triton, model: str) -> None:
    prompt = "def fibonacci(n):"
    responses = await triton.stream(
        model,
        {"text_input": prompt, "max_tokens": TOKENS, "stream": True},
        request_id="one",
        empty_final=True,
    )
    assert joined(responses) == await native_text(mesh, prompt)
    assert [response.final for response in responses] == [False] * (len(responses) - 1) + [True]
    assert {response.request_id for response in responses} == {"one"}
    assert bool(responses[-1].outputs) == (model == "ensemble")
    await mesh.idle()


async def test_empty_final_response_is_sent_on_request(triton: Triton) -> None:
    tensors = {"text_input": "x", "max_tokens": 3, "stream": True}
    responses = await triton.stream("tensorrt_llm_bls", tensors)
    assert all(response.outputs and not response.final for response in responses)


async def test_not_streaming_gives_one_response_with_the_prompt(mesh: Mesh, triton: Triton) -> None:
    prompt = "The capital"
    (response,) = await triton.stream("ensemble", {"text_input": prompt, "max_tokens": TOKENS})
    assert response.final
    assert response.text == prompt + await native_text(mesh, prompt)


async def test_synchronous_client_streams(mesh: Mesh) -> None:
    """Many requests on a stream, half-closed before the responses."""
    with SyncStream(mesh.router.address) as stream:
        prompts = [f"prompt {index}" for index in range(8)]
        for prompt in prompts:
            tensors = {"text_input": prompt, "max_tokens": TOKENS, "stream": True}
            stream.send("ensemble", tensors, request_id=prompt)
        responses = await asyncio.to_thread(stream.half_close)
    for prompt in prompts:
        own = [response for response in responses if response.request_id == prompt]
        assert joined(own) == await native_text(mesh, prompt)
        assert [response.final for response in own].count(True) == 1


async def test_failed_request_leaves_the_stream_running(mesh: Mesh, triton: Triton) -> None:
    good = {"text_input": "good", "max_tokens": TOKENS, "stream": True}
    responses = await triton.stream_all(
        [
            request("ensemble", good, request_id="good"),
            request("nothing", good, request_id="no model"),
            request("ensemble", {"max_tokens": 3}, request_id="no text"),
        ]
    )
    errors = [response.error for response in responses if response.error]
    assert len(errors) == 2
    assert any("Request for unknown model: 'nothing' is not found" in text for text in errors)
    assert any("missing required input(s) ['text_input']" in text for text in errors)
    assert joined(responses) == await native_text(mesh, "good")


def rows(*texts: str) -> np.ndarray:
    return np.array([[text] for text in texts], dtype=np.object_)


def flags(count: int) -> np.ndarray:
    return np.ones((count, 1), dtype=bool)


async def test_rows_of_a_batch_stream_concurrently(mesh: Mesh, triton: Triton) -> None:
    prompts = ["first", "second prompt", "third"]
    lengths = np.array([[5], [30], [12]], dtype=np.int32)
    tensors = {"text_input": rows(*prompts), "max_tokens": lengths, "stream": flags(3)}
    responses = await triton.stream("ensemble", tensors)
    assert [response.final for response in responses].count(True) == 1
    assert responses[-1].final
    for index, prompt in enumerate(prompts):
        own = [r for r in responses if r.outputs["batch_index"].tolist() == [[index]]]
        assert joined(own) == await native_text(mesh, prompt, int(lengths[index, 0]))
    whole = await triton.stream("ensemble", tensors | {"stream": ~flags(3)})
    assert {r.number["batch_index"] for r in whole} == {0, 1, 2}
    assert [r.final for r in whole] == [False, False, True]


async def test_sequence_index_tells_sequences_apart(triton: Triton) -> None:
    responses = await triton.stream(
        "ensemble",
        {
            "text_input": "x",
            "max_tokens": 9,
            "stream": True,
            "num_return_sequences": 2,
            "top_k": 40,
        },
    )
    own = [[r for r in responses if r.number["sequence_index"] == index] for index in (0, 1)]
    assert joined(own[0]) != joined(own[1])


async def test_core_model_streams_token_ids(mesh: Mesh, triton: Triton) -> None:
    tensors = {"input_ids": [7, 8], "input_lengths": 2, "request_output_len": 9, "streaming": True}
    more = {"return_num_output_tokens": True, "return_perf_metrics": True}
    responses = await triton.stream("tensorrt_llm", tensors | more)
    (item,) = await mesh.client.complete([[7, 8]], max_tokens=9, ignore_end_id=True)
    ids = [i for response in responses for i in response.outputs["output_ids"].ravel().tolist()]
    assert ids == list(item.token_ids)
    assert all(r.number["sequence_length"] == r.outputs["output_ids"].size for r in responses)
    assert responses[-1].number["num_output_tokens"] == 9
    assert responses[-1].number["last_token_time_ns"] > 0
    # All times except the last token's are known at the first token.
    known = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns")
    for name in (*known, "kv_cache_alloc_new_blocks", "kv_cache_alloc_total_blocks"):
        assert {r.number[name] for r in responses} == {responses[-1].number[name]} - {0}
    assert responses[-1].final


async def test_stop_word_spans_two_chunks(mesh: Mesh, triton: Triton) -> None:
    whole = await native_text(mesh, "stop", 60)
    word = whole[30:36]
    for model in ("ensemble", "tensorrt_llm_bls"):
        responses = await triton.stream(
            model,
            {"text_input": "stop", "max_tokens": 5000, "stream": True, "stop_words": ["zz", word]},
        )
        assert joined(responses) == whole[: whole.index(word) + len(word)]
    await mesh.idle()


STOP_IDS = {"input_ids": [0], "input_lengths": 0, "request_output_len": 0, "stop": True}


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls", "tensorrt_llm"])
@pytest.mark.parametrize("stopper", ["own", "tensorrt_llm"])
async def test_a_request_is_stopped_by_its_name(mesh: Mesh, model: str, stopper: str) -> None:
    prompt = (
        {"input_ids": [5], "input_lengths": 1, "request_output_len": 8000, "streaming": True}
        if model == "tensorrt_llm"
        else {"text_input": "long", "max_tokens": 8000, "stream": True}
    )
    with SyncStream(mesh.router.address) as stream:
        stream.send(model, prompt, request_id="long", enable_empty_final_response=True)
        first = await asyncio.to_thread(stream.next)
        assert first.outputs
        assert not first.final
        if stopper == "own" and model != "tensorrt_llm":
            stream.send(model, {"stop": True}, request_id="long")
        else:
            stream.send("tensorrt_llm", STOP_IDS, request_id="long")
        responses = await asyncio.to_thread(stream.half_close)
    assert not any(response.error for response in responses)
    # The stop is answered with an empty response; the stopped request ends normally.
    finals = [response for response in responses if response.final]
    assert len(finals) == 2
    assert any(not response.outputs for response in finals)
    await mesh.idle()


async def generated(mesh: Mesh) -> float:
    return (await scrape(mesh.router)).get("trtmesh_router_tokens_out_total", 0.0)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm"])
async def test_a_stop_reaches_a_large_request_that_is_not_read_yet(mesh: Mesh, model: str) -> None:
    prompt = (
        {"input_ids": [5], "input_lengths": 1, "request_output_len": 8000}
        if model == "tensorrt_llm"
        else {"text_input": "long", "max_tokens": 8000}
    )
    # A thread reads it, while the stop is read at once.
    note = {"note": "x" * 2**18}
    before = await generated(mesh)
    with SyncStream(mesh.router.address) as stream:
        stream.send(model, prompt, request_id="large", parameters=note)
        stream.send("tensorrt_llm", STOP_IDS, request_id="large")
        responses = await asyncio.to_thread(stream.half_close)
    assert [(response.error, response.final) for response in responses] == [("", True)] * 2
    assert await generated(mesh) - before < 8000
    await mesh.idle()


async def test_stop_of_an_unknown_request_succeeds(mesh: Mesh, triton: Triton) -> None:
    (response,) = await triton.stream("tensorrt_llm", STOP_IDS, request_id="never seen")
    assert response == Response("never seen", {}, final=True)
    (response,) = await triton.stream("tensorrt_llm", STOP_IDS)
    assert "Trying to stop a request but request ID is not provided" in response.error


async def test_requests_may_share_an_id(mesh: Mesh, triton: Triton) -> None:
    one = request("ensemble", {"text_input": "x", "max_tokens": 20}, request_id="same")
    responses = await triton.stream_all([one, dict(one), dict(one)])
    assert len({response.text for response in responses}) == 1
    assert len(responses) == 3


async def test_cancelling_a_stream_ends_all_its_requests(mesh: Mesh) -> None:
    with SyncStream(mesh.router.address) as stream:
        for index in range(5):
            tensors = {"text_input": f"long {index}", "max_tokens": 8000, "stream": True}
            stream.send("ensemble", tensors)
        await asyncio.to_thread(stream.next)
        await asyncio.to_thread(stream.cancel)
    await mesh.idle()


async def test_a_timeout_ends_a_request_and_leaves_nothing(mesh: Mesh, triton: Triton) -> None:
    tensors = {"text_input": "long", "max_tokens": 8000}
    (response,) = await triton.stream("ensemble", tensors, timeout=50_000)
    assert "timeout of 0.05 s" in response.error
    await mesh.idle()


async def test_triton_grpc_error_ends_the_stream_at_the_first_error(mesh: Mesh) -> None:
    """The metadata `triton_grpc_error` makes errors statuses."""
    with SyncStream(mesh.router.address, headers={"triton_grpc_error": "true"}) as stream:
        stream.send("nothing", {"text_input": "x"})
        response = await asyncio.to_thread(stream.next)
    assert response.error.startswith("[StatusCode.NOT_FOUND]")
    assert "Request for unknown model: 'nothing' is not found" in response.error
