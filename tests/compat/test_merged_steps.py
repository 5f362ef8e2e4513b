"""Several steps in one message: details end at the token that completes a stop text, on every door."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import pytest_asyncio
from compat.triton import Response, Triton
from e2e.mesh import DEMO_VOCABULARY, PATIENT, Mesh, decode, eventually, running_mesh, tokenizer_of
from engine.config_fields import LEAVES
from engine_streams import serving
from recording_backend import INFO, RecordingBackend
from trtmesh.client import FinishReason
from trtmesh.engine.backend import TokenDetails

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODELS = {
    name: {"template": name.removeprefix("each_"), "merge_tokens": not name.startswith("each_")}
    for name in (
        *("ensemble", "tensorrt_llm_bls", "tensorrt_llm"),
        *("each_ensemble", "each_tensorrt_llm_bls", "each_tensorrt_llm"),
    )
}
TEXT = "def area(self, width):\n    return self.width * width"
STOP = "width)"
LOG_PROBS = [-(2.0**-n) for n in range(24)]
"""Every sum of a beginning is different."""


def token_ids() -> list[int]:
    return list(tokenizer_of().encode(TEXT, add_special_tokens=False).ids)


def kept_tokens(ids: Sequence[int]) -> int:
    """Number of tokens up to the token that completes the stop text."""
    return next(count for count in range(len(ids)) if STOP in decode(ids[:count]))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend() -> RecordingBackend:
    info = replace(
        INFO,
        model="demo",
        vocabulary_size=DEMO_VOCABULARY,
        supported_fields=frozenset(LEAVES),
    )
    return RecordingBackend(info)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(backend: RecordingBackend) -> AsyncIterator[Mesh]:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(serving(backend))

        async def start(mesh: Mesh) -> None:
            await mesh.start_tokenizer()
            # The engine runs in this process; the router only needs an address.
            mesh.engines.append(engine)  # type: ignore[arg-type]
            await mesh.start_router(*PATIENT, "--triton-models", json.dumps(MODELS))
            await mesh.ready(1, 1)

        yield await stack.enter_async_context(running_mesh(start=start))


async def generate(
    backend: RecordingBackend, sizes: Sequence[int], *, normalized: bool = False
) -> None:
    """Delivers the text to the next item, in steps of `sizes` tokens and the rest."""

    async def arrived() -> bool:
        return bool(backend.live)

    await eventually(arrived)
    (key,) = backend.live
    ids, start = token_ids(), 0
    for size in [*sizes, len(ids)]:
        end = min(start + size, len(ids))
        details = TokenDetails(key, LOG_PROBS[start:end], sum(LOG_PROBS[:end]))
        if normalized:
            details.model_log_probs = details.log_probs
            details.log_probs = [0.0] * (end - start)
        if start < end and backend.live:
            backend.step({key: ids[start:end]}, start, details=[details])
        start = end


SIZES = [(), (1,), (3, 2), (5, 1, 1), (4, 4)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("stream", [True, False])
async def test_native_sum_ends_with_the_stop_text(
    mesh: Mesh, backend: RecordingBackend, sizes: Sequence[int], stream: bool
) -> None:
    reader = mesh.open(["x"], stop_texts=[STOP], log_probs=True, stream=stream)
    await generate(backend, sizes)
    ((sequence,),) = [item.sequences for item in await reader.result()]
    kept = kept_tokens(token_ids())
    assert sequence.reason is FinishReason.STOP_WORD
    assert sequence.token_ids == tuple(token_ids()[:kept])
    assert sequence.log_probs == tuple(LOG_PROBS[:kept])
    assert sequence.finished
    assert sequence.finished.cumulative_log_prob == sum(LOG_PROBS[:kept])
    sums = list(accumulate(LOG_PROBS))
    for chunk in sequence.chunks:
        if chunk.token_ids:
            assert chunk.details
            end = chunk.token_offset + len(chunk.token_ids)
            assert chunk.details.cumulative_log_prob == sums[end - 1]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize("stream", [True, False])
async def test_cum_log_probs_end_with_the_stop_word(
    triton: Triton, backend: RecordingBackend, sizes: Sequence[int], model: str, stream: bool
) -> None:
    tensors: dict[str, Any] = {"text_input": "x", "max_tokens": 24, "return_log_probs": True}
    tensors |= {"stop_words": [STOP], "stream": stream, "exclude_input_in_output": True}
    answer = asyncio.create_task(triton.stream(model, tensors))
    await generate(backend, sizes)
    responses = [response for response in await answer if response.outputs]
    assert not any(response.error for response in responses)
    text = "".join(response.text for response in responses)
    kept = kept_tokens(token_ids())
    assert text == TEXT[: TEXT.index(STOP) + len(STOP)]
    assert told_log_probs(responses) == LOG_PROBS[:kept]
    assert responses[-1].outputs["cum_log_probs"].tolist() == [[sum(LOG_PROBS[:kept])]]


@pytest.mark.parametrize("sizes", SIZES)
async def test_sum_of_normalized_log_probs_ends_with_the_stop_text(
    mesh: Mesh, backend: RecordingBackend, sizes: Sequence[int]
) -> None:
    reader = mesh.open(["x"], stop_texts=[STOP], log_probs=True, normalize_log_probs=True)
    await generate(backend, sizes, normalized=True)
    ((sequence,),) = [item.sequences for item in await reader.result()]
    kept = kept_tokens(token_ids())
    assert sequence.token_ids == tuple(token_ids()[:kept])
    assert sequence.log_probs == (0.0,) * kept
    assert sequence.finished
    assert sequence.finished.cumulative_log_prob == sum(LOG_PROBS[:kept])


def told_log_probs(responses: Sequence[Response]) -> list[float]:
    return [
        value for each in responses for value in each.outputs["output_log_probs"].ravel().tolist()
    ]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls", "native"])
async def test_min_tokens_hold_stop_words_back(
    mesh: Mesh, triton: Triton, backend: RecordingBackend, sizes: Sequence[int], model: str
) -> None:
    """As on the core model."""
    word, ids = "width", token_ids()
    count = next(count for count in range(len(ids)) if word in decode(ids[:count]))
    if model == "native":
        reader = mesh.open(["x"], stop_texts=[word], include_stop_text=True, min_tokens=count)
        await generate(backend, sizes)
        ((sequence,),) = [item.sequences for item in await reader.result()]
        assert sequence.reason is FinishReason.STOP_WORD
        text = sequence.text
    else:
        tensors = {"text_input": "x", "max_tokens": 24, "stop_words": [word], "min_tokens": count}
        answer = asyncio.create_task(triton.stream(model, {**tensors, "stream": True}))
        await generate(backend, sizes)
        text = "".join(response.text for response in await answer if response.outputs)
    second = TEXT.index(word, TEXT.index(word) + 1)
    assert text == TEXT[: second + len(word)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls", "tensorrt_llm"])
@pytest.mark.parametrize("detailed", [False, True])
async def test_unmerged_streams_have_a_response_for_each_token(
    triton: Triton, backend: RecordingBackend, sizes: Sequence[int], model: str, detailed: bool
) -> None:
    count = len(token_ids())
    asked: dict[str, Any] = {"text_input": "x", "max_tokens": count, "stream": True}
    if model == "tensorrt_llm":
        asked = {"input_ids": [5], "input_lengths": 1, "request_output_len": count}
        asked["streaming"] = True
    if detailed:
        asked["return_log_probs"] = True
    merged: list[Response] = []
    apart: list[Response] = []
    for name, told in ((model, merged), (f"each_{model}", apart)):
        answer = asyncio.create_task(triton.stream(name, asked))
        await generate(backend, sizes)
        backend.end(*list(backend.live))
        told += [response for response in await answer if response.outputs]
    with_tokens = [r for r in apart if not detailed or r.outputs["output_log_probs"].size]
    assert count <= len(with_tokens) <= len(apart) <= count + 1
    if model == "tensorrt_llm":
        ids = [response.outputs["output_ids"].ravel().tolist() for response in apart]
        assert [each for each in ids if each] == [[token] for token in token_ids()]
    else:
        assert "".join(r.text for r in apart) == "".join(r.text for r in merged) == TEXT
    if detailed:
        assert told_log_probs(apart) == told_log_probs(merged) == LOG_PROBS[:count]
        sums = [response.outputs["cum_log_probs"].item() for response in apart]
        assert sums[:count] == list(accumulate(LOG_PROBS[:count]))
