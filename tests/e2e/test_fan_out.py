"""One request of many prompts: each item fails, stops and finishes on its own."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence

import pytest
from e2e.mesh import DEMO_VOCABULARY, Mesh, decode, eventually, scrape
from trtmesh.chassis.errors import (
    AlreadyExists,
    InvalidField,
    ModelNotFound,
    PromptEmpty,
    PromptTooLong,
    TokenOutOfVocabulary,
    TrtmeshError,
    UnsupportedField,
)
from trtmesh.client import (
    FinishReason,
    GenerateItem,
    GenerationConfig,
    ItemResult,
    Prompt,
    PromptLike,
    PromptTuningConfig,
    TokenIds,
)
from trtmesh.client.options import build_config

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 40
MOST_TOKENS = 8000
"""Tokens of an item to be stopped: more than it can get."""


async def test_items_are_independent(mesh: Mesh) -> None:
    prompts = [f"prompt number {index}" for index in range(24)]
    before = await scrape(mesh.router)
    reader = mesh.open(prompts, max_tokens=TOKENS)
    items = await reader.result()
    check_metrics(before, await scrape(mesh.router), items)
    alone = await asyncio.gather(
        *(mesh.client.complete([prompt], max_tokens=TOKENS) for prompt in prompts[:8])
    )
    assert [items[index].token_ids for index in range(8)] == [item.token_ids for (item,) in alone]
    for item in items:
        assert item.error is None
        assert item.reason is FinishReason.LENGTH
        assert len(item.token_ids) == item.usage.generated_tokens == TOKENS
        assert item.started
        assert item.usage.prompt_tokens == item.started.prompt_tokens > 0
        assert item.text == decode(item.token_ids)
    assert len({item.token_ids for item in items}) == 24
    await mesh.idle()


def check_metrics(
    before: Mapping[str, float], after: Mapping[str, float], items: Sequence[ItemResult]
) -> None:
    """Checks the router's counters and histograms against these single-sequence items."""

    def gained(name: str) -> float:
        name = f"trtmesh_router_{name}"
        return after[name] - before.get(name, 0.0)

    prompt_tokens = sum(item.usage.prompt_tokens for item in items)
    generated_tokens = sum(item.usage.generated_tokens for item in items)
    genai = ("time_to_first_token", "time_per_output_token")
    first, each = (f"gen_ai_server_{name}_seconds" for name in genai)
    counts = [after[f"{name}_count"] - before.get(f"{name}_count", 0.0) for name in (first, each)]
    assert counts == [len(items)] * 2
    assert gained("queue_seconds_count") == len(items)
    waited = after[f"{first}_sum"] - before.get(f"{first}_sum", 0.0)
    assert waited > gained("queue_seconds_sum") > 0
    between = after[f"{each}_sum"] - before.get(f"{each}_sum", 0.0)
    assert 0 < between <= gained("inter_token_seconds_sum")
    # Tokens of one message are one observation.
    assert 0 < gained("inter_token_seconds_count") <= generated_tokens - len(items)
    assert gained("inter_token_seconds_sum") > 0
    assert gained("prompt_tokens_per_item_count") == len(items)
    assert gained("prompt_tokens_per_item_sum") == gained("tokens_in_total") == prompt_tokens
    assert gained("generated_tokens_per_item_count") == len(items)
    assert gained("generated_tokens_per_item_sum") == gained("tokens_out_total") == generated_tokens


