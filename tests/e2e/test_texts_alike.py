"""One rule for texts, whatever the tokenizer, the door and the way of asking: texts are what transformers decodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
from e2e.text_doors import DOORS, PADDING, PROMPT, TOKENIZERS, Ask, World, world
from trtmesh.chassis.spellings import Speller
from trtmesh.client import FinishReason, Tokens
from trtmesh.client.options import build_config
from trtmesh.client.resumption import Progress
from trtmesh.v1 import router_pb2, router_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAYS = {"one": Ask(), "three": Ask(sequences=3), "beams": Ask(beams=2)}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(TOKENIZERS))
async def mesh(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    async with world(request.param, tmp_path_factory.mktemp("model")) as made:
        yield made


async def check(mesh: World, ask: Ask, expected: str, *, but: tuple[str, ...] = ()) -> None:
    """Every door has the text, for every sequence."""
    doors = {name: door for name, door in DOORS.items() if name not in but}
    for name, door in doors.items():
        texts = await asyncio.wait_for(door(mesh, ask), 60)
        assert texts == [expected] * max(ask.sequences, ask.beams), name


@pytest.mark.parametrize("way", WAYS)
async def test_prompt_and_text_are_the_text_of_all_ids(mesh: World, way: str) -> None:
    """Ids that only the model knows have no text, and special tokens are left out."""
    (end,) = mesh.tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    words = mesh.ids("fox doesn't mind, naïve Größe")
    unknown = range(mesh.size, mesh.size + PADDING - 1)
    mesh.backend.script = [unknown[0], *words[:3], end, unknown[7], *words[3:], unknown[-1]]
    await check(mesh, WAYS[way], mesh.continuation(words))


@pytest.mark.parametrize("received", [0, 1, 4])
async def test_resumed_text_goes_on(mesh: World, received: int) -> None:
    """With what the client has received, on whatever worker and tokenizer."""
    words = mesh.ids("fox doesn't mind, naïve Größe")
    mesh.backend.script = [mesh.size, *words]
    asked = router_pb2.GenerateRequest(
        request_id=f"resumed-{received}", config=build_config(None, Ask().native())
    )
    asked.items.add().prompt.text = PROMPT
    progress, text = Progress(asked), ""
    events = mesh.client.generate([PROMPT], config=asked.config, request_id=asked.request_id)
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Tokens) and event.token_offset + len(event.token_ids) > received:
                break
            progress.add(event)
            text += event.text if isinstance(event, Tokens) else ""
    async with grpc.aio.insecure_channel(mesh.triton.address) as channel:
        stub: Any = router_pb2_grpc.MeshServiceStub(channel)
        async for response in stub.Resume(progress.rest()):
            text += "".join(e.tokens.text for e in response.events if e.HasField("tokens"))
    assert text == mesh.continuation(words)


@pytest.mark.parametrize("way", WAYS)
async def test_special_token_is_a_stop_word(mesh: World, way: str) -> None:
    (end,) = mesh.tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    words = mesh.ids("fox jumps")
    mesh.backend.script = [*words, end, *mesh.ids("over the lazy dog")]
    ask = WAYS[way]
    expected = mesh.continuation(words)
    # The contract of TrtllmService has no stop texts in a beam search.
    but = ("trtllm service",) if ask.beams > 1 else ()
    for stop in ("<|im_end|>", f"{expected[-2:]}<|im_end|>"):
        asked = Ask(["never", stop], sequences=ask.sequences, beams=ask.beams)
        # The core model stops at the ids of a word, not at its text.
        await check(mesh, asked, expected, but=(*but, "core") if expected[-2:] in stop else but)


async def test_stop_word_before_min_tokens_is_passed_over(mesh: World) -> None:
    (end,) = mesh.tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    words = mesh.ids("fox jumps over the lazy dog")
    mesh.backend.script = [*words[:2], end, *words[2:4], end, *words[4:]]
    await check(mesh, Ask(["<|im_end|>"], min_tokens=2), mesh.continuation(words[:2]))
    await check(mesh, Ask(["<|im_end|>"], min_tokens=3), mesh.continuation(words[:4]))


async def test_end_of_the_tokenizer_ends(mesh: World) -> None:
    """Though the model has another. A gateway passes it on itself."""
    (end,) = mesh.tokenizer.convert_tokens_to_ids(["</s>"])
    words = mesh.ids("fox jumps")
    mesh.backend.script = [*words, end, *words]
    await check(mesh, Ask(), mesh.continuation(words), but=("trtllm service",))


async def test_bad_words_are_forbidden_in_the_same_spellings(mesh: World) -> None:
    mesh.backend.script = mesh.ids("fox")
    speller = Speller(mesh.tokenizer.backend_tokenizer)
    for bad in (["dog", "quick"], [" dog"], ["<|im_end|>"]):
        expected = {tuple(ids) for word in bad for ids in speller.spellings(word)}
        for name, door in DOORS.items():
            del mesh.backend.items[:]
            await asyncio.wait_for(door(mesh, Ask(bad=bad)), 60)
            (item,) = mesh.backend.items
            assert set(item.config.stopping.bad_token_ids) == expected, name


async def test_biases_are_alike(mesh: World) -> None:
    """The core model gets them as preprocessing makes them, one for each id of the tokenizer."""
    mesh.backend.script = mesh.ids("fox")
    speller = Speller(mesh.tokenizer.backend_tokenizer)
    expected = np.zeros(mesh.size + PADDING)
    for ids in speller.encode(["dog", "<|im_end|>"]):
        expected[ids] += 2.5
    for name, door in DOORS.items():
        if name != "trtllm service":
            del mesh.backend.items[:]
            await asyncio.wait_for(door(mesh, Ask(bias=["dog", "<|im_end|>"])), 60)
            sampling = mesh.backend.items[0].config.sampling
            got = np.array(sampling.embedding_bias or expected * 0)
            words, weights = sampling.embedding_bias_token_ids, sampling.embedding_bias_weights
            for word, weight in zip(words, weights, strict=True):
                got[list(word)] += weight
            assert got.tolist() == expected.tolist(), name


async def test_input_beyond_the_vocabulary_of_the_model_is_an_error(mesh: World) -> None:
    mesh.backend.script = mesh.ids("fox")
    (item,) = await mesh.client.complete([[mesh.size + PADDING]], max_tokens=1)
    assert item.error is not None
    assert item.error.reason == "TOKEN_OUT_OF_VOCABULARY"
    (item,) = await mesh.client.complete([[mesh.size + PADDING - 1]], max_tokens=100)
    assert (item.error, item.reason) == (None, FinishReason.LENGTH)
