"""Token controls and details through real processes: messages may be cut, details arrive whole."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from e2e.mesh import Mesh, running_mesh
from oracle import tiny_models
from process_constants import constants
from tokenizers import Tokenizer
from trtmesh.chassis.errors import InvalidField, UnsupportedField
from trtmesh.client import ItemResult, PromptDetails, Tokens
from trtmesh.v1 import generation_pb2 as pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

NEW_TOKENS = 10
PROMPT = "The quick brown fox jumps over the lazy dog and some more"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(tmp_path_factory.mktemp("llama"), "llama")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def torch_mesh(folder: Path) -> AsyncIterator[Mesh]:
    torch.set_num_threads(1)
    flags = (
        *("--model-dir", str(folder), "--torch-dtype", "float32", "--torch-threads", "1"),
        # Several steps a prompt, few rows a message.
        *("--torch-kv-cache-tokens", "2048", "--torch-batching-max-step-tokens", "8"),
        *constants(max_logits_bytes=300_000),
        *("--max-message-bytes", "65536"),
    )
    async with running_mesh(engine_flags=flags, model_dir=folder) as mesh:
        yield mesh


def ids_of(folder: Path, text: str) -> list[int]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def logits_of(folder: Path, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        rows: torch.Tensor = tiny_models.reference_model(folder)(torch.tensor([tokens])).logits[0]
    return rows


def values(tensor: pb.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    types = {pb.DATA_TYPE_FP32: np.float32, pb.DATA_TYPE_FP16: np.float16}
    flat = np.frombuffer(tensor.data, dtype=types[tensor.data_type])
    return torch.from_numpy(flat.astype(np.float32)).view(*tensor.shape)


def check(folder: Path, item: ItemResult) -> None:
    prompt = ids_of(folder, PROMPT)
    (sequence,) = item.sequences
    tokens = list(sequence.token_ids)
    expected = logits_of(folder, [*prompt, *tokens])
    details = item.prompt_details
    assert details
    torch.testing.assert_close(
        values(details.context_logits), expected[: len(prompt)], atol=2e-2, rtol=1e-2
    )
    log_probs = expected.double().log_softmax(dim=1)
    following = log_probs[range(len(prompt) - 1), prompt[1:]]
    assert list(details.log_probs) == pytest.approx(following.tolist(), abs=1e-3)
    assert len(details.top_log_probs) == len(prompt) - 1
    rows = expected[len(prompt) - 1 : -1]
    torch.testing.assert_close(values(sequence.generation_logits), rows, atol=2e-2, rtol=1e-2)
    chosen = log_probs[range(len(prompt) - 1, len(prompt) - 1 + len(tokens)), tokens]
    assert list(sequence.log_probs) == pytest.approx(chosen.tolist(), abs=1e-3)
    assert [top.token_ids[0] for top in sequence.top_log_probs] == rows.argmax(dim=1).tolist()
    assert sequence.finished
    assert sequence.finished.cumulative_log_prob == pytest.approx(float(chosen.sum()), abs=1e-3)


@pytest.mark.parametrize("stream", [True, False])
async def test_details_are_whole_and_parallel_to_the_tokens(
    torch_mesh: Mesh, folder: Path, stream: bool
) -> None:
    reader = torch_mesh.open(
        [PROMPT],
        max_tokens=NEW_TOKENS,
        ignore_end_id=True,
        prompt_log_probs=True,
        context_logits=True,
        generation_logits=True,
        logits_data_type=pb.DATA_TYPE_FP16,
        log_probs=True,
        top_log_probs=2,
        stream=stream,
    )
    (item,) = await reader.result()
    assert item.error is None
    check(folder, item)
    kinds = [type(event) for event in reader.events]
    assert kinds.index(Tokens) > max(at for at, kind in enumerate(kinds) if kind is PromptDetails)
    for event in reader.events:
        if isinstance(event, Tokens) and event.token_ids:
            assert event.details
            assert event.details.generation_logits.shape[0] == len(event.token_ids)


async def test_normalised_log_probs_reach_the_client(torch_mesh: Mesh) -> None:
    (item,) = await torch_mesh.client.complete(
        [PROMPT], max_tokens=3, ignore_end_id=True, log_probs=True, normalize_log_probs=True
    )
    (sequence,) = item.sequences
    assert sequence.log_probs == (0.0, 0.0, 0.0)
    assert sequence.finished
    (plain,) = await torch_mesh.client.complete(
        [PROMPT], max_tokens=3, ignore_end_id=True, log_probs=True
    )
    total = sequence.finished.cumulative_log_prob
    assert total == pytest.approx(sum(plain.sequences[0].log_probs), abs=1e-3)
    assert total is not None
    assert total < -0.01


async def test_bias_texts_and_bad_texts_steer_the_model(torch_mesh: Mesh, folder: Path) -> None:
    shape: dict[str, Any] = {"max_tokens": NEW_TOKENS, "ignore_end_id": True}
    prompt = ids_of(folder, PROMPT)
    model = tiny_models.reference_model(folder)
    (plain,) = await torch_mesh.client.complete([PROMPT], **shape)
    assert list(plain.token_ids) == tiny_models.greedy(model, prompt, NEW_TOKENS)
    quick, dog = ids_of(folder, " quick"), ids_of(folder, "dog")
    bias = {(token,): 4.0 * quick.count(token) for token in quick}
    for token in dog:
        bias[token,] = bias.get((token,), 0.0) + 3.0 * dog.count(token)
    (biased,) = await torch_mesh.client.complete(
        [PROMPT],
        embedding_bias_texts=[" quick"],
        embedding_bias_token_ids=[dog],
        embedding_bias_weights=[4.0, 3.0],
        **shape,
    )
    expected = tiny_models.greedy(model, prompt, NEW_TOKENS, sequence_bias=bias)
    assert list(biased.token_ids) == expected
    # A text of several ids: the model may begin but not complete it.
    word = "over the"
    strong: dict[str, Any] = {"embedding_bias_texts": [word], "embedding_bias_weights": [50.0]}
    (tempted,) = await torch_mesh.client.complete([PROMPT], **strong, **shape)
    ids = ids_of(folder, word)
    assert len(ids) > 1
    both = {(token,): 50.0 * ids.count(token) for token in ids}
    (steered,) = await torch_mesh.client.complete(
        [PROMPT],
        bad_texts=[word],
        **strong,
        **shape,
    )
    assert list(steered.token_ids) == tiny_models.greedy(
        model, prompt, NEW_TOKENS, sequence_bias=both, bad_words_ids=[ids]
    )
    assert list(tempted.token_ids) == tiny_models.greedy(
        model, prompt, NEW_TOKENS, sequence_bias=both
    )


async def test_perf_metrics_and_prompt_ids_come_on_request(torch_mesh: Mesh, folder: Path) -> None:
    prompt = "A prompt that no other test of this file sends " * 3
    shape: dict[str, Any] = {"max_tokens": 5, "ignore_end_id": True, "perf_metrics": True}
    (item,) = await torch_mesh.client.complete([prompt], exclude_prompt=False, **shape)
    assert item.started
    ids = ids_of(folder, prompt)
    assert list(item.started.prompt_token_ids) == ids
    metrics = item.perf_metrics
    assert metrics
    assert 0 < metrics.arrival_time_ns <= metrics.first_scheduled_time_ns
    assert metrics.first_scheduled_time_ns <= metrics.first_token_time_ns
    assert metrics.first_token_time_ns <= metrics.last_token_time_ns
    # Blocks of 16 tokens; the last token's KV is not needed.
    blocks = -(-(len(ids) + 4) // 16)
    assert metrics.kv_cache_alloc_new_blocks == blocks
    assert metrics.kv_cache_alloc_total_blocks == blocks
    assert metrics.kv_cache_reused_blocks == 0
    assert metrics.acceptance_rate == 0
    assert (metrics.total_draft_tokens, metrics.total_accepted_draft_tokens) == (0, 0)
    (again,) = await torch_mesh.client.complete([prompt], **shape)
    assert again.started
    assert again.started.prompt_token_ids == ()
    assert again.perf_metrics
    assert again.perf_metrics.kv_cache_reused_blocks == (len(ids) - 1) // 16
    assert again.perf_metrics.kv_cache_alloc_total_blocks == blocks - (len(ids) - 1) // 16


async def test_refusal_names_the_field_of_the_client(torch_mesh: Mesh) -> None:
    (item,) = await torch_mesh.client.complete(["x"], context_logits=True, generation_logits=True)
    assert isinstance(item.error, InvalidField)
    assert "output.generation_logits" in item.error.message
    assert "at most 300000" in item.error.message
    for option in ({"best_of": 2}, {"logits_post_processor": "mine"}):
        (item,) = await torch_mesh.client.complete(["x"], **option)
        assert isinstance(item.error, UnsupportedField)
        assert f"sampling.{next(iter(option))}" in item.error.message
