"""Clients of the whole mesh get the tokens of transformers' `generate`, in any batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.mesh import DEMO_DRAFT, PATIENT, Mesh, decode, running_mesh, tokenizer_of
from oracle import tiny_models
from transformers import PreTrainedModel
from trtmesh.client import FinishReason, ItemResult

NEW_TOKENS = 12
SAMPLED_TOKENS = 24

TEXTS = (
    "The quick brown fox",
    "A request",
    "it is not quick. naïve 😀 and then some more words that fill a few blocks of the cache with what they say",
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@asynccontextmanager
async def serving(folder: Path, engines: int = 1) -> AsyncIterator[Mesh]:
    """A router, a tokenizer and engines with the model in float32."""
    flags = (
        *("--model-dir", str(folder), "--torch-dtype", "float32", "--torch-threads", "1"),
        *("--torch-kv-cache-tokens", "4096"),
    )
    started = running_mesh(
        engines=engines, engine_flags=flags, router_flags=PATIENT, model_dir=folder
    )
    async with started as mesh:
        yield mesh


def prompts_of(count: int) -> list[str]:
    """Texts of many lengths, all different."""
    return [f"{TEXTS[index % len(TEXTS)]} {index}" for index in range(count)]


def encode(folder: Path, text: str) -> list[int]:
    return list(tokenizer_of(folder).encode(text).ids)


async def all_alone_and_at_once(mesh: Mesh, prompts: Sequence[str]) -> list[ItemResult]:
    """Sends each prompt as a request, all at the same time."""
    answers = await asyncio.gather(
        *(
            mesh.client.complete([prompt], max_tokens=NEW_TOKENS, ignore_end_id=True)
            for prompt in prompts
        )
    )
    return [item for (item,) in answers]


@pytest.mark.parametrize("name", ["llama", DEMO_DRAFT.name])
async def test_ids_and_texts_equal_generate(name: str, tmp_path: Path) -> None:
    """Other families differ only in the engine; tests/engine/torch/test_greedy.py covers them all."""
    folder = DEMO_DRAFT if name == DEMO_DRAFT.name else tiny_models.build(tmp_path / name, name)
    prompts = prompts_of(17)
    model = tiny_models.reference_model(folder)
    ids = [encode(folder, prompt) for prompt in prompts]
    expected = [tiny_models.greedy(model, prompt, NEW_TOKENS) for prompt in ids]
    assert len({tuple(each) for each in expected}) > 8, "the oracle has nothing to say"
    async with serving(folder) as mesh:
        for count in (1, 3, 17):
            items = await all_alone_and_at_once(mesh, prompts[:count])
            assert [list(item.token_ids) for item in items] == expected[:count]
            for item, prompt in zip(items, ids, strict=False):
                assert item.error is None
                assert item.text == decode(item.token_ids, folder)
                assert item.usage.prompt_tokens == len(prompt)
                assert item.usage.generated_tokens == NEW_TOKENS
        await sampled_streams_do_not_depend_on_companions(mesh, prompts)
        await the_end_id_ends_a_stream(mesh, prompts[0], expected[0])
        await log_probs_are_parallel_to_the_tokens(mesh, model, ids[0], expected[0])
        await mesh.idle()
        assert await mesh.engines[0].stop() == 0


async def sampled_streams_do_not_depend_on_companions(mesh: Mesh, prompts: Sequence[str]) -> None:
    """A seed decides a stream, alone and among 16 others."""
    sampled: dict[str, Any] = {
        "max_tokens": SAMPLED_TOKENS,
        "ignore_end_id": True,
        "temperature": 1.0,
        "top_p": 0.9,
    }
    (alone,) = await mesh.client.complete([prompts[0]], seed=7, **sampled)
    (other,) = await mesh.client.complete([prompts[0]], seed=8, **sampled)
    assert alone.token_ids != other.token_ids
    among = await asyncio.gather(
        mesh.client.complete([prompts[0]], seed=7, **sampled),
        *(
            mesh.client.complete([prompt], seed=seed, **sampled)
            for seed, prompt in enumerate(prompts[1:], 100)
        ),
    )
    assert among[0][0].token_ids == alone.token_ids
    assert among[0][0].text == alone.text
    (unseeded,) = await mesh.client.complete([prompts[0]], **sampled)
    assert unseeded.started
    (again,) = await mesh.client.complete(
        [prompts[0]],
        seed=unseeded.started.seed,
        **sampled,
    )
    assert again.token_ids == unseeded.token_ids


async def the_end_id_ends_a_stream(mesh: Mesh, prompt: str, ids: Sequence[int]) -> None:
    """A frequent id, declared the end id."""
    end_id = ids[4]
    (item,) = await mesh.client.complete([prompt], max_tokens=NEW_TOKENS, end_id=end_id)
    assert list(item.token_ids) == list(ids[: ids.index(end_id) + 1])
    assert item.reason is FinishReason.END_ID
    finished = item.sequences[0].finished
    assert finished
    assert finished.stop_token_ids == (end_id,)


async def log_probs_are_parallel_to_the_tokens(
    mesh: Mesh, model: PreTrainedModel, prompt: Sequence[int], ids: Sequence[int]
) -> None:
    """Each token's log-probability is the model's after all earlier tokens, however tokens and texts were cut."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits.float(), -1)[range(len(ids)), list(ids)]
    (item,) = await mesh.client.complete(
        [prompt], max_tokens=NEW_TOKENS, ignore_end_id=True, log_probs=True
    )
    (sequence,) = item.sequences
    assert list(sequence.token_ids) == list(ids)
    found: list[float] = []
    for chunk in sequence.chunks:
        assert chunk.details
        assert len(chunk.details.log_probs) == len(chunk.token_ids)
        found += chunk.details.log_probs
    torch.testing.assert_close(torch.tensor(found), expected, atol=1e-3, rtol=1e-3)
