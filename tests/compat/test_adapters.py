"""LoRA adapters as Triton's clients send them: first with weights, then by number, on any worker."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from chaos.tiny_adapters import OF_SMALL, TinyAdapter, tiny_adapter
from compat.plain_http import PlainHttp
from compat.test_http_client import Http
from compat.triton import Triton, joined
from e2e.mesh import (
    PATIENT,
    SMALL,
    Mesh,
    decode,
    eventually,
    router_before,
    running_mesh,
    tokenizer_of,
)
from trtmesh.v1 import router_admin_pb2 as pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

ONE, OTHER = (tiny_adapter(seed, 8, of=OF_SMALL) for seed in (1, 2))
FLAGS = (
    *(*SMALL, "--torch-threads", "1", "--torch-kv-cache-tokens", "8192"),
    *("--torch-adapters-host-bytes", str(2**28)),
)
PROMPT = "def load_config(path, default=None):\n"
TOKENS = 12
UNKNOWN = "LoRA task {} not found in cache. Please send LoRA weights with request"


def weights(adapter: TinyAdapter) -> dict[str, Any]:
    """The tensors of a request that brings an adapter."""
    rows, config = adapter.arrays
    return {
        "lora_weights": np.frombuffer(rows.data, np.float16).reshape(1, *rows.shape),
        "lora_config": np.frombuffer(config.data, np.int32).reshape(1, *config.shape),
    }


def by_number(number: int) -> dict[str, Any]:
    return {"lora_task_id": np.array([[number]], np.uint64)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[Mesh]:
    async with running_mesh(engines=2, engine_flags=FLAGS, router_flags=PATIENT) as mesh:
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def triton(mesh: Mesh) -> AsyncIterator[Triton]:
    async with Triton(mesh.router.address) as triton:
        yield triton


async def text(triton: Triton, model: str, more: Mapping[str, Any]) -> str:
    """The greedy continuation of PROMPT."""
    if model != "tensorrt_llm":
        return joined(
            await triton.stream(
                model,
                {
                    "text_input": PROMPT,
                    "max_tokens": TOKENS,
                    "exclude_input_in_output": True,
                    **more,
                },
            )
        )
    ids = tokenizer_of().encode(PROMPT).ids
    tensors = {
        "input_ids": np.array([ids], np.int32),
        "input_lengths": np.array([[len(ids)]], np.int32),
        "request_output_len": np.array([[TOKENS]], np.int32),
        "exclude_input_in_output": np.array([[True]]),
        **more,
    }
    responses = await triton.stream(model, tensors)
    assert not [response.error for response in responses if response.error]
    return decode([int(i) for r in responses for i in r.outputs["output_ids"].flatten()])


@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble", "tensorrt_llm_bls"])
async def test_first_with_weights_then_by_number(triton: Triton, model: str) -> None:
    number = {"tensorrt_llm": 1, "ensemble": 2, "tensorrt_llm_bls": 3}[model]
    base = await text(triton, model, {})
    first = await text(triton, model, by_number(number) | weights(ONE))
    assert first != base
    # Both workers get some of these.
    later = await asyncio.gather(*(text(triton, model, by_number(number)) for _ in range(4)))
    assert set(later) == {first}
    assert await text(triton, model, {}) == base


async def test_new_weights_replace_those_of_a_number(triton: Triton) -> None:
    docstrings = await text(triton, "ensemble", by_number(10) | weights(ONE))
    tests = await text(triton, "ensemble", by_number(10) | weights(OTHER))
    assert tests != docstrings
    assert {await text(triton, "ensemble", by_number(10)) for _ in range(4)} == {tests}


async def test_unknown_number_is_refused_in_tritons_words(triton: Triton) -> None:
    (response,) = await triton.stream(
        "ensemble", {"text_input": "a", "max_tokens": 2, **by_number(99)}
    )
    assert UNKNOWN.format(99) in response.error


async def holders(mesh: Mesh, number: int) -> set[str]:
    """The workers that report an adapter."""
    for adapter in (await mesh.admin.list_adapters()).adapters:
        if adapter.id == number:
            return set(adapter.workers)
    return set()


@pytest.mark.parametrize(
    ("model", "number"),
    [
        ("ensemble", 21),
        pytest.param("tensorrt_llm", 22, marks=pytest.mark.soak),
        pytest.param("tensorrt_llm_bls", 23, marks=pytest.mark.soak),
    ],
)
async def test_number_is_served_by_a_worker_that_never_had_the_weights(
    mesh: Mesh, triton: Triton, model: str, number: int
) -> None:
    first = await text(triton, model, by_number(number) | weights(ONE))
    (worker,) = await holders(mesh, number)
    await mesh.admin.drain_worker(worker, finish_seconds=0)
    try:
        assert await text(triton, model, by_number(number)) == first
    finally:
        await mesh.admin.resume_worker(worker)
    assert len(await holders(mesh, number)) == 2


async def test_number_brought_to_one_router_is_served_by_another(
    mesh: Mesh, tmp_path: Path
) -> None:
    """The routers share a directory; the worker that had the weights takes nothing more."""
    flags = ("--adapters-directory", str(tmp_path))
    async with router_before(mesh, *flags) as one:
        async with Triton(one.router.address) as triton:
            first = await text(triton, "ensemble", by_number(31) | weights(ONE))
        (worker,) = await holders(one, 31)
    async with router_before(mesh, *flags) as other:
        await other.admin.drain_worker(worker, finish_seconds=0)
        try:
            async with Triton(other.router.address) as triton:
                assert await text(triton, "ensemble", by_number(31)) == first
        finally:
            await other.admin.resume_worker(worker)


async def test_http_clients_send_weights_then_the_number(mesh: Mesh, triton: Triton) -> None:
    """tritonclient.http with binary tensors, and plain JSON for the number."""
    prompt = {"text_input": PROMPT, "max_tokens": TOKENS, "exclude_input_in_output": True}
    http = Http(mesh.router.http_address)
    result = await http.infer("ensemble", {**prompt, **by_number(41), **weights(ONE)})
    first = result.as_numpy("text_output").item().decode()
    assert first == await text(triton, "ensemble", by_number(41))
    async with PlainHttp(mesh.router.http_address) as plain:
        path = "/v2/models/ensemble/generate"
        answer = await plain.post(path, {**prompt, "lora_task_id": 41})
        assert answer.json["text_output"] == first
        unknown = await plain.post(path, {**prompt, "lora_task_id": 98})
        assert UNKNOWN.format(98) in unknown.json["error"]


async def test_weights_under_an_operators_number_are_refused(mesh: Mesh, triton: Triton) -> None:
    await mesh.admin.upload_adapter(pb.AddAdapterRequest(id=51, name="official"), ONE.content)
    expected = await text(triton, "ensemble", by_number(51))
    (response,) = await triton.stream(
        "ensemble",
        {"text_input": "a", "max_tokens": 2, **by_number(51), **weights(OTHER)},
    )
    assert "'official'" in response.error
    assert await text(triton, "ensemble", by_number(51)) == expected


async def test_adapter_survives_the_only_worker_that_held_it() -> None:
    """The worker that takes its place never got the weights from a client."""
    async with (
        running_mesh(engine_flags=FLAGS, router_flags=PATIENT) as mesh,
        Triton(mesh.router.address) as triton,
    ):
        first = await text(triton, "ensemble", by_number(1) | weights(ONE))
        (killed,) = mesh.engines
        killed.signal(signal.SIGKILL)
        await killed.wait()
        await mesh.start_engine(*FLAGS, port=int(killed.address.rpartition(":")[2]))
        await mesh.ready(1, 1)
        assert await text(triton, "ensemble", by_number(1)) == first


async def test_full_cache_is_told_in_tritons_words() -> None:
    """The only adapter that fits in the worker's memory is pinned."""
    flags = (*FLAGS[:-1], str(250_000))
    async with (
        running_mesh(engine_flags=flags, router_flags=PATIENT) as mesh,
        Triton(mesh.router.address) as triton,
    ):
        adapter = pb.AddAdapterRequest(id=1, name="kept", pinned=True)
        await mesh.admin.upload_adapter(adapter, ONE.content)

        async def is_pinned() -> bool:
            (entry,) = (await mesh.admin.list_adapters()).adapters
            return any(place.pinned for each in entry.versions for place in each.residencies)

        await eventually(is_pinned)
        kept = await text(triton, "ensemble", by_number(1))
        (response,) = await triton.stream(
            "ensemble",
            {"text_input": "a", "max_tokens": 2, **by_number(2), **weights(OTHER)},
        )
        assert "Cache is full. There are no done tasks to evict" in response.error
        assert await text(triton, "ensemble", by_number(1)) == kept