BROKEN: dict[str, tuple[PromptLike, TrtmeshError]] = {
    "empty text": ("", PromptEmpty()),
    "no ids": ([], PromptEmpty()),
    "over-long": ([9] * 9000, PromptTooLong(field="prompt", value="9000", limit="below 8192")),
    # Only a beginning is encoded, of five characters for eight tokens that a worker takes.
    "over-long text": (
        "\U0001f600" * 20_000,
        PromptTooLong(field="prompt", value=str(4 * (8191 * 5 // 8)), limit="below 8192"),
    ),
    "outside the vocabulary": (
        [9, DEMO_VOCABULARY],
        TokenOutOfVocabulary(
            field="prompt.token_ids",
            value=str(DEMO_VOCABULARY),
            limit=f"below {DEMO_VOCABULARY}",
        ),
    ),
    "no prompt": (Prompt(), InvalidField(field="prompt")),
    "invalid field": (
        GenerateItem(prompt=Prompt(text="x"), config=build_config(None, {"top_p": 2.0})),
        InvalidField.of("sampling.top_p", 2.0, "in [0, 1]"),
    ),
    "unsupported field": (
        GenerateItem(
            prompt=Prompt(text="x"),
            config=GenerationConfig(prompt_tuning=PromptTuningConfig(vocabulary_size=3)),
        ),
        UnsupportedField(field="prompt_tuning.vocabulary_size"),
    ),
    "more sequences than the engine has": (
        GenerateItem(
            prompt=Prompt(text="x"), config=build_config(None, {"num_return_sequences": 200})
        ),
        InvalidField.of(
            "sampling.num_return_sequences", 200, "at most 16, the limit of model demo"
        ),
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
async def test_broken_item_fails_alone(mesh: Mesh, kind: str) -> None:
    prompt, expected_error = BROKEN[kind]
    good: list[PromptLike] = ["good one", "good two"]
    expected = await mesh.client.complete(good, max_tokens=TOKENS)
    items = await mesh.open([good[0], prompt, good[1]], max_tokens=TOKENS).result()
    assert type(items[1].error) is type(expected_error)
    assert _data(items[1].error) == _data(expected_error)
    assert not items[1].token_ids
    for item, whole in zip((items[0], items[2]), expected, strict=True):
        assert (item.error, item.token_ids, item.text) == (None, whole.token_ids, whole.text)
    await mesh.idle()


def _data(error: TrtmeshError) -> tuple[object, ...]:
    return error.fields, error.value, error.limit, error.batch_index


async def test_invalid_request_fails_whole(mesh: Mesh) -> None:
    with pytest.raises(ModelNotFound) as unknown:
        await mesh.client.complete(["x"], model="other", max_tokens=1)
    assert _data(unknown.value) == (("model",), "'other'", "one of demo", None)
    with pytest.raises(InvalidField) as refused:
        await mesh.client.complete([Prompt(), Prompt()], max_tokens=1)
    assert _data(refused.value) == (("prompt",), "", "", 0)
    with pytest.raises(InvalidField) as refused:
        await mesh.client.complete(["x"], top_p=2.0)
    assert (refused.value.field, refused.value.value) == ("sampling.top_p", "2.0")
    with pytest.raises(InvalidField) as refused:
        await mesh.client.complete([], max_tokens=1)
    assert (refused.value.field, refused.value.value) == ("items", "0")
    with pytest.raises(InvalidField) as refused:
        await mesh.client.complete(["x"], request_id="x" * 257, max_tokens=1)
    assert refused.value.field == "request_id"
    assert refused.value.limit == "printable and have at most 256 characters"


async def test_request_id_is_unique_among_live_requests(mesh: Mesh) -> None:
    reader = mesh.open(["x"], request_id="twice", max_tokens=MOST_TOKENS)
    await reader.tokens_here(1)
    with pytest.raises(AlreadyExists) as refused:
        await mesh.client.complete(["y"], request_id="twice", max_tokens=1)
    assert refused.value.field == "request_id"
    assert await mesh.client.stop("twice") == 1
    assert (await reader.result())[0].reason is FinishReason.STOPPED
    (item,) = await mesh.client.complete(["y"], request_id="twice", max_tokens=1)
    assert item.error is None
    assert await mesh.client.stop("twice") == 0


async def test_stop_ends_the_named_items_only(mesh: Mesh) -> None:
    stopped = (1, 4)
    items_asked = [
        GenerateItem(
            prompt=Prompt(text=f"item {index}"),
            config=build_config(None, {"max_tokens": MOST_TOKENS if index in stopped else 60}),
        )
        for index in range(6)
    ]
    reader = mesh.open(items_asked, request_id="some")
    await reader.until(lambda r: all(r.tokens(index) > 5 for index in range(6)))
    assert await mesh.client.stop("some", [1, 4]) == 2
    items = await reader.result()
    for index, item in enumerate(items):
        if index in stopped:
            assert item.reason is FinishReason.STOPPED
            assert 5 < len(item.token_ids) < MOST_TOKENS
        else:
            assert item.reason is FinishReason.LENGTH
            assert len(item.token_ids) == 60
        assert item.usage.generated_tokens == len(item.token_ids)
        assert item.text == decode(item.token_ids)
    await mesh.idle()


async def test_stop_without_items_ends_all(mesh: Mesh) -> None:
    reader = mesh.open([f"item {i}" for i in range(6)], request_id="all", max_tokens=MOST_TOKENS)
    await reader.until(lambda r: all(r.tokens(index) > 5 for index in range(6)))
    assert await mesh.client.stop("all") == 6
    assert {item.reason for item in await reader.result()} == {FinishReason.STOPPED}
    await mesh.idle()


async def test_stop_ends_an_item_in_its_encode_stage(mesh: Mesh) -> None:
    # Frozen, to encode nothing before the stop.
    mesh.tokenizers[0].signal(signal.SIGSTOP)
    reader = mesh.open(
        ["word " * 200_000, "short"], request_id="encoding", max_tokens=50, text=False
    )

    async def both_encode() -> bool:
        return await mesh.stages() == ["encode", "encode"]

    await eventually(both_encode)
    assert await mesh.client.stop("encoding", [0]) == 1
    mesh.tokenizers[0].signal(signal.SIGCONT)
    items = await reader.result()
    assert items[0].reason is FinishReason.STOPPED
    assert items[0].started is None
    assert items[1].reason is FinishReason.LENGTH
    assert len(items[1].token_ids) == 50
    await mesh.idle()


@pytest.mark.parametrize("rounds", [10, pytest.param(100, marks=pytest.mark.soak)])
async def test_stop_ends_items_of_any_stage(mesh: Mesh, rounds: int) -> None:
    """An item of any stage ends with one terminal event."""
    for number in range(rounds):
        reader = mesh.open(["x", [5, 6]], request_id=f"soon {number}", max_tokens=MOST_TOKENS)
        # mypy cannot infer a lambda with defaults, which bind the loop variables.
        await eventually(lambda name=f"soon {number}": mesh.client.stop(name))  # type: ignore[misc]
        assert {item.reason for item in await reader.result()} == {FinishReason.STOPPED}
    await mesh.idle()


async def test_sequences_of_an_item_differ(mesh: Mesh) -> None:
    reader = mesh.open(
        ["several", "sequences"], num_return_sequences=3, temperature=1.0, seed=5, max_tokens=TOKENS
    )
    for item in await reader.result():
        assert len(item.sequences) == 3
        assert len({sequence.token_ids for sequence in item.sequences}) == 3
        for sequence in item.sequences:
            assert len(sequence.token_ids) == TOKENS
            assert sequence.text == decode(sequence.token_ids)
        assert item.usage.generated_tokens == 3 * TOKENS
    await mesh.idle()


async def test_round_robin_uses_both_engines(mesh: Mesh) -> None:
    answer = await mesh.admin.set_policy("round_robin")
    try:
        items = await mesh.open([f"item {index}" for index in range(8)], max_tokens=8).result()
    finally:
        await mesh.admin.set_policy(answer.previous)
    workers = [item.started.worker for item in items if item.started]
    assert len(workers) == 8
    assert {workers.count(worker) for worker in workers} == {4}


async def test_token_ids_of_a_prompt_are_used_unchanged(mesh: Mesh) -> None:
    ids = list(range(100, 120))
    (item,) = await mesh.client.complete([ids], max_tokens=4, exclude_prompt=False)
    assert item.started
    assert item.started.prompt_token_ids == tuple(ids)
    prompt = Prompt(token_ids=TokenIds(ids=ids))
    (same,) = await mesh.client.complete([prompt], max_tokens=4)
    assert same.token_ids == item.token_ids
    assert same.started
    assert same.started.prompt_token_ids == ()
