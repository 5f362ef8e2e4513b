"""Draws of sampled requests: their seed alone decides, and without one 0, as in TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from compat.triton import Triton, joined
from e2e.mesh import Mesh, router_before

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK = {"text_input": "roll the dice", "max_tokens": 12, "top_k": 40}


async def text(triton: Triton, model: str = "ensemble", **more: int) -> str:
    return joined(await triton.stream(model, ASK | more))


async def texts_of_rows(triton: Triton, seeds: Sequence[int] = ()) -> list[str]:
    """The texts of two equal rows."""
    tensors = {
        "text_input": np.array([["roll the dice"]] * 2, np.object_),
        "max_tokens": np.full((2, 1), 12, np.int32),
        "top_k": np.full((2, 1), 40, np.int32),
    }
    if seeds:
        tensors["seed"] = np.array([[seed] for seed in seeds], np.uint64)
    responses = await triton.stream("ensemble", tensors)
    return [joined([r for r in responses if r.number["batch_index"] == row]) for row in (0, 1)]


async def test_unset_seed_is_zero(triton: Triton) -> None:
    unset = await text(triton)
    assert unset == await text(triton) == await text(triton, seed=0)
    assert unset == await text(triton, "tensorrt_llm_bls")
    assert unset != await text(triton, seed=1)


async def test_rows_with_one_seed_are_equal(triton: Triton) -> None:
    alone = await text(triton, seed=7)
    assert await texts_of_rows(triton, [7, 7]) == [alone, alone]
    assert await texts_of_rows(triton, [7, 8]) == [alone, await text(triton, seed=8)]
    assert await texts_of_rows(triton) == [await text(triton)] * 2


async def test_sequences_of_a_row_draw_apart(triton: Triton) -> None:
    responses = await triton.stream("ensemble", ASK | {"num_return_sequences": 2})
    first, second = (
        joined([r for r in responses if r.number["sequence_index"] == index]) for index in (0, 1)
    )
    assert first != second


async def test_native_items_with_one_seed_draw_apart(mesh: Mesh) -> None:
    first, second = await mesh.client.complete(["a", "a"], max_tokens=12, top_k=40, seed=7)
    assert first.text != second.text


async def test_setting_draws_a_seed_for_each_request(workers: Mesh) -> None:
    flags = ("--triton-default-seed", "none")
    async with (
        router_before(workers, *flags) as mesh,
        Triton(mesh.router.address) as triton,
    ):
        assert await text(triton) != await text(triton)
        assert await text(triton, seed=0) == await text(triton, seed=0)
        first, second = await texts_of_rows(triton)
        assert first != second
        first, second = await texts_of_rows(triton, [7, 7])
        assert first == second


async def test_llmapi_draws_a_seed_for_each_request(workers: Mesh) -> None:
    """Its upstream draws from the state of a generator that all requests advance."""
    models = '{"llm": {"template": "llmapi"}}'
    async with (
        router_before(workers, "--triton-models", models) as mesh,
        Triton(mesh.router.address) as triton,
    ):
        ask = {
            "text_input": np.array(["roll the dice"], np.object_),
            "sampling_param_max_tokens": np.array([12], np.int32),
            "sampling_param_top_k": np.array([40], np.int32),
        }
        first, second = [(await triton.stream("llm", ask))[-1].text for _ in range(2)]
        assert first != second
