"""Several outputs of a prompt through the whole mesh: beams, streamed and not, sampled sequences, prompt tables."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from cli.commands import trtmesh
from e2e.mesh import Mesh, decode
from oracle import tiny_models
from oracle.beams import TOKENS, Beams, expected
from oracle.test_mesh_equals_generate import encode, serving
from transformers import PreTrainedModel
from trtmesh.client import FinishReason, ItemResult, Tokens
from trtmesh.v1 import generation_pb2 as pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "it is not quick. naïve 😀 and then"
WIDTH = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_models.build(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return tiny_models.reference_model(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(folder: Path) -> AsyncIterator[Mesh]:
    async with serving(folder) as mesh:
        yield mesh
        await mesh.idle()


async def search(mesh: Mesh, **options: Any) -> ItemResult:
    """Runs a search and checks every event on arrival."""
    given = {"max_tokens": TOKENS, "ignore_end_id": True, "beam_width": WIDTH, **options}
    (item,) = await mesh.open([PROMPT], **given).result()
    assert item.error is None
    return item


def same(item: ItemResult, theirs: Beams, folder: Path) -> None:
    assert [list(sequence.token_ids) for sequence in item.sequences] == [ids for ids, _ in theirs]
    for sequence, (ids, score) in zip(item.sequences, theirs, strict=True):
        assert sequence.text == decode(ids, folder)
        assert sequence.finished
        assert sequence.finished.cumulative_log_prob == pytest.approx(score, abs=1e-2)
        log_probs = [v for c in sequence.chunks if c.details for v in c.details.log_probs]
        assert sum(log_probs) == pytest.approx(score, abs=1e-2)
        assert len(log_probs) == len(ids)


@pytest.mark.parametrize("stream", [True, False])
async def test_beams(mesh: Mesh, model: PreTrainedModel, folder: Path, stream: bool) -> None:
    theirs = expected(model, encode(folder, PROMPT), WIDTH)
    item = await search(mesh, stream=stream, log_probs=True)
    same(item, theirs, folder)
    assert item.usage.generated_tokens == WIDTH * TOKENS
    assert item.reason is FinishReason.LENGTH
    if not stream:
        assert all(len(sequence.chunks) == 1 for sequence in item.sequences)
    item = await search(mesh, stream=stream, log_probs=True, num_return_sequences=2)
    same(item, theirs[:2], folder)


async def test_beams_are_told_again_when_they_change(mesh: Mesh) -> None:
    # Enough tokens for several events despite a slow reader.
    options: dict[str, Any] = {"max_tokens": 300, "ignore_end_id": True, "beam_width": WIDTH}
    reader = mesh.open([PROMPT], **options)
    (item,) = await reader.result()
    tokens = [event for event in reader.events if isinstance(event, Tokens)]
    again = [event for event in tokens if not event.token_offset]
    assert len(again) > WIDTH, "the search never changed its mind"
    (whole,) = await mesh.client.complete([PROMPT], stream=False, **options)
    assert [s.token_ids for s in item.sequences] == [s.token_ids for s in whole.sequences]
    assert [s.text for s in item.sequences] == [s.text for s in whole.sequences]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_text_ends_the_beams_that_have_it(
    mesh: Mesh, folder: Path, stream: bool
) -> None:
    whole = await search(mesh)
    texts = [sequence.text for sequence in whole.sequences]
    stop_text = next(
        text[at : at + 2]
        for text in texts
        for at in range(3, len(text) - 2)
        if any(text[at : at + 2] not in other for other in texts)
    )
    item = await search(mesh, stop_texts=[stop_text], stream=stream, log_probs=True)
    assert len({sequence.token_ids for sequence in item.sequences}) == WIDTH
    sums = [s.finished.cumulative_log_prob or 0.0 for s in item.sequences if s.finished]
    assert sums == sorted(sums, reverse=True)
    assert FinishReason.STOP_WORD in [sequence.reason for sequence in item.sequences]
    for sequence, total in zip(item.sequences, sums, strict=True):
        stopped = sequence.reason is FinishReason.STOP_WORD
        assert stopped == (stop_text in decode(sequence.token_ids, folder))
        assert stop_text not in decode(sequence.token_ids[:-1], folder)
        assert stop_text not in sequence.text
        assert sum(sequence.log_probs) == pytest.approx(total, abs=1e-2)


async def test_a_stopped_search_ends_all_its_beams(mesh: Mesh) -> None:
    options: dict[str, Any] = {"max_tokens": 300, "ignore_end_id": True, "beam_width": WIDTH}
    reader = mesh.open([PROMPT], request_id="search", **options)
    await reader.tokens_here(3)
    assert await mesh.client.stop("search") == 1
    (item,) = await reader.result()
    assert [sequence.reason for sequence in item.sequences] == [FinishReason.STOPPED] * WIDTH
    gone = mesh.open([PROMPT], **options)
    await gone.tokens_here(3)
    await gone.cancel()
    await mesh.idle()


async def test_the_command_prints_beams_once_they_are_final(
    mesh: Mesh, model: PreTrainedModel, folder: Path
) -> None:
    """A pipe cannot take text back, so only final text is printed."""
    theirs = expected(model, encode(folder, PROMPT), WIDTH, tokens=6, end_id=tiny_models.END_ID)
    flags = ("--router", mesh.router.address, "--max-tokens", "6", "--beam-width", str(WIDTH))
    result = await asyncio.to_thread(trtmesh, "generate", *flags, PROMPT)
    assert result.returncode == 0, result.stderr
    lines = "".join(
        f"[0.{number}] {line}\n"
        for number, (ids, _) in enumerate(theirs)
        for line in decode(ids, folder).split("\n")
    )
    assert result.stdout == lines
    result = await asyncio.to_thread(trtmesh, "generate", *flags, "--sequences", "1", PROMPT)
    assert result.stdout == decode(theirs[0][0], folder) + "\n"


async def test_sampled_sequences(mesh: Mesh) -> None:
    """Each sequence has independent draws, the same with or without the others."""
    options: dict[str, Any] = {"max_tokens": 16, "temperature": 1.0, "seed": 3}
    (item,) = await mesh.open([PROMPT], num_return_sequences=3, **options).result()
    streams = [sequence.token_ids for sequence in item.sequences]
    assert len(set(streams)) == 3
    (alone,) = await mesh.client.complete([PROMPT], **options)
    assert alone.token_ids == streams[0]
    (two,) = await mesh.client.complete([PROMPT], num_return_sequences=2, **options)
    assert [sequence.token_ids for sequence in two.sequences] == streams[:2]


async def test_prompt_tables(mesh: Mesh, model: PreTrainedModel, folder: Path) -> None:
    rows = torch.randn(3, 64, generator=torch.Generator().manual_seed(2)) * tiny_models.WEIGHT_STD
    prompt = [320, 321, 322, *encode(folder, PROMPT), 321]
    untyped: Any = model
    weight = untyped.get_input_embeddings().weight
    with torch.inference_mode():
        embeddings = torch.cat((weight, rows))[torch.tensor([prompt])]
        output = untyped.generate(
            inputs_embeds=embeddings,
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=tiny_models.PAD_ID,
        )
    table = pb.Tensor(data_type=pb.DATA_TYPE_FP32, shape=rows.shape, data=rows.numpy().tobytes())
    (item,) = await mesh.client.complete(
        [prompt],
        max_tokens=TOKENS,
        ignore_end_id=True,
        prompt_tuning=pb.PromptTuningConfig(embedding_table=table),
    )
    assert item.error is None
    assert list(item.token_ids) == output[0].tolist()
    assert item.text == decode(item.token_ids, folder)
    (refused,) = await mesh.client.complete([prompt], max_tokens=TOKENS)
    assert refused.error
    assert refused.error.reason == "TOKEN_OUT_OF_VOCABULARY"
