"""Registered adapters on real processes: routers, and simulated engines whose tokens depend on the version."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from compat.plain_http import PlainHttp
from e2e.mesh import ENDLESS, INSIDE, PATIENT, SIMULATED, Mesh, eventually, running_mesh
from router.adapters.contents_of import content
from trtmesh.chassis.errors import AdapterNotFound
from trtmesh.client import AdminClient, Client
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_admin_pb2 as admin_pb

ENGINES = (*SIMULATED, "--simulated-adapters-slots", "2", "--simulated-adapters-host-adapters", "2")
"""Engine flags: two adapters fit."""

PROMPT = [[11, 12, 13]]


async def add(mesh: Mesh, name: str, weights: bytes, **more: Any) -> admin_pb.Adapter:
    asked = admin_pb.AddAdapterRequest(name=name, **more)
    return await mesh.admin.upload_adapter(asked, content(weights))


async def tokens(client: Client, adapter: str | None, count: int = 12) -> Sequence[int]:
    options: dict[str, Any] = {} if adapter is None else {"adapter": adapter}
    (item,) = await client.complete(PROMPT, text=False, max_tokens=count, seed=3, **options)
    assert item.error is None
    return item.token_ids


async def test_adapters_outlive_evictions_and_workers() -> None:
    """Five adapters on workers with room for two, then on workers that take the place of killed ones."""
    async with running_mesh(tokenizers=0, engines=2, engine_flags=ENGINES) as mesh:
        names = [f"a{number}" for number in range(5)]
        for name in names:
            await add(mesh, name, name.encode())
        first = {name: await tokens(mesh.client, name) for name in names}
        assert len({*map(tuple, first.values()), tuple(await tokens(mesh.client, None))}) == 6
        again = await asyncio.gather(*(tokens(mesh.client, name) for name in names * 4))
        assert again == [first[name] for name in names * 4]
        for engine in mesh.engines[:]:
            engine.signal(signal.SIGKILL)
            await engine.wait()
            await mesh.start_engine(*ENGINES, port=int(engine.address.rpartition(":")[2]))
        await mesh.ready(2)
        assert [await tokens(mesh.client, name) for name in names] == list(first.values())
        await mesh.idle()


async def test_adapter_is_a_model_of_its_base_for_openais_clients() -> None:
    async with (
        running_mesh(tokenizers=0, engine_flags=ENGINES, router_env=INSIDE) as mesh,
        PlainHttp(mesh.router.http_address) as http,
    ):
        await add(mesh, "mine", b"weights")
        base, adapter = (await http.get("/v1/models")).json["data"]
        told = {"id": "mine", "parent": "demo", "root": "demo"}
        assert adapter == base | told == (await http.get("/v1/models/mine")).json
        body = {"prompt": PROMPT, "max_tokens": 12, "seed": 3, "return_token_ids": True}
        for model, name in (("mine", "mine"), ("demo", None)):
            asked = {"model": model, "temperature": 0, **body}
            answer = (await http.post("/v1/completions", asked)).json
            (choice,) = answer["choices"]
            expected = [*await tokens(mesh.client, name)]
            assert (answer["model"], choice["token_ids"]) == (model, expected)


async def test_stream_keeps_its_version_while_new_requests_get_the_new_one() -> None:
    async with running_mesh(
        tokenizers=0, engines=2, engine_flags=ENGINES, router_flags=PATIENT
    ) as mesh:
        await add(mesh, "a", b"old")
        reader = mesh.open(PROMPT, text=False, max_tokens=ENDLESS, seed=3, adapter="a")
        await reader.tokens_here(10)
        await add(mesh, "a", b"new")
        new = await tokens(mesh.client, "a")
        # The worker with the stream dies; the other one gets the old version.
        (request,) = (await mesh.admin.list_requests()).requests
        addresses = {each.worker: each.address for each in (await mesh.status()).workers}
        engines = {engine.address: engine for engine in mesh.engines}
        killed = engines[addresses[request.items[0].worker]]
        killed.signal(signal.SIGKILL)
        (item,) = await reader.stopped_at(reader.tokens() + 100)
        assert item.error is None
        assert await tokens(mesh.client, "a") == new != item.token_ids[: len(new)]
        # The first content again is the old version.
        await add(mesh, "a", b"old")
        assert await tokens(mesh.client, "a", len(item.token_ids)) == item.token_ids
        await mesh.idle()


async def test_routers_of_a_directory_serve_each_others_adapters(tmp_path: Path) -> None:
    shared = ("--adapters-directory", str(tmp_path))
    async with running_mesh(
        tokenizers=0, engines=1, engine_flags=ENGINES, router_flags=shared
    ) as mesh:
        other = await mesh.start(
            "router", "--port", "0", "--engines", mesh.engines[0].address, *shared
        )
        async with Client(other.address) as client, AdminClient(other.admin_address) as admin:
            await add(mesh, "a", b"shared", pinned=True)

            async def known() -> bool:
                adapters = (await admin.list_adapters()).adapters
                return [len(adapter.workers) for adapter in adapters] == [1]

            await eventually(known)
            assert await tokens(client, "a") == await tokens(mesh.client, "a")
            for name in ("b", "c", "d"):
                added = await add(mesh, name, name.encode())
                assert await tokens(client, name) == await tokens(mesh.client, name)
                await mesh.admin.remove_adapter(added.id)
            # A number that a client's weights bring to one router is known to the other.
            lora = pb.LoraConfig(id=7)
            lora.weights.MergeFrom(pb.Tensor(data_type=pb.DATA_TYPE_FP16, shape=[1, 1], data=b"ab"))
            rows = b"".join(n.to_bytes(4, "little") for n in (1, 0, 8))
            lora.config.MergeFrom(pb.Tensor(data_type=pb.DATA_TYPE_INT32, shape=[1, 3], data=rows))
            (brought,) = await mesh.client.complete(
                PROMPT, text=False, max_tokens=12, seed=3, adapter=lora
            )

            async def shared_by_now() -> bool:
                return len((await admin.list_adapters()).adapters) == 2

            await eventually(shared_by_now)
            (item,) = await client.complete(PROMPT, text=False, max_tokens=12, seed=3, adapter=7)
            assert item.token_ids == brought.token_ids
            await admin.remove_adapter(7)

            async def forgotten() -> bool:
                (item,) = await mesh.client.complete(PROMPT, text=False, max_tokens=1, adapter=7)
                return isinstance(item.error, AdapterNotFound)

            await eventually(forgotten)


@pytest.mark.parametrize("clients", [12, pytest.param(24, marks=pytest.mark.soak)])
async def test_more_adapters_at_once_than_slots_wait_for_their_turn(clients: int) -> None:
    async with running_mesh(tokenizers=0, engines=2, engine_flags=ENGINES) as mesh:
        names = [f"a{number}" for number in range(6)]
        for name in names:
            await add(mesh, name, name.encode())
        alone = {name: await tokens(mesh.client, name) for name in names}
        asked = [names[number % len(names)] for number in range(clients)]
        together = await asyncio.gather(*(tokens(mesh.client, name) for name in asked))
        assert together == [alone[name] for name in asked]
        await mesh.idle()
