"""A mesh in one process serves, stops and fails as one of three processes does."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from e2e.corruption import PACED, corrupted
from e2e.mesh import (
    DEMO,
    INSIDE,
    SIMULATED,
    Mesh,
    eventually,
    mesh_in_one_process,
    running_mesh,
    scrape,
)
from e2e.test_broken_backend import POISON, TORCH, faulty
from processes import ONE_PROCESS, run_to_exit
from trtmesh.chassis.errors import BackendFailed, InvalidField, TrtmeshError, WorkerLost
from trtmesh.client import FinishReason, ItemResult
from trtmesh.v1.router_admin_pb2 import WORKER_STATE_READY

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"prompts": ["def load_json(path):", "naïve 😀 Größe", [70, 71, 72]]},
    "sampled": {"prompts": ["Hello", "there"], "temperature": 0.9, "seed": 7, "top_p": 0.95},
    "several": {
        "prompts": ["import"],
        "num_return_sequences": 3,
        "temperature": 1.1,
        "seed": 3,
    },
    "stop": {"prompts": ["def load_json(path):"], "stop_texts": ["append"], "max_tokens": 100},
    "long": {"prompts": ["word " * 300], "max_tokens": 4},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    """A mesh in one process."""
    async with mesh_in_one_process(*TORCH, env=paced(tmp_path_factory.mktemp("one"))) as mesh:
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def three() -> AsyncIterator[Mesh]:
    """The same model behind a router and a tokenizer of their own processes."""
    async with running_mesh(engine_flags=TORCH) as mesh:
        yield mesh


def paced(folder: Path) -> dict[str, str]:
    """Variables of a process whose longest stream takes ten seconds."""
    return corrupted(folder, PACED.format(seconds=0.005))


def contents(items: Sequence[ItemResult]) -> list[Any]:
    return [[(s.token_ids, s.text, s.finished) for s in item.sequences] for item in items]


@pytest.mark.parametrize("name", ASKED)
async def test_streams_are_those_of_three_processes(one: Mesh, three: Mesh, name: str) -> None:
    asked: dict[str, Any] = {"max_tokens": 40, **ASKED[name]}
    prompts: list[Any] = asked.pop("prompts")
    ours, theirs = [await mesh.client.complete(prompts, **asked) for mesh in (one, three)]
    assert [item.error for item in ours] == [None] * len(prompts)
    assert all(item.sequences for item in ours)
    assert contents(ours) == contents(theirs)


async def test_triton_ensemble_answers_alike(one: Mesh, three: Mesh) -> None:
    ours, theirs = [await asyncio.to_thread(ensemble, mesh) for mesh in (one, three)]
    assert ours == theirs
    assert len(ours["text_output"]) > len("def load_json(path):")


def ensemble(mesh: Mesh) -> Any:
    body = json.dumps({"text_input": "def load_json(path):", "max_tokens": 51}).encode()
    url = f"http://{mesh.router.http_address}/v2/models/ensemble/generate"
    return json.load(urllib.request.urlopen(url, data=body))


async def test_bad_items_end_alone(one: Mesh) -> None:
    prompts: list[Any] = ["x" * (5 << 20), [6144 + 7], "Hello"]
    long, unknown, good = await one.client.complete(prompts, max_tokens=2)
    assert isinstance(long.error, InvalidField)
    assert isinstance(unknown.error, TrtmeshError)
    assert len(good.token_ids) == 2


async def test_stop_and_cancel_free_everything(one: Mesh) -> None:
    endless: dict[str, Any] = {"max_tokens": 2000, "ignore_end_id": True}
    stopped, cancelled = one.open(["one", "two"], **endless), one.open(["three"], **endless)
    await cancelled.tokens_here(5)
    await cancelled.cancel()
    for item in await stopped.stopped_at(5):
        assert item.reason is FinishReason.STOPPED
    await one.idle()


async def test_it_is_shown_and_measured(one: Mesh) -> None:
    status = await one.status()
    (worker,), (tokenizer,) = status.workers, status.tokenizers
    assert (worker.address, tokenizer.address) == ("local", "local")
    assert worker.state == tokenizer.state == WORKER_STATE_READY
    names = {name.split("_")[1] for name in await scrape(one.router) if name.startswith("trtmesh_")}
    assert names >= {"router", "tokenizer", "engine", "tasks"}


async def test_worker_drains_and_resumes(one: Mesh) -> None:
    (worker,) = (await one.status()).workers
    await one.admin.drain_worker(worker.worker)
    held = one.open(["later"], max_tokens=2)
    await eventually(lambda: one.has_stage("place"))
    await one.admin.resume_worker(worker.worker)
    (item,) = await held.result()
    assert (item.error, len(item.token_ids)) == (None, 2)


async def test_worker_inside_is_not_removed(one: Mesh) -> None:
    (worker,) = (await one.status()).workers
    with pytest.raises(InvalidField, match="is inside this router's process and stays; drain it"):
        await one.admin.remove_worker(worker.worker)


async def test_drain_continues_items_elsewhere_by_computing_them_again(tmp_path: Path) -> None:
    async with mesh_in_one_process(*TORCH, env=paced(tmp_path / "local")) as mesh:
        address = (await mesh.start_engine(*TORCH)).address
        await mesh.admin.add_worker(address, wait_seconds=60.0)
        await mesh.admin.drain_worker(address)
        reader = mesh.open(["def load_json(path):"], max_tokens=2000, ignore_end_id=True)
        await reader.tokens_here(5)
        await mesh.admin.resume_worker(address)
        drained = await mesh.admin.drain_worker("local", finish_seconds=0.0)
        assert drained.moved_sequences == 1
        (item,) = await reader.stopped_at(reader.tokens() + 20)
        assert item.error is None
        samples = (await scrape(mesh.router)).items()
        assert not any(count for name, count in samples if "router_handoffs_total" in name)


async def test_prompts_are_not_computed_inside_for_other_workers() -> None:
    """None of them could fetch the KV."""
    async with mesh_in_one_process(
        *SIMULATED, router_flags=("--handoff-enabled", "always")
    ) as mesh:
        decode = await mesh.start_engine(*SIMULATED, "--role", "decode")
        await mesh.admin.add_worker(decode.address, wait_seconds=60.0)
        (item,) = await mesh.client.complete(["word " * 200], max_tokens=20)
        assert (item.error, len(item.token_ids)) == (None, 20)
        samples = (await scrape(mesh.router)).items()
        assert not any(count for name, count in samples if "router_handoffs_total" in name)


async def test_broken_backend_ends_its_items_and_the_process(tmp_path: Path) -> None:
    flag = tmp_path / "one"
    async with mesh_in_one_process(*TORCH, env=faulty(flag)) as mesh:
        options: dict[str, Any] = {"max_tokens": 2000, "ignore_end_id": True}
        reader = mesh.open([[300, 40], [301, 40]], **options)
        await reader.tokens_here(5)
        (poison,) = await mesh.client.complete([[POISON, 5]], max_tokens=20)
        assert isinstance(poison.error, BackendFailed)
        flag.with_suffix(".broken").touch()
        for item in await reader.result():
            assert isinstance(item.error, WorkerLost)
            assert "cannot compute a single token" in item.error.message
            assert item.token_ids
        assert await mesh.router.wait() == 1


async def test_drain_ends_running_streams_first() -> None:
    async with mesh_in_one_process(*TORCH) as mesh:
        reader = mesh.open(["Hello"], max_tokens=60, ignore_end_id=True)
        await reader.tokens_here(5)
        assert await mesh.router.stop() == 0
        (item,) = await reader.result()
        assert len(item.token_ids) == 60


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("BACKEND", "tensorrt_llm", "is tensorrt_llm but the engine of a mesh in one process"),
        ("ROLE", "prefill", "is prefill but the only engine"),
        ("TORCH_DEVICE", "cuda:0,cuda:1", "is cuda:0,cuda:1 but .* runs on one device"),
        ("TRTLLM_SERVICE", "true", "is true but .* has no port for gateways"),
        ("MODEL_DIR", "/nowhere/at/all", "/nowhere/at/all"),
    ],
)
async def test_engine_that_cannot_start_is_named(name: str, value: str, said: str) -> None:
    variable = f"TRTMESH_ENGINE_{name}"
    given = {**INSIDE, "TRTMESH_ENGINE_MODEL_DIR": str(DEMO), variable: value}
    ended = await run_to_exit(ONE_PROCESS, "--port", "0", "--engines", "", env=given)
    assert ended.status in (2, 4)
    *_, last = ended.stderr.splitlines()
    assert re.search(said, last)
    assert variable in last or name == "MODEL_DIR"
