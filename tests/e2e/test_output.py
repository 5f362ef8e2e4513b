"""Output options: stop texts, streamed or whole, token ids only, seeds, log-probabilities, perf metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

import pytest
import pytest_asyncio
from e2e.mesh import (
    PATIENT,
    SIMULATED,
    WIDE_TOKENS,
    Mesh,
    decode,
    mesh_in_one_process,
    running_mesh,
)
from trtmesh.chassis.errors import UnsupportedField
from trtmesh.client import FinishReason, Tokens

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINE = (*SIMULATED, *WIDE_TOKENS, "--simulated-limits-max-sequence-tokens", "8192")


def services() -> AbstractAsyncContextManager[Mesh]:
    return running_mesh(engine_flags=ENGINE, router_flags=PATIENT)


def one_process() -> AbstractAsyncContextManager[Mesh]:
    return mesh_in_one_process(*ENGINE, router_flags=PATIENT)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[services, one_process])
async def mesh(request: pytest.FixtureRequest) -> AsyncIterator[Mesh]:
    """An engine whose tokens span the demo vocabulary."""
    async with request.param() as mesh:
        yield mesh


TOKENS = 60
MOST_TOKENS = 8000


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("start", [7, 40])
async def test_stop_text_spans_tokens(mesh: Mesh, start: int, include: bool) -> None:
    prompt = "find a stop text"
    (whole,) = await mesh.client.complete([prompt], max_tokens=TOKENS)
    stop_text = whole.text[whole.text.index(decode(whole.token_ids[start : start + 3])) :][1:9]
    position = whole.text.index(stop_text)
    reader = mesh.open(
        [prompt],
        max_tokens=5000,
        stop_texts=["no such text", stop_text],
        include_stop_text=include,
    )
    (item,) = await reader.result()
    assert item.text == whole.text[: position + (len(stop_text) if include else 0)]
    assert item.reason is FinishReason.STOP_WORD
    finished = item.sequences[0].finished
    assert finished
    assert finished.stop_text == stop_text
    count = len(item.token_ids)
    assert item.token_ids == whole.token_ids[:count]
    assert stop_text in decode(item.token_ids)
    assert stop_text not in decode(item.token_ids[:-1])
    assert item.usage.generated_tokens == count
    await mesh.idle()


async def test_beginning_of_a_stop_text_is_text(mesh: Mesh) -> None:
    (whole,) = await mesh.client.complete(["almost"], max_tokens=TOKENS)
    almost = whole.text[-4:] + "and then something else"
    (item,) = await mesh.client.complete(["almost"], max_tokens=TOKENS, stop_texts=[almost])
    assert item.text == whole.text
    assert item.reason is FinishReason.LENGTH


async def test_token_ids_only_need_no_tokenizer() -> None:
    async with running_mesh(tokenizers=0) as mesh:
        (item,) = await mesh.client.complete([[5, 6, 7]], max_tokens=TOKENS, text=False)
        assert item.error is None
        assert len(item.token_ids) == TOKENS
        assert item.text == ""
        (item,) = await mesh.client.complete([[5, 6, 7]], max_tokens=TOKENS)
        assert item.error
        assert item.error.reason in ("NO_TOKENIZER", "TOKENIZER_LOST")
        (item,) = await mesh.client.complete(["text"], max_tokens=TOKENS, text=False)
        assert item.error
        assert item.error.reason == "NO_TOKENIZER"
        await mesh.idle()


async def test_token_ids_only_open_no_decode_state(mesh: Mesh) -> None:
    reader = mesh.open(["x"], max_tokens=MOST_TOKENS, text=False, request_id="silent")
    await reader.tokens_here(50)
    assert (await mesh.gauges())["worker_sequences"] == 1
    assert (await mesh.gauges())["decode_sequences"] == 0
    assert await mesh.client.stop("silent") == 1
    (item,) = await reader.result()
    assert item.text == ""


async def test_stop_text_ends_a_sequence_of_token_ids_only(mesh: Mesh) -> None:
    (whole,) = await mesh.client.complete(["stop"], max_tokens=TOKENS)
    stop_text = decode(whole.token_ids[20:23])[1:]
    (item,) = await mesh.client.complete(
        ["stop"], max_tokens=5000, stop_texts=[stop_text], text=False
    )
    assert item.reason is FinishReason.STOP_WORD
    assert item.text == ""
    assert item.token_ids == whole.token_ids[: len(item.token_ids)]


async def test_unstreamed_sequence_comes_in_one_event(mesh: Mesh) -> None:
    (streamed,) = await mesh.client.complete(["x"], max_tokens=TOKENS)
    reader = mesh.open(["x"], max_tokens=TOKENS, stream=False, num_return_sequences=2)
    (item,) = await reader.result()
    tokens = [event for event in reader.events if isinstance(event, Tokens)]
    assert [event.sequence_index for event in tokens] in ([0, 1], [1, 0])
    for sequence in item.sequences:
        assert len(sequence.token_ids) == TOKENS
        assert sequence.text == decode(sequence.token_ids)
    assert item.token_ids == streamed.token_ids


async def test_drawn_seed_is_reported_and_repeats_the_stream(mesh: Mesh) -> None:
    prompts = ["a", "b"]
    first = await mesh.client.complete(prompts, max_tokens=TOKENS, temperature=1.0)
    second = await mesh.client.complete(prompts, max_tokens=TOKENS, temperature=1.0)
    assert first[0].token_ids != second[0].token_ids
    assert first[0].started
    seed = first[0].started.seed
    again = await mesh.client.complete(prompts, max_tokens=TOKENS, temperature=1.0, seed=seed)
    assert [item.token_ids for item in again] == [item.token_ids for item in first]


async def test_seed_determines_a_stream_in_any_batch(mesh: Mesh) -> None:
    async def sampled(prompt: str, seed: int) -> tuple[int, ...]:
        (item,) = await mesh.client.complete(
            [prompt], temperature=1.0, seed=seed, max_tokens=TOKENS
        )
        return item.token_ids

    alone = await sampled("x", 3)
    others = mesh.open([f"other {i}" for i in range(16)], temperature=1.0, max_tokens=3000)
    await others.tokens_here(5)
    assert await sampled("x", 3) == alone
    await others.cancel()


async def test_log_probs_are_refused_by_a_backend_without_them(mesh: Mesh) -> None:
    (item,) = await mesh.client.complete(["x"], max_tokens=2, log_probs=True)
    assert isinstance(item.error, UnsupportedField)
    assert "output.log_probs" in item.error.message


async def test_bad_texts_are_refused_by_a_backend_without_bad_words(mesh: Mesh) -> None:
    (item,) = await mesh.client.complete(["x"], max_tokens=2, bad_texts=["word"])
    assert isinstance(item.error, UnsupportedField)
    assert "stopping.bad_texts" in item.error.message


async def test_perf_metrics_come_on_request(mesh: Mesh) -> None:
    (item,) = await mesh.client.complete(["x"], max_tokens=5, perf_metrics=True)
    assert item.perf_metrics
    assert item.perf_metrics.first_token_time_ns <= item.perf_metrics.last_token_time_ns
    (item,) = await mesh.client.complete(["x"], max_tokens=5)
    assert item.perf_metrics is None
