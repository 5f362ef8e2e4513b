"""Readiness of Triton models: their own engine and tokenizer decide, not those of other models."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from compat.plain_http import PlainHttp
from compat.triton import Triton
from e2e.mesh import PATIENT, SIMULATED, Mesh, eventually, running_mesh
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODELS = {
    "large": {"template": "ensemble", "model": "a"},
    "small": {"template": "tensorrt_llm", "model": "b"},
    "small_pre": {"template": "preprocessing", "model": "b"},
    "absent": {"template": "tensorrt_llm_bls", "model": "c"},
    "absent_post": {"template": "postprocessing", "model": "c"},
    "any": {"template": "tensorrt_llm"},
}
READY = ("large", "small", "small_pre")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[Mesh]:
    async def start(mesh: Mesh) -> None:
        await mesh.start_tokenizer()
        for model in ("a", "b"):
            await mesh.start_engine(*SIMULATED, "--model", model)
        served = ("--http-port", "0", "--triton-models", json.dumps(MODELS))
        await mesh.start_router(*PATIENT, *served)
        await mesh.ready(2, 1)

    async with running_mesh(start=start) as mesh:
        yield mesh


async def states(triton: Triton) -> dict[str, tuple[str, str]]:
    index = await triton.client.get_model_repository_index()
    return {model.name: (model.state, model.reason) for model in index.models}


async def test_model_without_an_engine_is_not_ready(mesh: Mesh, triton: Triton) -> None:
    await eventually(triton.client.is_server_ready)
    for name in MODELS:
        assert await triton.client.is_model_ready(name) == (name in READY)
    async with PlainHttp(mesh.router.http_address) as http:
        for name in MODELS:
            status = (await http.get(f"/v2/models/{name}/ready")).status
            assert status == (200 if name in READY else 400)


async def test_index_has_the_reason(triton: Triton) -> None:
    found = await states(triton)
    assert {name for name, (state, _) in found.items() if state == "READY"} == set(READY)
    assert found["large"] == ("READY", "")
    state, reason = found["absent"]
    assert state == "UNAVAILABLE"
    assert "'c'" in reason
    assert "several" in found["any"][1]
    with pytest.raises(InferenceServerException) as refused:
        await triton.infer("absent", {"text_input": "x", "max_tokens": 2})
    assert "'c'" in str(refused.value)


async def test_only_ready_models_are_listed_on_request(mesh: Mesh) -> None:
    async with PlainHttp(mesh.router.http_address) as http:
        reply = await http.post("/v2/repository/index", {"ready": True})
    assert [model["name"] for model in reply.json] == list(READY)


async def test_lost_engine_makes_its_models_unready(mesh: Mesh, triton: Triton) -> None:
    """Last: it ends the engine of model b."""
    mesh.engines[1].signal(signal.SIGKILL)

    async def lost() -> bool:
        return not await triton.client.is_model_ready("small")

    await eventually(lost)
    assert await triton.client.is_model_ready("large")
    # It asks only a tokenizer.
    assert await triton.client.is_model_ready("small_pre")
    assert str(mesh.engines[1].pid) in (await states(triton))["small"][1]
