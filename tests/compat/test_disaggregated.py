"""Handoffs as Triton's clients ask for them, over engines for prefill and for decode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from compat.conftest import FLAGS
from compat.plain_http import PlainHttp
from compat.test_metrics import engine, samples
from compat.triton import Response, Triton
from e2e.mesh import PATIENT, Mesh, eventually, running_mesh, scrape
from process_constants import constants
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = list(range(100, 190))
ASK = {"input_ids": PROMPT, "input_lengths": len(PROMPT), "request_output_len": 9}
CONTEXT = {"parameters": {"request_type": "context_only"}}
GENERATION = {"parameters": {"request_type": "generation_only"}}
STATE = "context_phase_params"
SPLIT = (
    "--handoff-enabled",
    "always",
    *constants(client_lease_seconds=10, handoff_reserve_seconds=60),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[Mesh]:
    async def start(mesh: Mesh) -> None:
        await asyncio.gather(
            mesh.start_tokenizer(),
            mesh.start_engine(*FLAGS, "--role", "prefill"),
            mesh.start_engine(*FLAGS, "--role", "decode"),
        )
        await mesh.start_router(*PATIENT, *SPLIT)
        await mesh.ready(2, 1)

    async with running_mesh(start=start) as mesh:
        yield mesh


def ids(response: Response) -> list[int]:
    return [int(each) for each in response.outputs["output_ids"].ravel()]


async def consumed(mesh: Mesh) -> float:
    """Handoffs whose KV was used."""
    samples = [await scrape(e, side="received", outcome="consumed") for e in mesh.engines]
    return sum(each.get("trtmesh_engine_handoffs_total", 0.0) for each in samples)


async def reported(mesh: Mesh, word: str) -> int:
    """A counter of Triton."""
    key = engine("disaggregated_serving_type", word, "disaggregated_serving_metrics")
    return int((await samples(mesh))[key])


async def test_fleet_with_roles_serves_the_model(triton: Triton) -> None:
    index = await triton.client.get_model_repository_index()
    assert [model.name for model in index.models][5:] == ["disaggregated_serving_bls"]
    await eventually(lambda: triton.client.is_model_ready("disaggregated_serving_bls"))


async def test_prompt_moves_between_the_engines(mesh: Mesh, triton: Triton) -> None:
    before = await consumed(mesh)
    whole = ids(await triton.infer("tensorrt_llm", ASK))
    assert await consumed(mesh) == before + 1
    streamed = ASK | {"streaming": True}
    *data, last = await triton.stream("disaggregated_serving_bls", streamed, empty_final=True)
    assert not last.outputs
    assert [each for response in data for each in ids(response)] == whole[len(PROMPT) :]
    assert await consumed(mesh) == before + 2

    async def are_reported() -> bool:
        return await reported(mesh, "request_count") == before + 2

    await eventually(are_reported)

    async def takes_time() -> bool:
        """Whether transfers add up to a millisecond; some take less."""
        await triton.infer("tensorrt_llm", ASK)
        return await reported(mesh, "kv_cache_transfer_ms") > 0

    await eventually(takes_time)


@pytest.mark.parametrize("streaming", [False, True])
async def test_halves_equal_the_whole(mesh: Mesh, triton: Triton, *, streaming: bool) -> None:
    whole, before = ids(await triton.infer("tensorrt_llm", ASK)), await consumed(mesh)
    tensors = ASK | {"streaming": streaming}
    (first,) = await triton.stream("tensorrt_llm", tensors, **CONTEXT)
    assert first.final
    assert ids(first) == whole[: len(PROMPT) + 1]
    state = first.outputs[STATE]
    assert (state.dtype, state.shape[0]) == (np.uint8, 1)
    second = await triton.stream("tensorrt_llm", tensors | {STATE: state}, **GENERATION)
    tokens = [each for response in second for each in ids(response)]
    assert tokens == (whole[len(PROMPT) :] if streaming else whole)
    assert not any(STATE in response.outputs for response in second)
    assert await consumed(mesh) == before + 1
    await mesh.idle()


async def test_rows_of_a_batch_have_states_of_their_own(mesh: Mesh, triton: Triton) -> None:
    rows = np.array([PROMPT, [*PROMPT[:40], *([0] * 50)]], np.int32)
    lengths = np.array([[90], [40]], np.int32)
    limits = np.array([[9], [9]], np.int32)
    batch = {"input_ids": rows, "input_lengths": lengths, "request_output_len": limits}
    whole = await triton.infer("tensorrt_llm", batch)
    first = await triton.infer("tensorrt_llm", batch, **CONTEXT)
    assert first.outputs[STATE].shape[0] == 2
    halves = batch | {STATE: first.outputs[STATE]}
    second = await triton.infer("tensorrt_llm", halves, **GENERATION)
    assert ids(second) == ids(whole)
    await mesh.idle()


async def test_outputs_may_be_requested(triton: Triton) -> None:
    names = ["output_ids", "sequence_length"]
    only = await triton.infer("tensorrt_llm", ASK, outputs=names, **CONTEXT)
    assert set(only.outputs) == set(names)
    state = await triton.infer("tensorrt_llm", ASK, outputs=[*names, STATE], **CONTEXT)
    assert set(state.outputs) == {*names, STATE}


async def test_halves_over_http(mesh: Mesh) -> None:
    assert mesh.router.http_address
    async with PlainHttp(mesh.router.http_address) as http:
        path, body = "/v2/models/tensorrt_llm/generate", {**ASK, **CONTEXT["parameters"]}
        whole = (await http.post(path, ASK)).json["output_ids"]
        first = (await http.post(path, body)).json
        assert first["output_ids"] == whole[: len(PROMPT) + 1]
        halves = {**ASK, **GENERATION["parameters"], STATE: first[STATE]}
        assert (await http.post(path, halves)).json["output_ids"] == whole
    await mesh.idle()


async def test_states_are_checked(triton: Triton) -> None:
    first = await triton.infer("tensorrt_llm", ASK, **CONTEXT)
    state = first.outputs[STATE]
    changed = state.copy()
    changed[0, 5] ^= 255
    for tensors, parameters in (
        (ASK, GENERATION),
        (ASK | {STATE: state}, {}),
        (ASK | {STATE: state}, CONTEXT),
        (ASK | {STATE: state[:, :-9]}, GENERATION),
        (ASK | {STATE: np.zeros((1, 4), np.uint8)}, GENERATION),
        (ASK | {STATE: state, "input_ids": [*PROMPT[:-1], 7]}, GENERATION),
    ):
        with pytest.raises(InferenceServerException, match=STATE):
            await triton.infer("tensorrt_llm", tensors, **parameters)


async def test_timeout_ends_a_second_half(mesh: Mesh, triton: Triton) -> None:
    ask: dict[str, Any] = ASK | {"request_output_len": 5000, "streaming": True}
    first = await triton.infer("tensorrt_llm", ASK, **CONTEXT)
    tensors = ask | {STATE: first.outputs[STATE]}
    *_, last = await triton.stream("tensorrt_llm", tensors, timeout=300_000, **GENERATION)
    assert "timeout" in last.error
    await mesh.idle()


async def test_model_of_both_halves_takes_no_phase(triton: Triton) -> None:
    (response,) = await triton.stream("disaggregated_serving_bls", ASK, **CONTEXT)
    assert "request_type" in response.error
